"""`single_turn_agent`: one prompt, one answer. One request per group, which is fastest for engines."""

import time
from typing import Any

from verl.agent.loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, new_request_id
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


class SingleTurnAgentLoop(AgentLoopBase):
    """One prompt, one answer, as a class to derive from. Every sample is a request of its own."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        start_time = time.perf_counter()
        answer = await self.server_manager.generate(
            new_request_id(), prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=answer.token_ids,
            response_mask=[1] * len(answer.token_ids),
            response_logprobs=answer.log_probs,
            num_turns=2,
            metrics=AgentLoopMetrics(generate_sequences=time.perf_counter() - start_time),
        )
