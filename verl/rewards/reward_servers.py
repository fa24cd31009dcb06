"""Servers of a reward model (vLLM's `/classify`, SGLang's `/v1/embeddings`), and of a judge (`verl serve`)."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from verl.config.reward import RewardConfig, ScoringModelConfig, reward_model_place
from verl.plugin.platform import get_platform
from verl.utils.errors import RewardError, TransportError
from verl.workers.rollout.http_server import HOST, HTTPServerProcess, free_port
from verl.workers.rollout.sglang_engine import command_line

NAME, LARGEST_REQUEST = "reward_model", 256  # sequences
WAIT_KEY = "reward.reward_model.rollout.server.max_start_wait_time"
# What lets the engine free its devices, and what undoes it.
SLEEPING = {"sglang": ("/release_memory_occupation", "/resume_memory_occupation")}
OTHERS_SLEEPING = ("/sleep?level=1", "/wake_up")


class RewardServers:
    """Servers with a copy of a model each. `sleeps`: they sleep now, and except between `wake` and `sleep`."""

    def __init__(self, servers: Sequence[HTTPServerProcess], settings: ScoringModelConfig, sleeps: bool):
        self.servers, self.engine, self.limits = servers, settings.rollout.name or "native", settings.rollout.server
        self.shares_devices = self.sleeps = sleeps
        for server in servers:
            server.wait_until_ready(self.limits.max_start_wait_time, WAIT_KEY)
        asyncio.run(self.sleep())

    async def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The output of the head at the last token of each sequence; RewardError where a server does not say it."""
        size = min(-(-len(sequences) // len(self.servers)), LARGEST_REQUEST)
        parts = [sequences[start : start + size] for start in range(0, len(sequences), size)]
        found = await asyncio.gather(*(self._ask(number, part) for number, part in enumerate(parts)))
        return [score for part in found for score in part]

    async def _ask(self, number: int, part: Sequence[Sequence[int]]) -> list[float]:
        server, body = self.servers[number % len(self.servers)], {"model": NAME, "input": [list(ids) for ids in part]}
        try:
            if self.engine == "sglang":
                data = await server.ask("/v1/embeddings", body, self.limits.timeout)
                values = {entry["index"]: entry["embedding"][-1] for entry in data["data"]}
            else:
                data = await server.ask("/classify", {**body, "use_activation": False}, self.limits.timeout)
                values = {entry["index"]: entry["probs"][-1] for entry in data["data"]}
            return [float(values[index]) for index in range(len(part))]
        except TransportError as error:
            raise RewardError(str(error)) from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RewardError(f"{server.name} answered {len(part)} sequences with {str(data)[:200]}") from error

    async def wake(self) -> None:
        await self._on_all(1)

    async def sleep(self) -> None:
        await self._on_all(0)

    async def _on_all(self, which: int) -> None:
        if self.sleeps:
            path = SLEEPING.get(self.engine, OTHERS_SLEEPING)[which]
            await asyncio.gather(*(server.ask(path, {}, self.limits.max_start_wait_time) for server in self.servers))

    def metrics(self) -> dict[str, float]:
        """Nothing: a judge's answers are counted by the function that asks."""
        return {}


def start_servers(
    config: RewardConfig, devices: Sequence[Sequence[int]], port: int, sleeps: bool, started: ExitStack
) -> RewardServers:
    """The servers of a reward model, one on each of `devices`, or that of a judge on `port`, which has all of them.

    `started` closes them. TransportError where one does not start.
    """
    settings = config.reward_model
    if reward_model_place(config) == "judge":
        command = judge_command(settings, port, max(len(devices), 1), sleeps)
        planned = [("the judge", command, [one for replica in devices for one in replica], port)]
    else:
        planned = []
        for replica, own in enumerate(devices):
            free = free_port()
            name, command = f"server {replica} of the reward model", classifier_command(settings, free, sleeps)
            planned.append((name, command, list(own), free))
    servers = []
    for name, command, own_devices, at in planned:
        servers.append(HTTPServerProcess(name, command, _environment(own_devices, sleeps), at))
        started.callback(servers[-1].close)
    return RewardServers(servers, settings, sleeps)


def _environment(devices: Sequence[int], sleeps: bool) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    asks = {"VLLM_SERVER_DEV_MODE": "1"} if sleeps else {}  # vLLM answers `/sleep` and `/wake_up`
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    return {**defaults, **get_platform().rollout_environment(devices), **asks, "PYTHONPATH": paths}


def classifier_command(settings: ScoringModelConfig, port: int, sleeps: bool) -> list[str]:
    """The command line of a server that classifies."""
    rollout = settings.rollout
    python, dtype = rollout.server.python or sys.executable, None if rollout.dtype == "auto" else rollout.dtype
    own: dict[str, Any] = {"host": HOST, "port": port, "served_model_name": NAME, "dtype": dtype}
    if rollout.name == "sglang":
        own |= {
            "model_path": settings.model_path,
            "is_embedding": True,
            "tp_size": rollout.tensor_model_parallel_size,
            "mem_fraction_static": rollout.gpu_memory_utilization,
            "context_length": rollout.max_model_len,
            "max_running_requests": rollout.max_num_seqs,
            "disable_cuda_graph": rollout.enforce_eager,
            "enable_memory_saver": sleeps,
            **rollout.engine_kwargs.sglang,
        }
        program = "sglang.launch_server"
    else:
        own |= {
            "model": settings.model_path,
            "runner": "pooling",
            "tensor_parallel_size": rollout.tensor_model_parallel_size,
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "max_model_len": rollout.max_model_len,
            "max_num_seqs": rollout.max_num_seqs,
            "max_num_batched_tokens": rollout.max_num_batched_tokens,
            "enforce_eager": rollout.enforce_eager,
            "enable_sleep_mode": sleeps,
            **rollout.engine_kwargs.vllm,
        }
        program = "vllm.entrypoints.openai.api_server"
    return [python, "-m", program, *command_line({name: value for name, value in own.items() if value is not None})]


def judge_command(settings: ScoringModelConfig, port: int, replicas: int, sleeps: bool) -> list[str]:
    """The command line of `verl serve` for a judge."""
    rollout, path = settings.rollout, str(settings.model_path)
    values: dict[str, Any] = {
        "name": rollout.name or "native",
        "num_replicas": replicas,
        "tensor_model_parallel_size": rollout.tensor_model_parallel_size,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "dtype": rollout.dtype,
        "prompt_length": rollout.prompt_length,
        "response_length": rollout.response_length,
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enforce_eager": rollout.enforce_eager,
        "server.python": rollout.server.python,
        "server.max_start_wait_time": rollout.server.max_start_wait_time,
        **{f"engine_kwargs.vllm.{name}": json.dumps(value) for name, value in rollout.engine_kwargs.vllm.items()},
    }
    overrides = [f"rollout.{name}={value}" for name, value in values.items() if value is not None]
    serve = [sys.executable, "-m", "verl.commands.serve.command", "--host", HOST, "--port", str(port), "--name", path]
    limits = ["--max-concurrent", "100000", *(["--allow-sleep"] if sleeps else [])]
    device = f"trainer.device={get_platform().device_name}"
    return [*serve, *limits, f"model={path}", device, *overrides]
