"""`rollout.name=sglang`: an SGLang server as a rollout engine.

Written for the request classes of SGLang 0.5.23 and tested with a server that implements this protocol; SGLang itself
has no CPU build. Weights are sent as safetensors files in shared memory and loaded with `update_weights_from_disk`:
SGLang's faster methods unpickle what they receive.
"""

import asyncio
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from verl.checkpoint_engine.buckets import SHARED_MEMORY
from verl.config.rollout import RolloutConfig
from verl.models.fingerprint import fingerprint
from verl.plugin.platform import get_platform
from verl.utils.errors import ConfigError, TransportError, WorkerError
from verl.utils.seeds import derive_seed
from verl.workers.rollout.base import (
    JSON_FORMATS,
    Completion,
    CopyingEngine,
    GenerationRequest,
    StaleWeightsError,
    response_schema,
    rollout_dtype,
)
from verl.workers.rollout.engine_stats import EngineStats
from verl.workers.rollout.remote.http_client import HTTPClient
from verl.workers.rollout.remote.http_server import HOST, HTTPServerProcess, free_port
from verl.workers.rollout.remote.profiles import ProfiledServer, profile_folder
from verl.workers.rollout.request_limits import check_request

RESERVED_ARGUMENTS = ("model_path", "host", "port")


def sglang_arguments(config: RolloutConfig, model_path: str, replica: int = 0) -> dict[str, Any]:
    """Arguments of SGLang's ServerArgs: from our keys, then `engine_kwargs.sglang` unchanged.

    `mem_fraction_static` is the fraction of free memory for weights and KV cache; SGLang also uses memory beyond it, so
    a `gpu_memory_utilization` that works with vLLM may be too high here.
    """
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "dtype": config.dtype,
        "random_seed": config.seed + replica,
        "context_length": config.max_model_len or config.prompt_length + config.response_length,
        "mem_fraction_static": config.gpu_memory_utilization,
        "max_running_requests": config.max_num_seqs,
        "max_prefill_tokens": config.max_num_batched_tokens,
        "tp_size": config.tensor_model_parallel_size,
        "ep_size": config.expert_parallel_size,
        "disable_cuda_graph": config.enforce_eager,
        "cuda_graph_bs_decode": config.cudagraph_capture_sizes,
        "disable_radix_cache": not config.enable_prefix_caching,
        "chunked_prefill_size": None if config.enable_chunked_prefill else -1,
        "enable_memory_saver": config.free_cache_engine,
        "load_format": config.load_format,
        "enable_metrics": not config.disable_log_stats,
        "skip_tokenizer_init": config.skip_tokenizer_init and not config.stop,
    }
    extra = {name: value for name, value in config.engine_kwargs.sglang.items() if value is not None}
    reserved = sorted(set(extra) & set(RESERVED_ARGUMENTS))
    if reserved:
        raise ConfigError(
            f"engine_kwargs.sglang.{reserved[0]} is set by this library and cannot be replaced; leave it out"
        )
    return {name: value for name, value in (arguments | extra).items() if value is not None}


def command_line(arguments: dict[str, Any]) -> list[str]:
    """Command line of `sglang.launch_server`: `--name value …`; a flag only if its value is true."""
    argv: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            argv.append(flag)
        elif isinstance(value, list | tuple):
            argv += [flag, *map(str, value)]
        elif value is not False:
            argv += [flag, str(value)]
    return argv


