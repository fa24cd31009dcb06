"""What a reward function gets of an agent loop, and that its threads end with the reward."""

import asyncio
import threading

import pytest

from tests.unit.rewards.test_function_reward import item, score, wrap
from verl.agent.llm_server import TokenOutput
from verl.agent.loop import AgentLoopOutput
from verl.data.prompts import PromptRow
from verl.rewards.base import RewardInput

VERSIONS = {"min_global_steps": 0, "max_global_steps": 0}


def test_the_function_gets_what_an_agent_loop_scored():
    output = AgentLoopOutput([1], [2], [1], [-0.5], extra_fields={"reward_scores": {"user": 0.75}})
    trajectory = output.to_trajectory(0, 0, [TokenOutput([2], [-0.5], "completed", extra_fields=VERSIONS)])
    row = PromptRow(0, "row 1", [], "", [1], False, "toy", "7", {"index": 0})
    seen = []
    score(wrap(lambda **kwargs: seen.append(kwargs) or 1.0), RewardInput.from_row(row, "x", trajectory))
    assert seen[0]["extra_info"]["rollout_reward_scores"] == {"user": 0.75}
    seen[0]["extra_info"]["rollout_reward_scores"]["user"] = 0.0
    assert trajectory.loop_fields["reward_scores"] == {"user": 0.75}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_threads_end_with_their_reward(kind):
    async def waits(**kwargs):
        return await asyncio.to_thread(len, kwargs["solution_str"])

    before = set(threading.enumerate())
    reward = wrap((lambda **kwargs: 2.0) if kind == "sync" else waits, num_threads=5)
    assert [one.value for one in score(reward, *[item("72")] * 9)] == [2.0] * 9
    ours = [thread for thread in set(threading.enumerate()) - before if thread.name != "reward timer"]
    assert sum(thread.name in ("reward", "async reward") for thread in ours) == (5 if kind == "sync" else 1)
    del reward
    for thread in ours:
        thread.join(10)
    assert not any(thread.is_alive() for thread in ours)
