"""`rollout.name=native` on devices of its own: it samples from its own copy of the weights while new ones arrive."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.checkpoint_engine.endpoint import Manifest
from verl.config import HFModelConfig
from verl.config.rollout import RolloutConfig
from verl.models.fingerprint import fingerprint
from verl.models.load import build_config, load_causal_lm
from verl.plugin.platform import get_platform
from verl.utils.errors import WorkerError
from verl.workers.rollout.base import Completion, CopyingEngine, GenerationRequest, ReadBack, TokenCallback
from verl.workers.rollout.engine_stats import EngineStats
from verl.workers.rollout.native.engine import NativeEngine, eos_ids
from verl.workers.rollout.parking import ASK_AGAIN, PAUSE, ParkingEngine


class NativeReplica(CopyingEngine):
    """A native engine over a model of its own, of the type in which the trainer's weights arrive.

    New weights arrive beside the sampling, in memory of their own. `finish_update` parks what runs, copies them over
    the old ones, reads them back, and lets the unfinished answers go on.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str | Path,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] = (),
        replica: int = 0,
    ):
        self.config, self.tokenizer, self.replica = config, tokenizer, replica
        self.bucket_bytes = config.checkpoint_engine.update_weights_bucket_megabytes << 20
        self.device = torch.device(get_platform().device_name or "cpu")
        model = HFModelConfig(path=str(model_path), override_config=config.engine_kwargs.native.get("hf_overrides", {}))
        self.model = load_causal_lm(model_path, config=build_config(model)[0]).to(self.device).requires_grad_(False)
        self.eos_token_ids = tuple(dict.fromkeys((*eos_ids(self.model, tokenizer), *eos_token_ids)))
        self._native: ParkingEngine | None = None  # from the first weights on
        self._arrived: dict[str, Tensor] = {}

    @property
    def native(self) -> ParkingEngine:
        """The engine; WorkerError before the first weights are there."""
        if self._native is None:
            raise WorkerError(self.replica, "generate", "no weights were published yet; publish before sampling")
        return self._native

    @property
    def version(self) -> int:
        return -1 if self._native is None else self._native.version

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        return await self.native.generate(request)

    async def stream(self, request: GenerationRequest, on_tokens: TokenCallback) -> list[Completion]:
        return await self.native.stream(request, on_tokens)

    async def abort(self, request_id: int | None = None) -> None:
        if self._native is not None:
            await self._native.abort(request_id)

    async def in_flight(self) -> list[GenerationRequest]:
        return [] if self._native is None else await self._native.in_flight()

    async def begin_update(self) -> None:
        self._arrived = {}

    async def load_bucket(self, bucket: list[tuple[str, Tensor]]) -> list[Manifest]:
        return [self._keep(bucket)]

    async def transport_step(self, step: str, argument: Any) -> list[Any]:
        """Weights are received in a thread of their own: sampling goes on."""
        if step != "receive":
            return await super().transport_step(step, argument)
        await self.begin_update()
        return [await asyncio.to_thread(self._receive, argument)]

    def _receive(self, version: int) -> Manifest:
        assert self.endpoint is not None, "open comes first"
        manifest: Manifest = {}
        with closing(self.endpoint.receive(version)) as arriving:
            for bucket in arriving:
                manifest |= self._keep(bucket)
        return manifest

    def _keep(self, bucket: list[tuple[str, Tensor]]) -> Manifest:
        kept = {name: tensor.detach().to(self.device, copy=True) for name, tensor in bucket}
        self._arrived |= kept
        return {name: fingerprint(tensor) for name, tensor in kept.items()}

    @torch.no_grad()
    async def finish_update(self, version: int) -> None:
        arrived, self._arrived = self._arrived, {}
        parameters = dict(self.model.named_parameters())
        whose, missing = f"replica {self.replica}", tuple(name for name in parameters if name not in arrived)
        ReadBack(0, missing=missing).check(whose, version)
        if self._native is None:
            for name, parameter in parameters.items():  # tied ones keep sharing it
                parameter.data = parameter.data.to(arrived[name].dtype)
            native = NativeEngine(self.config, self.model, self.tokenizer, self.device, self.eos_token_ids)
            parks = PAUSE if self.config.kv_cache_on_publish == "keep_kv" else ASK_AGAIN
            self._native = ParkingEngine(native, parks, continues=True)
        started = time.perf_counter()
        await self._native.park()
        for name, parameter in parameters.items():
            parameter.copy_(arrived[name])
        await self._native.update_weights(self.model, version)
        wrong = tuple(
            (name, name, fingerprint(arrived[name]), held)
            for name, parameter in parameters.items()
            if (held := fingerprint(parameter)) != fingerprint(arrived[name])
        )
        ReadBack(0, wrong).check(whose, version)
        await self._native.resume()
        self.read_back = ReadBack(len(parameters), pause_s=time.perf_counter() - started)

    async def sleep(self) -> None:
        if self._native is not None:
            await self._native.sleep()

    async def wake(self) -> None:
        if self._native is not None:
            await self._native.wake()

    async def stats(self) -> list[EngineStats]:
        return [EngineStats()] if self._native is None else await self._native.stats()
