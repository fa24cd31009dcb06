"""An agent loop whose answers are as long as their row says: lengths of a known distribution, whatever is learned."""

from typing import Any

from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput


class FixedLengths(AgentLoopBase):
    """One prompt, one answer of `extra_info["lengths"][sample]` tokens; `rollout.ignore_eos` lets none end before."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        length = int(kwargs["extra_info"]["lengths"][self.server_manager.policy.sample])
        answer = await self.server_manager.generate(
            "any", prompt_ids=prompt_ids, sampling_params={**sampling_params, "max_tokens": length}
        )
        mask = [1] * len(answer.token_ids)
        return AgentLoopOutput(prompt_ids, answer.token_ids, mask, response_logprobs=answer.log_probs, num_turns=2)
