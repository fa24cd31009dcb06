"""Every recipe resolves for 8 GPUs, and has a version for a CPU; `examples/cpu/run.py` lists them."""

import warnings
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.conftest import ROOT
from tests.e2e import jobs
from tests.launched_scripts import LaunchedScripts
from tests.reward_models import save_reward_model
from verl.checks.findings import Findings
from verl.checks.loaded import check_engine_and_algorithm
from verl.checks.machine import early_findings
from verl.config import load_config
from verl.config.check import check_can_start
from verl.config.distillation import teachers
from verl.trainer.ppo.preparation import prepare_run
from verl.utils.external_code import load_module

cpu = load_module(str(ROOT / "examples" / "cpu" / "run.py"), "test")
ABOUT_DEVICES = {"trainer.device", "trainer.n_gpus_per_node"}
CHOSEN = {  # recipe: estimator, loss, (clip_ratio_low, clip_ratio_high)
    "grpo": ("grpo", "vanilla", (0.2, 0.2)),
    "dr_grpo": ("grpo", "vanilla", (0.2, 0.2)),
    "dapo": ("grpo", "vanilla", (0.2, 0.28)),
    "ppo": ("gae", "vanilla", (0.2, 0.2)),
    "gspo": ("grpo", "gspo", (3e-4, 4e-4)),
    "rloo": ("rloo", "vanilla", (0.2, 0.2)),
    "remax": ("remax", "vanilla", (0.2, 0.2)),
    "reinforce_plus_plus": ("reinforce_plus_plus", "vanilla", (0.2, 0.2)),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", "vanilla", (0.2, 0.2)),
    "cispo": ("grpo", "cispo", (10.0, 0.2)),
    "sapo": ("grpo", "sapo", (0.2, 0.2)),
    "gpg": ("gpg", "gpg", (0.2, 0.2)),
    "opo": ("opo", "vanilla", (0.2, 0.2)),
    "gmpo": ("grpo", "geo_mean", (0.4, 0.4)),
    "dppo": ("grpo", "dppo_tv", (0.15, 0.15)),
    "clip_cov": ("grpo", "clip_cov", (1.0, 1.0)),
    "kl_cov": ("grpo", "kl_cov", (0.2, 0.2)),
    "otb": ("optimal_token_baseline", "vanilla", (0.2, 0.2)),
    "gdpo": ("gdpo", "vanilla", (0.2, 0.2)),
    "scalerl": ("reinforce_plus_plus_baseline", "cispo", (10.0, 4.0)),
}


@pytest.fixture
def launched(tmp_path):
    return LaunchedScripts(tmp_path)


