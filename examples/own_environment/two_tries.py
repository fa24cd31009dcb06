"""An environment as an agent loop: a wrong answer gets the question again, and a right second one half the reward."""

from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput, register


@register("two_tries")
class TwoTries(AgentLoopBase):
    """Asks at most twice. The conversation is one list of token ids that only grows."""

    async def run(self, sampling_params, **row):
        messages, right = list(row["raw_prompt"]), row["reward_model"]["ground_truth"]
        prompt = await self.ct_build_initial_tokens(messages)
        tokens, mask, reward = prompt, [], 0.0
        for number in (1, 2):
            answer = await self.server_manager.generate("any", prompt_ids=tokens, sampling_params=sampling_params)
            merged, mask, _ = await self.ct_merge_assistant_token(tokens, answer.token_ids, mask)
            tokens = merged.token_ids
            text = self.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            if text.rpartition(";")[2] == right:
                reward = 1.0 / number
            if reward or number == 2 or answer.stop_reason == "length":
                break
            again = [*messages, {"role": "assistant", "content": text}, messages[-1]]
            merged, longer_mask, _ = await self.ct_merge_non_assistant_msg(again[:-1], again, tokens, mask)
            if len(longer_mask) >= self.rollout_config.response_length:
                break  # no room for a second answer
            tokens, mask = merged.token_ids, longer_mask
        return AgentLoopOutput(prompt, tokens[len(prompt) :], mask, reward_score=reward, num_turns=2 * number)
