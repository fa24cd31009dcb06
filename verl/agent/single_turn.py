"""`single_turn_agent`: one prompt, one answer. One request per group, which is fastest for engines."""

from verl.data.prompts import PromptRow
from verl.data.trajectory import Trajectory
from verl.workers.rollout.base import GenerationRequest, RolloutEngine, SamplingParams

NAME = "single_turn_agent"


async def single_turn(
    row: PromptRow, request_id: int, sampling: SamplingParams, engine: RolloutEngine
) -> list[Trajectory]:
    """`sampling.n` trajectories of one group, in sample order; generated ids are kept verbatim."""
    completions = await engine.generate(GenerationRequest(request_id, row.prompt_ids, sampling))
    return [
        Trajectory.from_completion(
            row.prompt_ids,
            completion.token_ids,
            completion.logprobs,
            group_id=request_id,
            row=row.index,
            policy_version=completion.policy_version,
            segments=completion.segments,
            stop_reason=completion.stop_reason,
            num_turns=2,
        )
        for completion in completions
    ]
