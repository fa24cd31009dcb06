"""Rollout on a rank of a sharded engine: a native engine on a full copy of the weights, freed while it sleeps."""

import torch
from torch import nn

from verl.config import HFModelConfig, RolloutConfig
from verl.models.load import build_config, load_causal_lm, load_tokenizer
from verl.workers.engine.base import BaseEngine
from verl.workers.rollout.base import Completion, GenerationRequest
from verl.workers.rollout.engine_stats import EngineStats
from verl.workers.rollout.native_engine import NativeEngine, rollout_dtype


class RankRollout:
    """Generates the completions of this rank's requests.

    `publish` and `wake` are collectives that gather one tensor at a time: all ranks call them in the same order.
    """

    def __init__(self, rollout: RolloutConfig, model: HFModelConfig, engine: BaseEngine):
        self.rollout, self.model, self.engine = rollout, model, engine
        self.version = -1
        self.model_copy: nn.Module | None = None
        self.native: NativeEngine | None = None
        self.ended = EngineStats()  # counts of the engines that `sleep` dropped

    async def publish(self, version: int) -> tuple[int, int]:
        """Copy the engine's current weights into the rollout; (policy version in use, bytes gathered)."""
        self.version = version
        if self.native is None:
            await self.wake()
        else:
            assert self.model_copy is not None
            self._copy_weights(self.model_copy)
            await self.native.update_weights(self.model_copy, version)
        assert self.native is not None and self.model_copy is not None
        return self.native.version, sum(p.nbytes for p in self.model_copy.parameters())

    async def wake(self) -> None:
        """Copy the weights in the rollout dtype, unless there is a copy."""
        if self.native is not None:
            return
        self.model_copy = self._empty_model()
        self._copy_weights(self.model_copy)
        tokenizer = load_tokenizer(self.model)
        self.native = NativeEngine(self.rollout, self.model_copy, tokenizer, next(self.model_copy.parameters()).device)
        await self.native.update_weights(self.model_copy, self.version)

    async def sleep(self) -> None:
        """Free the copy of the weights and the KV cache."""
        if self.native is not None:
            await self.native.sleep()
            self.ended = await self.stats()
            self.native = self.model_copy = None

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        assert self.native is not None, "wake() comes before generate()"
        return await self.native.generate(request)

    async def abort(self, request_id: int | None = None) -> None:
        if self.native is not None:
            await self.native.abort(request_id)

    async def stats(self) -> EngineStats:
        """Counts of all engines that this rank had."""
        if self.native is None:
            return self.ended
        [stats] = await self.native.stats()
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
    def _copy_weights(self, copy: nn.Module) -> None:
        """Copy every tensor into `copy`, rounded to the engine's compute dtype first."""
        targets = dict(copy.named_parameters())
        compute_dtype = getattr(self.engine, "compute_dtype", None)
        for name, tensor in self.engine.export_weights():
            targets.pop(name).copy_(tensor if compute_dtype is None else tensor.to(compute_dtype))
        assert not targets, f"the engine exported no value for {', '.join(targets)}"
        sources = dict(self.engine.model.named_buffers())
        for name, buffer in copy.named_buffers():
            buffer.copy_(sources[name])
