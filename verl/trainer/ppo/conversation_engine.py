"""The rollout engine as one prompt sees it: it remembers what was asked and answered until there is a trajectory."""

from collections.abc import Sequence
from typing import Any

from verl.trainer.ppo.known_logprobs import SampledTokens
from verl.workers.rollout.base import Completion, GenerationRequest, RolloutEngine
from verl.workers.rollout.parking import samples_in_flight


class ConversationEngine(RolloutEngine):
    """The engine for the answers to one prompt: keeps what was asked and answered, as far as there is no trajectory
    of it yet."""

    def __init__(self, inner: RolloutEngine):
        self.inner = inner
        self.open: set[int] = set()  # requests under way
        self.turns: list[tuple[GenerationRequest, Completion]] = []  # that are complete

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        self.open.add(request.request_id)
        try:
            completions = await self.inner.generate(request)
        finally:
            self.open.discard(request.request_id)
        self.turns += [(request, completion) for completion in completions]
        return completions

    def sequences(self, in_flight: dict[int, dict[str, Any]]) -> list[SampledTokens]:
        """What was sampled so far; `in_flight` is what the engine says, by request. A turn is part of the next one."""
        found = [
            SampledTokens.after(
                request.prompt_ids, done.token_ids, parts(done.segments, done.policy_version, done.token_ids)
            )
            for request, done in self.turns
        ]
        for number in sorted(self.open & in_flight.keys()):
            prompt = in_flight[number]["prompt"]
            samples = samples_in_flight(in_flight[number]).values()
            found += [SampledTokens.after(prompt, sample["tokens"], sample["segments"]) for sample in samples]
        out: list[SampledTokens] = []
        for sequence in found:
            for place, earlier in enumerate(out):
                if (joined := sequence.joined(earlier)) is not None:
                    out[place] = joined
                    break
            else:
                out.append(sequence)
        return out

    async def update_weights(self, weights: Any, version: int) -> None:
        await self.inner.update_weights(weights, version)

    async def sleep(self) -> None:
        await self.inner.sleep()

    async def wake(self) -> None:
        await self.inner.wake()

    async def abort(self, request_id: int | None = None) -> None:
        await self.inner.abort(request_id)

    @property
    def version(self) -> int:
        return self.inner.version


Parts = Sequence[Sequence[int]]  # (version, tokens that it sampled), in order


def parts(segments: Parts, versions: Sequence[int], tokens: Sequence[int]) -> Parts:
    """Those of a completion, which names no segments where there is one version."""
    return segments or ((versions[1], len(tokens)),)
