"""What a reward function gets of an agent loop."""

from tests.unit.rewards.test_function_reward import score, wrap
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
