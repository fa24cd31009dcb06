"""What a reward function gets of an agent loop."""

from tests.unit.rewards.test_function_reward import score, wrap
from verl.agent.policy import Policy
from verl.data.prompts import PromptRow
from verl.doors.loop_outputs import read_outputs
from verl.experimental.agent_loop import AgentLoopOutput, LLMServerClient
from verl.rewards.base import RewardInput
from verl.workers.rollout.base import Completion, SamplingParams


def test_the_function_gets_what_an_agent_loop_scored():
    output = AgentLoopOutput([1], [2], [1], [-0.5], extra_fields={"reward_scores": {"user": 0.75}})
    server = LLMServerClient(Policy(None, SamplingParams(), 9, 0, 0))
    server.answers.append(Completion([2], [-0.5], "stop", (0, 0)))
    [trajectory] = read_outputs(output, server, 0)
    row = PromptRow(0, "row 1", [], "", [1], False, "toy", "7", {"index": 0})
    seen = []
    score(wrap(lambda **kwargs: seen.append(kwargs) or 1.0), RewardInput.from_row(row, "x", trajectory))
    assert seen[0]["extra_info"]["rollout_reward_scores"] == {"user": 0.75}
    seen[0]["extra_info"]["rollout_reward_scores"]["user"] = 0.0
    assert trajectory.loop_fields["reward_scores"] == {"user": 0.75}
