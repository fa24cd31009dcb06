"""What a cheap import leaves unloaded."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "pyarrow", "ray", "vllm", "hydra", "omegaconf", "rich", "jinja2", "wandb")
ENGINES = ("ray", "vllm", "sglang", "megatron", "veomni", "wandb", "mlflow", "tensorboard", "hydra", "omegaconf")


def loaded_by(statement: str, watched: tuple[str, ...]) -> list[str]:
    """Which of the watched top-level modules a fresh interpreter holds after `statement`."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps([m for m in {watched!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_verl_loads_nothing_but_the_standard_library():
    assert loaded_by("import verl", (*HEAVY, "yaml")) == []


def test_the_command_line_answers_without_heavy_libraries():
    assert loaded_by("import verl.cli; verl.cli.usage()", HEAVY) == []


@pytest.mark.parametrize("word", ["--help", "trainer.n_gpu_per_node=8"], ids=["help", "a mistyped key"])
def test_help_and_mistakes_of_a_plan_are_said_without_heavy_libraries(word: str):
    statement = f"import contextlib, verl.cli\nwith contextlib.suppress(SystemExit): verl.cli.main(['plan', {word!r}])"
    assert loaded_by(statement, HEAVY) == []


def test_a_configuration_loads_without_heavy_libraries():
    statement = (
        "import verl.config\nverl.config.load_config(['actor_rollout_ref.model.path=/m', 'data.train_files=/t'])"
    )
    assert loaded_by(statement, HEAVY) == []


@pytest.mark.parametrize("module", ["verl.observe.tracking", "verl.trainer.main_ppo", "verl.trainer.sft_trainer"])
def test_trackers_and_engines_load_only_when_a_run_asks_for_them(module):
    assert loaded_by(f"import {module}", ENGINES) == []


def test_the_installed_package_is_this_one():
    from pathlib import Path

    import verl

    assert Path(verl.__file__).resolve().parent == Path(__file__).resolve().parents[3] / "verl"
