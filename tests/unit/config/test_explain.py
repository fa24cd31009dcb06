"""The command that explains keys, the page generated from the schema, and the dispatcher of verbs."""

import subprocess
import sys
from pathlib import Path

import pytest

from verl import cli
from verl.config import DPOConfig, RewardModelConfig, RunConfig, SFTConfig, explain, schema

REPO = Path(__file__).parents[3]


def test_the_reference_page_is_current():
    assert (REPO / explain.PAGE).read_text() == explain.reference_page(), (
        "run: verl config markdown > docs/reference/config.md"
    )


@pytest.mark.parametrize("root", [RunConfig, SFTConfig, DPOConfig, RewardModelConfig])
def test_every_key_is_documented_in_a_sentence(root):
    keys = [key for key in schema.keys(root).values() if key.path.rpartition(".")[2] != "extra" or key.doc]
    bad = [key.path for key in keys if not key.doc.endswith(".") or len(key.doc) < 8]
    assert bad == []


def test_explain_tells_type_default_and_old_names(capsys):
    assert cli.main(["config", "explain", "actor_rollout_ref.actor.ppo_micro_batch_size"]) == 0
    text = capsys.readouterr().out
    assert "alias of actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu" in text
    assert "int or null" in text and "at least 1" in text


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("skip.rollout.action", "sampled by other weights"),
        ("actor_rollout_ref.rollout.full_determinism", "still to come"),
        ("data.return_raw_chat", "inert"),
        ("critic.ppo_epochs", "that of actor_rollout_ref.actor.ppo_epochs"),
        ("data.messages_key", "conversation"),
        ("algorithm.kl_ctrl", "algorithm.kl_ctrl.horizon"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.x", "dict"),
    ],
)
def test_explain_covers_every_class_of_key(key, words, capsys):
    assert cli.main(["config", "explain", key]) == 0
    assert words in capsys.readouterr().out


def test_explain_of_an_unknown_key_suggests_and_fails(capsys):
    assert cli.main(["config", "explain", "critic.ppo_epoch"]) == 2
    assert "'critic.ppo_epochs'" in capsys.readouterr().err


def test_print_shows_values_with_origins(capsys):
    assert cli.main(["config", "print", "data.train_batch_size=8", "data.seed=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "data.seed=2  # override 'data.seed=2'" in lines
    assert "data.max_prompt_length=512  # default" in lines
    assert "actor_rollout_ref.rollout.prompt_length=512  # follows data.max_prompt_length" in lines
    assert len(lines) == len([key for key in schema.keys(RunConfig).values() if key.doc])


def test_print_changed_leaves_defaults_out(capsys):
    assert cli.main(["config", "print", "--changed", "optim.lr=1e-4", "--config-name=sft_trainer"]) == 0
    assert capsys.readouterr().out == "optim.lr=0.0001  # override 'optim.lr=1e-4'\n"


@pytest.mark.parametrize("arguments", [["config", "print", "data.x=1"], ["confg"], ["config", "prnt"]])
def test_a_mistake_is_one_line_and_exit_code_2(arguments):
    done = subprocess.run([sys.executable, "-m", "verl.cli", *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "did you mean" in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["config", "--help"], ["config", "explain", "--help"]])
def test_help_names_what_can_be_asked(arguments, capsys):
    assert cli.main(arguments) == 0
    assert "config" in capsys.readouterr().out


def test_the_import_paths_of_other_people_s_code_lead_to_our_classes():
    from verl.config import CheckpointConfig, FSDPEngineConfig
    from verl.trainer.config import AlgoConfig
    from verl.trainer.config import CheckpointConfig as theirs
    from verl.workers.config import FSDPEngineConfig as engine
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, RolloutConfig

    assert theirs is CheckpointConfig and engine is FSDPEngineConfig
    assert AlgoConfig().gamma == 1.0 and HFModelConfig(path="m").path == "m"
    assert RolloutConfig().n == 1 and FSDPOptimizerConfig().lr == 1e-3


def test_the_section_of_rollout_correction_lists_its_presets_with_their_overrides(capsys):
    assert cli.main(["config", "explain", "algorithm.rollout_correction"]) == 0
    lines, section = capsys.readouterr().out.splitlines(), "algorithm.rollout_correction"
    assert (
        f"    bypass_pg_is: {section}.rollout_is=sequence {section}.bypass_mode=true {section}.loss_type=reinforce"
        in lines
    )
    assert sum(line.startswith("    ") for line in lines) == 18 and "    disabled: none" in lines


def test_presets_of_the_rollout_correction_are_classmethods():
    from verl.trainer.config import RolloutCorrectionConfig as Correction

    assert Correction.disabled() == Correction()
    assert Correction.decoupled_token_is(threshold=3.0).rollout_is_threshold == 3.0
    geo = Correction.bypass_pg_geo_rs_seq_tis(is_threshold=1.5)
    assert (geo.bypass_mode, geo.loss_type, geo.rollout_is, geo.rollout_is_threshold) == (
        True,
        "reinforce",
        "sequence",
        1.5,
    )
    assert (geo.rollout_rs, geo.rollout_rs_threshold) == ("seq_mean_k1", "0.999_1.001")
    assert Correction.decoupled_k3_rs(0.02).rollout_rs_threshold == 0.02


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["bf16"], "actor_rollout_ref.actor.fsdp_config.model_dtype"),
        (["warmup"], "actor_rollout_ref.actor.optim.lr_warmup_steps"),
        (["grad", "clip"], "actor_rollout_ref.actor.optim.clip_grad"),
        (["grad clip"], "optim.clip_grad (sft_trainer)"),
        (["max", "length"], "data.max_response_length"),
        (["max-length"], "data.max_length (sft_trainer)"),
        (["learning", "rate"], "actor_rollout_ref.actor.optim.lr"),
    ],
)
def test_explain_knows_ordinary_words(words, key, capsys):
    assert cli.main(["config", "explain", *words]) == 0
    assert f"{key}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb", "setting"),
    [("train", "data.seed=3"), ("sft", "data.max_length=8"), ("dpo", "loss.beta=0.5"), ("reward-model", "data.seed=4")],
)
def test_print_and_explain_take_the_verb_that_recommends_them(verb, setting, capsys):
    key = setting.partition("=")[0]
    assert cli.main(["config", "print", verb, setting, "--changed"]) == 0
    assert setting in capsys.readouterr().out
    assert cli.main(["config", "explain", verb, key]) == 0
    assert capsys.readouterr().out.startswith(f"{key}: ")
