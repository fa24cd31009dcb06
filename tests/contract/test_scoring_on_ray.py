"""The manager `remote` on Ray: its processes are actors, and one that dies or hangs is replaced."""

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.small_ray import small_ray
from verl.config import load_config
from verl.rewards.base import RewardInput
from verl.rewards.reward_setup import build_reward
from verl.rewards.scoring_pool import end_scoring_processes

pytestmark = pytest.mark.ray
FUNCTION = """
import os, time
actors = set()

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    import ray
    if solution_str == "die":
        os._exit(1)
    if solution_str == "hang":
        time.sleep(1000)
    return {"score": 1.0, "pid": os.getpid(), "actor": ray.get_runtime_context().get_actor_id()}
"""


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with small_ray() as cluster:
        yield cluster


def test_calls_run_in_actors_which_are_replaced(ray: Any, tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTION)
    overrides = ["trainer.runtime=ray", "reward.reward_manager.name=remote", "reward.num_workers=1"]
    overrides += ["reward.timeout_s=5", "reward.on_error=count"]
    path = f"reward.custom_reward_function.path={tmp_path / 'mine.py'}"
    reward = build_reward(load_config([path, *overrides]), None)
    rows = [RewardInput("toy", text, "7", {"index": 0}) for text in ("a", "die", "b", "hang", "c")]
    a, dead, b, late, c = asyncio.run(reward.score(rows))
    assert [one.value for one in (a, dead, b, late, c)] == [1.0, None, 1.0, None, 1.0]
    assert len({one.extra["actor"] for one in (a, b, c)}) == 3 and a.extra["pid"] != os.getpid()
    assert "its actor of Ray ended during the call" in dead.error and dead.processes_lost == 1
    assert "no result after reward.timeout_s=5.0" in late.error and late.processes_lost == 1
    end_scoring_processes()
