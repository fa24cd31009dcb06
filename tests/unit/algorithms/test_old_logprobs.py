"""Which of the five ways a run gets its old log-probs in."""

import pytest

from verl.algorithms.old_logprobs import (
    FROM_UPDATE,
    ONE_PASS,
    RECORDED,
    ROLLOUT,
    SCORED,
    keeps_published_weights,
    old_logprobs_of,
)
from verl.config import load_config

ASYNC = "trainer.v1.trainer_mode=colocate_async"
SEPARATE = ["trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.hybrid_engine=False"]
NO_AGE = "async_training.staleness_threshold=0"
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
TWO_STEPS = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
ONE_STEP = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]


def way(*overrides: str) -> str:
    return old_logprobs_of(load_config([*overrides]))


@pytest.mark.parametrize(
    "override", [f"actor_rollout_ref.rollout.{o}" for o in ("top_p=0.9", "top_k=20", "dtype=bfloat16",
                                                            "kv_cache_on_publish=keep_kv")]
)  # fmt: skip
@pytest.mark.parametrize("mode", [[ASYNC], SEPARATE], ids=["colocated", "apart"])
def test_the_trainer_scores_before_it_gives_up_a_version_what_the_rollout_does_not_record(
    override: str, mode: list[str]
):
    config = load_config([*mode, override])
    assert old_logprobs_of(config) == SCORED and keeps_published_weights(config) == (mode == SEPARATE)
    assert way(*mode, override, BYPASS) == ROLLOUT
    assert way(*mode, override, NO_AGE) in (FROM_UPDATE, ONE_PASS)
    assert way(*mode) == RECORDED and not keeps_published_weights(load_config(mode))


def test_a_synchronous_run_asks_the_policy_once_where_the_update_cannot_give_them():
    assert way(*ONE_STEP) == FROM_UPDATE and way(*TWO_STEPS) == ONE_PASS
    assert way(*ONE_STEP, "algorithm.use_kl_in_reward=True") == ONE_PASS and way(*ONE_STEP, BYPASS) == ROLLOUT