def load(arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_config(arguments)


def load_supported(arguments):
    config = load(arguments)
    check_can_start(config)
    return config


def test_every_script_with_the_shared_settings_is_a_recipe():
    scripts = [p for p in (ROOT / "examples").rglob("*.sh") if "/../qwen3_8b.sh" in p.read_text()]
    assert {str(p.relative_to(ROOT / "examples")) for p in scripts} == set(cpu.RECIPES.values())
    assert all(10 <= len(p.read_text().splitlines()) <= 46 for p in scripts)


@pytest.mark.parametrize("name", cpu.RECIPES)
def test_a_recipe_resolves_for_eight_gpus(name, launched):
    arguments, _ = launched(f"examples/{cpu.RECIPES[name]}", NGPUS_PER_NODE="8")
    config, found = load_supported(arguments), Findings()
    assert config.trainer.n_gpus_per_node == 8
    check_engine_and_algorithm(config, found)
    assert not found.errors and not [row for row in found.rows if row.status.name == "WARN"]


@pytest.mark.parametrize("name", CHOSEN)
def test_a_recipe_chooses_the_algorithm_of_its_name(name, launched):
    config = load_supported(launched(f"examples/{cpu.RECIPES[name]}")[0])
    actor = config.actor_rollout_ref.actor
    clip = (actor.clip_ratio_low, actor.clip_ratio_high)
    assert (config.algorithm.adv_estimator, actor.policy_loss.loss_mode, clip) == CHOSEN[name]


def test_divergence_and_turns_choose_the_other_form(launched):
    config = load(launched("examples/dppo_trainer/run_qwen3_8b_fsdp.sh", DIVERGENCE="kl")[0])
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "dppo_kl"
    assert config.actor_rollout_ref.actor.clip_ratio_high == 0.05
    config = load(launched("examples/otb_trainer/run_qwen3_8b_fsdp.sh", TURNS="many")[0])
    assert config.algorithm.adv_estimator == "tir_optimal_token_baseline"


@pytest.mark.parametrize("name", cpu.RECIPES)
def test_the_preflight_of_a_recipe_refuses_nothing_but_the_absent_gpus(name, launched, tmp_path):
    jobs.prepare(tmp_path)
    save_reward_model(tmp_path / "reward_model", AutoConfig.from_pretrained(tmp_path / "model"), tmp_path / "model")
    for copy in ("warm", "teacher"):
        (tmp_path / copy).symlink_to(tmp_path / "model")
    sizes = cpu.variables(name, tmp_path) | {"NGPUS_PER_NODE": "8", "DEVICE": "gpu"}
    scoring = [o for o in cpu.overrides(name, tmp_path, 1, 1) if o.startswith("reward.")]
    local = [f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.logger=[console]", *scoring]
    arguments, _ = launched(f"examples/{cpu.RECIPES[name]}", *local, **sizes)
    config = load_supported(arguments)
    prepare_run(config, found := early_findings(config))
    assert {row.name for row in found.rows if row.status.name == "BAD"} <= ABOUT_DEVICES


@pytest.mark.parametrize("name", cpu.RECIPES)
def test_a_recipe_resolves_for_a_cpu(name, launched, tmp_path):
    added = cpu.overrides(name, tmp_path, seed=1, steps=20)
    arguments, _ = launched(f"examples/{cpu.RECIPES[name]}", *added, **cpu.variables(name, tmp_path))
    config = load_supported(arguments)
    assert config.trainer.device == "cpu" and config.trainer.total_training_steps == 20
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 512
    assert config.actor_rollout_ref.model.path == str(tmp_path / "warm")
    taught_by = [str(tmp_path / "teacher")] if name == cpu.DISTILLATION else []
    assert [teacher.path for teacher in teachers(config.distillation)] == taught_by


def test_the_generation_script_resolves(launched):
    arguments, _ = launched("examples/generation/run_qwen3_8b.sh", OUTPUT_FILE="/answers.parquet")
    config = load_supported(arguments)
    assert config.data.output_path == "/answers.parquet"


@pytest.mark.parametrize(
    ("answer", "parts"),
    [("It is 5.\n#### 5", (1, 1)), ("It is 5.", (1, 0)), ("#### 6", (0, 1)), ("none", (0, 0))],
)
def test_the_reward_of_gdpo_has_two_parts(answer, parts):
    reward = load_module(str(Path(ROOT) / "examples" / "gdpo_trainer" / "reward.py"), "test")
    score = reward.compute_score("openai/gsm8k", answer, "5")
    assert (score["accuracy"], score["format"]) == parts and score["score"] == sum(parts) / 2


@pytest.mark.parametrize(
    ("backend", "setting"),
    [("vllm", {"hf_overrides": {"head_dtype": "float32"}}), ("sglang", {"enable_fp32_lm_head": True})],
)
def test_the_recipe_with_a_float32_head_has_it_in_the_trainer_and_in_the_rollout(backend, setting, launched):
    script = f"examples/{cpu.RECIPES['scalerl']}"
    arr = load(launched(script, INFER_BACKEND=backend)[0]).actor_rollout_ref
    assert arr.actor.fsdp_config.head_dtype == "float32" and arr.rollout.engine_kwargs[backend] == setting
