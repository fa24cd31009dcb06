"""Which runs park unfinished answers."""

import pytest

from verl.config import load_config
from verl.trainer.ppo.parking_setup import parks

ROLLOUT = "actor_rollout_ref.rollout"
APART = ["trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.hybrid_engine=False", "trainer.device=cpu"]
APART += [f"{ROLLOUT}.n_gpus_per_node=1", "algorithm.rollout_correction.bypass_mode=True"]


@pytest.mark.parametrize(
    ("words", "parked"),
    [
        (["trainer.v1.trainer_mode=colocate_async"], "ask_again"),
        (["trainer.v1.trainer_mode=colocate_async", f"{ROLLOUT}.kv_cache_on_publish=keep_kv"], "pause"),
        ([*APART, f"{ROLLOUT}.name=native"], "no"),  # it gets weights beside the sampling
        ([*APART, f"{ROLLOUT}.name=vllm"], "ask_again"),
        ([*APART, f"{ROLLOUT}.name=vllm", "async_training.staleness_threshold=0"], "no"),
    ],
)
def test_answers_are_parked_where_an_engine_cannot_sample_beside_an_update(words: list[str], parked: str):
    assert parks(load_config(words)) == parked
