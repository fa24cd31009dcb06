"""Which settings of asynchronous training go together, and which are refused with what to type instead."""

import pytest

from verl.config import ConfigError, RunConfig, load_config
from verl.config.asynchronous import is_asynchronous, records_old_logprobs, staleness
from verl.config.check import check_values_can_start

ASYNC = "trainer.v1.trainer_mode=colocate_async"
ROLLOUT = "actor_rollout_ref.rollout"
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
        ([ASYNC, f"{ROLLOUT}.top_p=0.9"], "top_p=0.9.*bypass_mode=True"),
        ([ASYNC, f"{ROLLOUT}.top_k=20"], "top_k=20.*bypass_mode=True"),
        ([ASYNC, f"{ROLLOUT}.dtype=bfloat16"], "dtype=bfloat16.*bypass_mode=True"),
        ([ASYNC, f"{ROLLOUT}.kv_cache_on_publish=keep_kv"], "keep_kv.*bypass_mode=True"),
        ([ASYNC, "algorithm.filter_groups.max_inflight_gen_batches=2"], "max_inflight_gen_batches=2 has no effect"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        load(*overrides)


@pytest.mark.parametrize("override", [f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.kv_cache_on_publish=keep_kv"])
def test_the_rollouts_own_log_probs_or_no_staleness_make_it_good(override: str):
    assert not records_old_logprobs(load(ASYNC, override, BYPASS))
    load(ASYNC, override, "async_training.staleness_threshold=0")


def test_devices_of_its_own_are_still_to_come():
    with pytest.raises(ConfigError, match="asynchronous training on devices of its own is still to come"):
        check_values_can_start(load("trainer.v1.trainer_mode=separate_async"))
