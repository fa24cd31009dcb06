"""The programs of asynchronous training by their old names: presets, keys, and what is refused by name."""

import importlib
import subprocess
import sys

import pytest

from verl.config import ConfigError, RunConfig, load_config
from verl.config.asynchronous import staleness
from verl.experimental.fully_async_policy import fully_async_main
from verl.experimental.one_step_off_policy import main_ppo as one_step_off
from verl.trainer import main_ppo

ARR = "actor_rollout_ref"
OLD = ["data.train_batch_size=0", "data.gen_batch_size=1", f"{ARR}.actor.ppo_mini_batch_size=32", "rollout.nnodes=1"]
OLD += ["rollout.n_gpus_per_node=4", "rollout.n=8", "rollout.total_rollout_steps=1300", "rollout.test_freq=5"]


@pytest.mark.filterwarnings("ignore")
def test_the_keys_of_the_old_program_say_the_same_as_ours():
    ours = load_config(
        [
            "trainer.v1.trainer_mode=separate_async", "async_training.staleness_threshold=0.1",
            "async_training.trigger_parameter_sync_step=4", "async_training.require_batches=1",
            f"{ARR}.hybrid_engine=False", f"{ARR}.rollout.nnodes=1", f"{ARR}.rollout.n_gpus_per_node=4",
            f"{ARR}.rollout.n=8", f"{ARR}.actor.ppo_mini_batch_size=32", "data.gen_batch_size=1",
            "data.train_batch_size=128", "trainer.total_training_steps=10", "trainer.test_freq=5",
            "rollout.total_rollout_steps=1300", "algorithm.rollout_correction.bypass_mode=True",
        ]
    )  # fmt: skip
    theirs = load_config([*fully_async_main.PRESET, *OLD])
    assert theirs == ours and theirs.data.train_batch_size == 128


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("preset", ["fully_async_ppo_megatron_trainer", "one_step_off_ppo_megatron_trainer"])
def test_the_presets_for_megatron_differ_in_the_engine_alone(preset: str):
    made = load_config([f"--config-name={preset}"]), load_config([f"--config-name={preset.replace('_megatron', '')}"])
    assert [config.model_engine for config in made] == ["megatron", "dp"]
    assert made[0].trainer.v1 == made[1].trainer.v1 and made[0].async_training == made[1].async_training


def test_one_step_off_is_a_mean_age_of_one_version_and_two_at_most():
    config = load_config([*one_step_off.PRESET, "rollout.nnodes=1", "rollout.n_gpus_per_node=2"])
    assert staleness(config) == 1.0 and config.trainer.v1.sampler.max_off_policy_threshold == 2
    assert config.algorithm.rollout_correction.bypass_mode and config.actor_rollout_ref.rollout.nnodes == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.train_batch_size=100"],
            "trigger_parameter_sync_step x require_batches=4 .* set data.train_batch_size=128",
        ),
        ([f"{ARR}.hybrid_engine=True", "rollout.nnodes=0"], "needs devices of its own"),
        (
            ["async_training.use_dynamic_resource_scheduling=True"],
            "devices of the trainer are not lent .*colocate_async",
        ),
        (["async_training.use_trainer_do_validate=True"], "is refused: a validation samples"),
        (["async_training.partial_rollout=False"], "is refused: unfinished answers"),
        (["trainer.v1.separate_async.hybrid_rollout.enable_switch=True"], "not lent to the rollout; set trainer"),
        (["trainer.v1.sampler.custom_sampler.path=mine.py"], "there is no replay buffer to replace"),
        (["trainer.v1.trainer_mode=sync"], "no effect with trainer.v1.trainer_mode=sync"),
    ],
)
def test_what_the_old_program_had_and_this_one_has_not_is_refused_by_name(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        load_config([*fully_async_main.PRESET, *OLD, *overrides])


@pytest.mark.parametrize("program", [fully_async_main, one_step_off])
def test_the_old_program_is_the_new_one_from_its_preset(program, monkeypatch: pytest.MonkeyPatch):
    seen: list[RunConfig] = []
    monkeypatch.setattr(main_ppo, "run_ppo", seen.append)
    words = ["rollout.nnodes=1", "rollout.n_gpus_per_node=2", "data.train_batch_size=1024"]
    assert program.main(words) == 0
    assert seen == [load_config([*program.PRESET, *words])]
    assert program.main([*words, "--config-name", "ppo_trainer", "rollout.nnodes=0"]) == 0
    assert seen[1].trainer.v1.trainer_mode == "sync"


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        ("verl.trainer.ppo.v1", "register_trainer", "one trainer for all modes.*TrajectorySource"),
        ("verl.trainer.ppo.v1", "get_trainer_cls", "one trainer for all modes"),
        ("verl.trainer.ppo.v1.replay_buffer", "ReplayBuffer", "verl.trainer.ppo.sources.admission"),
        ("verl.experimental.fully_async_policy", "register_policy", "no policies of a dynamic schedule"),
        ("verl.experimental.fully_async_policy.fully_async_trainer", "FullyAsyncTrainer", "AsyncSource"),
    ],
)
def test_classes_of_the_old_programs_are_refused_with_what_to_use(module: str, name: str, message: str):
    with pytest.raises((ImportError, AttributeError), match=message):
        getattr(importlib.import_module(module), name)


def test_help_is_that_of_the_program():
    command = [sys.executable, "-m", "verl.experimental.fully_async_policy.fully_async_main", "--help"]
    assert "main_ppo" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