class SGLangEngine(ProfiledServer, CopyingEngine):
    """One SGLang server: started by this class on `devices`, or already running at `rollout.server.url`."""

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str | Path,
        eos_token_ids: Sequence[int] = (),
        replica: int = 0,
        devices: Sequence[int] = (),
    ):
        self.config, self.model_path, self.replica = config, Path(model_path), replica
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_model_len = config.max_model_len or config.prompt_length + config.response_length
        self.bucket_bytes = config.checkpoint_engine.update_weights_bucket_megabytes << 20
        self.dtype = rollout_dtype(config.dtype)
        self.server: HTTPServerProcess | None = None
        url = config.server.url
        if url is None:
            self.server = self._start(sglang_arguments(config, str(model_path), replica), devices)
            url = self.server.url
            weakref.finalize(self, self.server.close)
        self.client = HTTPClient(url, config.server)
        self._version, self._asleep = 0, False
        self._in_flight: set[int] = set()
        self._generated = 0
        self._update: Path | None = None

    def _start(self, arguments: dict[str, Any], devices: Sequence[int]) -> HTTPServerProcess:
        port, python = free_port(), self.config.server.python or sys.executable
        argv = command_line({**arguments, "host": HOST, "port": port})
        environment = get_platform().rollout_environment(devices)
        return HTTPServerProcess("the SGLang server", [python, "-m", "sglang.launch_server", *argv], environment, port)

    def wait_until_ready(self) -> None:
        """Wait until the server answers; WorkerError says how it ended, and its last lines."""
        limit_s = self.config.server.max_start_wait_time
        if self.server is not None:
            try:
                return self.server.wait_until_ready(limit_s, "rollout.server.max_start_wait_time")
            except TransportError as error:
                raise WorkerError(self.replica, "start", str(error)) from error
        end = time.monotonic() + limit_s
        while True:
            try:
                self.client.call_blocking("GET", "/health")
                return
            except WorkerError as error:
                if time.monotonic() > end:
                    how = f"the SGLang server did not answer in time: {error}"
                    raise WorkerError(self.replica, "start", how) from error
                time.sleep(self.config.server.retry_delay)

    @property
    def metrics_addresses(self) -> Sequence[str]:  # type: ignore[override]
        return [] if self.config.disable_log_stats else [self.client.url.rpartition("/")[2]]

    @property
    def response_formats(self) -> Sequence[str]:  # type: ignore[override]
        return () if self.config.skip_tokenizer_init and not self.config.stop else JSON_FORMATS  # needs its tokenizer

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        if self._asleep:
            raise WorkerError(self.replica, "generate", "SGLang is asleep; call wake() first")
        tokenizes = not (self.config.skip_tokenizer_init and not self.config.stop)
        check_request(request, self.max_model_len, self._in_flight, tokenizes)
        self._in_flight.add(request.request_id)
        try:
            samples = [self._sample(request, number) for number in range(request.sampling.n)]
            return list(await asyncio.gather(*samples))
        finally:
            self._in_flight.discard(request.request_id)

    async def _sample(self, request: GenerationRequest, number: int) -> Completion:
        params, first = request.sampling, self._version
        eos = () if params.ignore_eos else self.eos_token_ids
        reply = await self.client.call("POST", "/generate", {
            "rid": f"{request.request_id}:{number}",
            "input_ids": request.prompt_ids,
            "return_logprob": True,
            "top_logprobs_num": params.top_logprobs,
            "sampling_params": {
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k if params.top_k > 0 else -1,
                "max_new_tokens": params.max_tokens,
                "min_new_tokens": params.min_tokens,
                "stop": list(params.stop) or None,
                "stop_token_ids": list(dict.fromkeys((*eos, *params.stop_token_ids))) or None,
                "ignore_eos": True,
                "no_stop_trim": True,
                "skip_special_tokens": False,
                "sampling_seed": derive_seed(params.seed, request.stream_id, number) % 2**31,
                "frequency_penalty": params.frequency_penalty,
                "presence_penalty": params.presence_penalty,
                "repetition_penalty": params.repetition_penalty,
                "min_p": params.min_p,
                "logit_bias": {str(token): bias for token, bias in params.logit_bias} or None,
                "json_schema": response_schema(params),
            },
        })  # fmt: skip
        meta = reply["meta_info"]
        logprobs = meta.get("output_token_logprobs") or []
        reason = (meta.get("finish_reason") or {}).get("type", "abort")
        self._generated += len(logprobs)
        return Completion(
            [int(entry[1]) for entry in logprobs],
            [float(entry[0]) for entry in logprobs],
            reason if reason in ("stop", "length") else "aborted",
            (first, self._version),
            [[(int(i), float(v)) for v, i, *_ in top] for top in meta.get("output_top_logprobs") or ()] or None,
        )

    async def abort(self, request_id: int | None = None) -> None:
        aborting = set(self._in_flight) if request_id is None else {request_id} & self._in_flight
        bodies: list[dict[str, Any]] = [{"abort_all": True}] if request_id is None and aborting else []
        while remaining := aborting & self._in_flight:  # a request that arrives after the call is not aborted by it
            for body in bodies or [{"rid": f"{number}:"} for number in remaining]:  # SGLang matches a prefix
                await self.client.call("POST", "/abort_request", body)
            bodies = []  # a second abort_all could stop newer requests
            await asyncio.sleep(0.05)

    async def begin_update(self) -> None:
        root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self._update = Path(tempfile.mkdtemp(prefix="verl-sglang-", dir=root))
        for file in self.model_path.glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, self._update)

    async def load_bucket(self, bucket: list[tuple[str, Tensor]]) -> list[dict[str, str]]:
        assert self._update is not None, "begin_update comes first"
        number = len(list(self._update.glob("*.safetensors")))
        target = self._update / f"model-{number:05d}.safetensors"
        save_file({name: tensor.contiguous().cpu() for name, tensor in bucket}, target)
        return [{name: fingerprint(tensor) for name, tensor in load_file(target).items()}]

    async def finish_update(self, version: int) -> None:
        assert self._update is not None, "begin_update comes first"
        folder, self._update = self._update, None
        try:
            reply = await self.client.call(
                "POST",
                "/update_weights_from_disk",
                {"model_path": str(folder), "flush_cache": True, "weight_version": str(version)},
            )
        finally:
            shutil.rmtree(folder)
        if not reply.get("success"):
            raise StaleWeightsError(f"replica {self.replica} refused version {version}: {reply.get('message')}")
        self._version = version

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        async def sequence_logprobs(ids: Sequence[int]) -> list[float]:
            reply = await self.client.call("POST", "/generate", {
                "input_ids": list(ids), "return_logprob": True, "logprob_start_len": 0,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            })  # fmt: skip
            return [0.0, *(float(entry[0]) for entry in reply["meta_info"]["input_token_logprobs"][1:])]

        return list(await asyncio.gather(*map(sequence_logprobs, sequences)))

    async def sleep(self) -> None:
        if self._in_flight:
            raise WorkerError(
                self.replica, "sleep",
                f"{len(self._in_flight)} requests are in flight; await or abort() them before sleep()",
            )  # fmt: skip
        if self.config.free_cache_engine:  # not the weights: SGLang would discard them
            await self.client.call("POST", "/release_memory_occupation", {"tags": ["kv_cache"]})
        self._asleep = True

    async def wake(self) -> None:
        if self._asleep and self.config.free_cache_engine:
            await self.client.call("POST", "/resume_memory_occupation", {"tags": ["kv_cache"]})
        self._asleep = False

    async def set_profiling(self, on: bool) -> None:
        if (folder := profile_folder(self.config, self.replica)) is None:
            return
        contents = self.config.profiler.tool_config.torch.contents
        body = {"output_dir": folder, "activities": ["CPU", "GPU"], "with_stack": "stack" in contents}
        body |= {"record_shapes": "shapes" in contents}
        await self.client.call("POST", "/start_profile" if on else "/stop_profile", body if on else {})

    def close(self) -> None:
        if self.server is not None:
            self.server.close()

    async def stats(self) -> list[EngineStats]:
        if self.server is not None:  # an answer is a sign of life: its scheduler's
            await self.client.call("GET", "/server_info")
        return [EngineStats({"generated_tokens": self._generated})]
