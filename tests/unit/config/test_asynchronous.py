"""Which settings of asynchronous training go together, and which are refused with what to type instead."""

import pytest

from verl.config import ConfigError, RunConfig, load_config
from verl.config.asynchronous import is_asynchronous, staleness

ASYNC = "trainer.v1.trainer_mode=colocate_async"
ROLLOUT = "actor_rollout_ref.rollout"
SEPARATE = ["trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.hybrid_engine=False"]
BYPASS = "algorithm.rollout_correction.bypass_mode=True"


def load(*overrides: str) -> RunConfig:
    return load_config(list(overrides))


def test_the_mean_age_is_the_threshold_or_else_the_batches_of_the_mode():
    assert not is_asynchronous(load())
    assert staleness(load(ASYNC)) == 1.0
    assert staleness(load(ASYNC, "trainer.v1.colocate_async.num_warmup_batches=3")) == 3.0
    assert (
        staleness(
            load(ASYNC, "trainer.v1.colocate_async.num_warmup_batches=3", "async_training.staleness_threshold=0.5")
        )
        == 0.5
    )
    assert staleness(load(ASYNC, "async_training.staleness_threshold=0")) == 0.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["async_training.staleness_threshold=0.5"], "no effect with trainer.v1.trainer_mode=sync"),
        ([ASYNC, "async_training.staleness_threshold=7.5"], "max_off_policy_threshold=8 .* set it to 9 or more"),
        ([ASYNC, f"{ROLLOUT}.calculate_log_probs=False"], "calculate_log_probs=False"),
        ([ASYNC, "algorithm.filter_groups.max_inflight_gen_batches=2"], "max_inflight_gen_batches=2 has no effect"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        load(*overrides)


@pytest.mark.parametrize("override", [f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.kv_cache_on_publish=keep_kv"])
def test_no_staleness_makes_it_good(override: str):
    load(ASYNC, override, "async_training.staleness_threshold=0")


def test_the_mean_age_of_the_mode_with_devices_apart():
    assert staleness(load(*SEPARATE, "trainer.v1.separate_async.num_warmup_batches=2")) == 2.0
    load(*SEPARATE, "trainer.v1.separate_async.parameter_sync_step=4", "data.train_batch_size=32",
         "actor_rollout_ref.actor.ppo_mini_batch_size=8")  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (SEPARATE[:1], "needs devices of its own.*hybrid_engine=False"),
        ([ASYNC, SEPARATE[1]], "the rollout has its own .* set trainer.v1.trainer_mode=separate_async"),
        (
            [*SEPARATE, "trainer.v1.separate_async.parameter_sync_step=3", "data.train_batch_size=32",
             "actor_rollout_ref.actor.ppo_mini_batch_size=8"],
            "parameter_sync_step=3 .* set data.train_batch_size=24",
        ),
    ],
)  # fmt: skip
def test_modes_and_devices_that_do_not_go_together_are_refused(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        load(*overrides)
