"""`rollout.name=native`: continuous batching in the trainer's own process, with the actor's own tensors."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn

from verl.config.rollout import RolloutConfig
from verl.data.chat import end_marks
from verl.models.decoder.device_graphs import GraphedDecode, can_capture, capture_sizes, device_capture
from verl.models.decoder.generic import GenericDecoder
from verl.models.decoder.lean import Decoder, LeanDecoder
from verl.models.decoder.lean_weights import why_not_lean
from verl.models.device_moves import keep_freed_memory
from verl.utils.errors import WorkerError
from verl.workers.rollout.base import (
    Completion,
    GenerationRequest,
    RolloutEngine,
    StaleWeightsError,
    rollout_dtype,
)
from verl.workers.rollout.engine_stats import EngineStats
from verl.workers.rollout.native.cache_limits import cache_limits
from verl.workers.rollout.native.core import NativeCore
from verl.workers.rollout.registry import EngineInputs


class NativeEngine(RolloutEngine):
    """Decodes all running `generate` calls as one batch, one token per sequence and step.

    `temperature=0` is greedy, with log-probs at temperature 1. A completion ends with the EOS or stop token, or with
    the token that completed a stop string: token ids are never changed.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model: nn.Module,
        tokenizer: Any = None,
        device: torch.device | str | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ):
        self.config, self.model, self.tokenizer = config, model, tokenizer
        first_parameter = next(model.parameters())
        # To torch, "cuda" and "cuda:0" differ; the device of a tensor has the index.
        self.device = torch.empty(0, device=device).device if device is not None else first_parameter.device
        if self.device.type == "cpu":
            keep_freed_memory()
        self.eos_token_ids = tuple(eos_token_ids) if eos_token_ids is not None else eos_ids(model, tokenizer)
        self.generic_reason = why_not_lean(model)
        decoder_class = GenericDecoder if self.generic_reason else LeanDecoder
        self.decoder: Decoder = decoder_class(model, rollout_dtype(config.dtype), self.device)
        self.limits = cache_limits(config, self.decoder, self.device)
        if isinstance(self.decoder, LeanDecoder) and can_capture(self.device) and not config.enforce_eager:
            sizes = capture_sizes(config.cudagraph_capture_sizes, self.limits.rows)
            self.decoder.graphs = GraphedDecode(self.decoder, sizes, partial(device_capture, self.device))
        decode_text = None if tokenizer is None else tokenizer.decode
        self.core = NativeCore(self.decoder, self.limits, model.config.vocab_size, decode_text, self.device)
        self._futures: dict[int, asyncio.Future[list[Completion]]] = {}
        self._driver: asyncio.Task[None] | None = None
        self._asleep = self._is_parked = False
        self._published_write_counts = parameter_versions(model)

    @property
    def version(self) -> int:
        return self.core.version

    @property
    def copied_bytes(self) -> int:
        return self.decoder.copied_bytes

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        if self._asleep:
            raise WorkerError(0, "generate", "the native engine is asleep; call wake() first")
        if not self._is_parked and (self._driver is None or self._driver.done()):
            self._check_published()
        params = request.sampling
        eos = () if params.ignore_eos else self.eos_token_ids
        self.core.submit(request, tuple(dict.fromkeys((*eos, *params.stop_token_ids))))
        future = asyncio.get_running_loop().create_future()
        self._futures[request.request_id] = future
        self._start_driver()
        try:
            return await future
        except asyncio.CancelledError:
            self.core.abort(request.request_id)
            raise
        finally:
            if self._futures.get(request.request_id) is future:  # else asked again meanwhile
                del self._futures[request.request_id]

    def _check_published(self) -> None:
        """Raise WorkerError if the weights changed since they were published: samples would carry a wrong version."""
        if self._published_write_counts != parameter_versions(self.model):
            raise WorkerError(
                0, "generate",
                f"the weights were changed in place after version {self.version} was published, so its samples would "
                f"carry the wrong version; call update_weights(model, {self.version + 1}) first",
            )  # fmt: skip

    def _start_driver(self) -> None:
        if not self._is_parked and self.core.runnable and (self._driver is None or self._driver.done()):
            self._driver = asyncio.create_task(self._drive())
            self._driver.add_done_callback(take_exception)

    async def park(self) -> None:
        """Stop sampling; what runs keeps its KV cache, also over an update of the weights, until `resume`."""
        self._is_parked = True

    async def resume(self) -> None:
        if self._is_parked:
            self._is_parked = False
            if self.core.runnable:
                self._check_published()
            self._start_driver()

    async def in_flight(self) -> list[GenerationRequest]:
        while any(future.done() for future in self._futures.values()):  # complete, and its caller does not know yet
            await asyncio.sleep(0)
        return self.core.in_flight()

    async def _drive(self) -> None:
        """Consumes submitted requests; runs while any can go on; unblocked by `generate` and `resume`."""
        try:
            while self.core.runnable and not self._is_parked:
                self._resolve_futures(self.core.step())
                self._stream_new_tokens()
                await asyncio.sleep(0)
        except Exception as error:
            self.core.reset()
            futures, self._futures = self._futures, {}
            for future in futures.values():
                if not future.done():
                    future.set_exception(error)

    def _stream_new_tokens(self) -> None:
        for row, sequence in enumerate(self.core.table.rows if self.token_streams and self.core.table else ()):
            token_stream = self.token_streams.get(sequence.state.request.request_id)
            if token_stream is not None:
                new = slice(sequence.first_column + token_stream.num_sent[sequence.sample], self.core.column + 1)
                table = self.core.table
                new_ids, new_logprobs = table.tokens[row, new].tolist(), table.logprobs[row, new].tolist()
                token_stream.send(sequence.sample, new_ids, new_logprobs, sequence.alternatives)

    def _resolve_futures(self, states: list) -> None:
        for state in states:
            future = self._futures[state.request.request_id]
            if not future.done():
                future.set_result(state.result())

    async def update_weights(self, weights: Any, version: int) -> None:
        """`weights` is the trainer's module, read in place (or cast once when `rollout.dtype` differs)."""
        if not isinstance(weights, nn.Module):
            raise WorkerError(
                0, "update_weights",
                f"the native engine takes the trainer's module, not {type(weights).__name__}; pass that module",
            )  # fmt: skip
        self.model = weights
        self.core.use_version(version)
        self._published_write_counts = parameter_versions(weights)
        if not self._asleep:
            self._load_weights()

    def _load_weights(self) -> None:
        """Make the decoder use the module's current values, in place or as copies; verifies the copies."""
        self.decoder.refresh(self.model, self.version)
        stale = self.decoder.find_stale(self.model)
        if stale:
            raise StaleWeightsError(
                f"the native engine's copy of {stale} does not hold version {self.version} after it was published; "
                f"nothing was sampled from it"
            )

    async def sleep(self) -> None:
        if self.core.busy:
            raise WorkerError(
                0, "sleep", f"{len(self.core.states)} requests are in flight; await or abort() them before sleep()"
            )
        self.core.free_cache()
        self.decoder.free_copies()
        self._asleep = True

    async def wake(self) -> None:
        """Prepare to generate again. Weights changed since the last publish must be published before `generate`."""
        if self._asleep and self._published_write_counts == parameter_versions(self.model):
            self._load_weights()
        self._asleep = False

    async def abort(self, request_id: int | None = None) -> None:
        self._resolve_futures(self.core.abort(request_id))

    async def stats(self) -> list[EngineStats]:
        totals: dict[str, float] = asdict(self.core.counters)
        slots = totals["decode_steps"] * self.limits.rows
        ratios = {
            "occupancy": (totals.pop("row_steps"), slots),
            "cache_use": (totals.pop("cache_columns"), slots * self.limits.columns),
        }
        gauges = {"copied_weight_bytes": self.copied_bytes}
        return [EngineStats(totals, ratios=ratios, gauges=gauges, sums=dict(self.core.decode_times.sums))]


def take_exception(task: asyncio.Task[None]) -> None:
    """A KeyboardInterrupt has left the event loop already; asyncio must not print it as never retrieved."""
    if not task.cancelled():
        task.exception()


def parameter_versions(model: nn.Module) -> list[int]:
    """torch's count of in-place writes to each parameter."""
    return [p._version for p in model.parameters()]


def eos_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Every end-of-sequence id that the generation config, the model config or the tokenizer names, and the token that
    training puts behind an answer."""
    collected: list[int] = []
    sources = (getattr(model, "generation_config", None), model.config, tokenizer)
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        collected += [] if ids is None else ids if isinstance(ids, list | tuple) else [ids]
    return tuple(dict.fromkeys(int(i) for i in (*collected, *end_marks(tokenizer))))


def in_place_inputs(
    config: RolloutConfig, module: nn.Module, tokenizer: Any, device: torch.device | str
) -> EngineInputs:
    """The inputs of an engine that samples from `module`."""
    return EngineInputs(config, tokenizer, eos_ids(module, tokenizer), module, device)
