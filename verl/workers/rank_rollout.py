"""Rollout on a rank of a sharded engine: an engine in place on a full copy of the weights, freed while it sleeps."""

from dataclasses import dataclass

import torch
from torch import nn

from verl.config import HFModelConfig, RolloutConfig
from verl.models.load import build_config, load_causal_lm, load_tokenizer
from verl.workers.engine.base import BaseEngine
from verl.workers.rollout.base import Completion, GenerationRequest, RolloutEngine, rollout_dtype
from verl.workers.rollout.engine_stats import EngineStats
from verl.workers.rollout.engines import find_rollout_engine
from verl.workers.rollout.native.engine import in_place_inputs


@dataclass(frozen=True)
class RankPublish:
    """The record of a publish on one rank."""

    version: int  # that the rank samples from now
    bytes_copied: int


class RankRollout:
    """Generates the completions of this rank's requests.

    `publish` and `wake` are collectives that gather one tensor at a time: all ranks call them in the same order.
    """

    def __init__(self, rollout: RolloutConfig, model: HFModelConfig, engine: BaseEngine):
        self.rollout, self.model, self.engine = rollout, model, engine
        self.version = -1
        self.model_copy: nn.Module | None = None
        self.inner: RolloutEngine | None = None
        self.ended = EngineStats()  # counts of the engines that `sleep` dropped

    async def publish(self, version: int) -> RankPublish:
        """Copy the engine's current weights into the rollout and sample from them as `version`."""
        self.version = version
        if self.inner is None:
            await self.wake()
        else:
            assert self.model_copy is not None
            self._copy_weights_into(self.model_copy)
            await self.inner.update_weights(self.model_copy, version)
        assert self.inner is not None and self.model_copy is not None
        return RankPublish(self.inner.version, sum(p.nbytes for p in self.model_copy.parameters()))

    async def wake(self) -> None:
        """Build an engine on a copy of the weights in the rollout dtype, unless there is one. A collective."""
        if self.inner is not None:
            return
        self.model_copy = self._empty_model()
        self._copy_weights_into(self.model_copy)
        tokenizer = load_tokenizer(self.model)
        registered, device = find_rollout_engine(self.rollout.name), next(self.model_copy.parameters()).device
        self.inner = registered.build(in_place_inputs(self.rollout, self.model_copy, tokenizer, device))
        await self.inner.update_weights(self.model_copy, self.version)

    async def sleep(self) -> None:
        """Free the copy of the weights and the KV cache."""
        if self.inner is not None:
            await self.inner.sleep()
            self.ended = await self.stats()
            self.inner = self.model_copy = None

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        assert self.inner is not None, "wake() comes before generate()"
        return await self.inner.generate(request)

    async def abort(self, request_id: int | None = None) -> None:
        if self.inner is not None:
            await self.inner.abort(request_id)

    async def park(self) -> None:
        """Let what runs wait, with its KV cache, over a publish."""
        if self.inner is not None:
            await self.inner.park()

    async def resume(self) -> None:
        if self.inner is not None:
            await self.inner.resume()

    async def in_flight(self) -> list[GenerationRequest]:
        return [] if self.inner is None else await self.inner.in_flight()

    async def stats(self) -> EngineStats:
        """Counts of all engines that this rank had."""
        if self.inner is None:
            return self.ended
        [stats] = await self.inner.stats()
        return stats.continuing(self.ended)

    def _empty_model(self) -> nn.Module:
        """The policy's model with uninitialised parameters on the engine's device."""
        config, _ = build_config(self.model)
        engine_dtype = next(self.engine.model.parameters()).dtype
        dtype = rollout_dtype(self.rollout.dtype) or getattr(self.engine, "compute_dtype", engine_dtype)
        model = load_causal_lm(self.model.path or "", dtype, config, structure_only=True)
        model.to_empty(device=getattr(self.engine, "device", "cpu"))
        model.tie_weights()
        return model.requires_grad_(False)

    @torch.no_grad()
    def _copy_weights_into(self, copy: nn.Module) -> None:
        """Copy every tensor into `copy`, rounded to the engine's compute dtype first."""
        targets = dict(copy.named_parameters())
        compute_dtype = getattr(self.engine, "compute_dtype", None)
        for name, tensor in self.engine.export_weights():
            targets.pop(name).copy_(tensor if compute_dtype is None else tensor.to(compute_dtype))
        assert not targets, f"the engine exported no value for {', '.join(targets)}"
        sources = dict(self.engine.model.named_buffers())
        for name, buffer in copy.named_buffers():
            buffer.copy_(sources[name])
