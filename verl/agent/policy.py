"""The policy in one conversation: token ids in, one completion out."""

import asyncio
from dataclasses import replace

from verl.observe.tracing.recorder import fill_turn
from verl.observe.tracing.spans import GENERATION, span
from verl.utils.seeds import derive_seed
from verl.workers.rollout.base import Completion, GenerationRequest, RolloutEngine, SamplingParams


class Policy:
    """The policy in conversation `sample` of a group; all its turns go to the same replica."""

    def __init__(
        self, engine: RolloutEngine, sampling: SamplingParams, max_sequence_length: int, group_id: int, sample: int
    ):
        self.engine, self.sampling, self.max_sequence_length = engine, sampling, max_sequence_length
        self.group_id, self.sample = group_id, sample
        self.turn = 0  # random numbers of a turn come from its number
        self.generating = 0  # calls of `generate` in progress
        self.failure: BaseException | None = None  # what the engine raised last

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams) -> Completion:
        """One answer to `prompt_ids`, which fits `max_sequence_length`; empty (stop_reason "length") at that limit."""
        request_number = derive_seed(self.group_id, self.sample, self.turn)
        self.turn += 1
        num_tokens = min(sampling.max_tokens, self.max_sequence_length - len(prompt_ids))
        if num_tokens < 1:
            await asyncio.sleep(0)  # a loop that asks on must not stop the others
            return Completion([], [], "length", (self.engine.version, self.engine.version))
        request = GenerationRequest(
            request_number,
            prompt_ids,
            replace(sampling, n=1, max_tokens=num_tokens),
            conversation=derive_seed(self.group_id, self.sample),
        )
        with span("generate", GENERATION) as traced:
            c = await self._ask_engine(request)
        if traced is not None:
            fill_turn(traced, len(prompt_ids), c.token_ids, c.logprobs, c.stop_reason, c.policy_version)
        return c

    async def _ask_engine(self, request: GenerationRequest) -> Completion:
        self.generating += 1
        try:
            [completion] = await self.engine.generate(request)
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.generating -= 1
        return completion
