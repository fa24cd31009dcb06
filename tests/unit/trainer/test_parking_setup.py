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
        (["trainer.v1.trainer_mode=colocate_async"], True),
        ([*APART, f"{ROLLOUT}.name=native"], False),  # it gets weights beside the sampling
        ([*APART, f"{ROLLOUT}.name=vllm"], True),
        ([*APART, f"{ROLLOUT}.name=vllm", "async_training.staleness_threshold=0"], False),
    ],
)
def test_answers_are_parked_where_an_engine_cannot_sample_beside_an_update(words: list[str], parked: bool):
    assert parks(load_config(words)) == parked
