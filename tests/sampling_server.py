"""The rollout server of `tests.rollout_server`, whose answers are a function of seed, stream and sample."""

import asyncio
import os

from tests import rollout_server
from verl.utils.seeds import derive_seed
from verl.workers.rollout.base import Completion, GenerationRequest, TokenStream
from verl.workers.rollout.engine_stats import EngineStats
from verl.workers.rollout.remote import server as engine_server

TOKEN_S = 0.02  # seconds per token


class SamplingEngine(rollout_server.ReplicaModuleEngine):
    """Samples slowly what `answer_to` says."""

    generated = 0

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        streams = {s: self.token_streams.get(request.request_id) for s in range(request.sampling.n)}
        return list(await asyncio.gather(*(self._sample(request, sample, to) for sample, to in streams.items())))

    async def _sample(self, request: GenerationRequest, sample: int, stream: TokenStream | None) -> Completion:
        tokens = answer_to(request, sample)
        for token in tokens:
            await asyncio.sleep(TOKEN_S)
            self.generated += 1
            if stream is not None:
                stream.send(sample, [token], [-1.0])
        return Completion(tokens, [-1.0] * len(tokens), "length", (self.held, self.held))

    async def stats(self) -> list[EngineStats]:
        return [EngineStats({"generated_tokens": self.generated}, gauges={"process": os.getpid()})]


def answer_to(request: GenerationRequest, sample: int) -> list[int]:
    """The tokens that any replica samples."""
    params = request.sampling
    return [derive_seed(params.seed, request.stream_id, sample, i) % 100 for i in range(params.max_tokens)]


if __name__ == "__main__":
    rollout_server.ReplicaModuleEngine = SamplingEngine  # type: ignore[misc]
    engine_server.build_vllm_engine = rollout_server.build
    engine_server.main()
