"""Servers of a reward model (vLLM's `/classify`, SGLang's `/v1/embeddings`), and of a judge (`verl serve`)."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from verl.config.reward import RewardConfig, ScoringModelConfig, reward_model_place
from verl.plugin.platform import get_platform
from verl.utils.errors import RewardError, TransportError
from verl.workers.rollout.remote.http_server import HOST, HTTPServerProcess, free_port
from verl.workers.rollout.sglang import command_line

NAME, LARGEST_REQUEST = "reward_model", 256  # sequences
WAIT_KEY = "reward.reward_model.rollout.server.max_start_wait_time"
# What lets the engine free its devices, and what undoes it.
SLEEPING = {"sglang": ("/release_memory_occupation", "/resume_memory_occupation")}
OTHERS_SLEEPING = ("/sleep?level=1", "/wake_up")


class Server(Protocol):
    """A server that has started, on this machine or another."""

    name: str
    address: str  # HOST:PORT

    def wait_until_ready(self, limit_s: float, key: str) -> None:
        """Return when it answers. TransportError where it ends before, or takes more than `limit_s`."""

    async def ask(self, path: str, body: Any, limit_s: float) -> Any:
        """The JSON that POST `path` answers; TransportError, which says how the server ended if it has."""

    def close(self) -> None:
        """End it."""


class RewardServers:
    """Servers with a copy of a model each. `sleeps`: they sleep now, and except between `wake` and `sleep`."""

    def __init__(self, servers: Sequence[Server], settings: ScoringModelConfig, sleeps: bool):
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


@dataclass(frozen=True)
class PlannedServer:
    """A server on `devices` (indices) of machine `node`. `command` starts it at a host and port; a `judge` is asked by
    others than the driver."""

    name: str
    command: Callable[[str, int], list[str]]
    node: int
    devices: tuple[int, ...]
    sleeps: bool
    is_judge: bool = False

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """`given`, and what the server needs."""
        paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), given.get("PYTHONPATH")]))
        asks = {"VLLM_SERVER_DEV_MODE": "1"} if self.sleeps else {}  # vLLM answers `/sleep` and `/wake_up`
        defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        return {**defaults, **given, **asks, "PYTHONPATH": paths}


def planned_servers(
    config: RewardConfig, places: Sequence[tuple[int, Sequence[int]]], sleeps: bool
) -> list[PlannedServer]:
    """The servers of a reward model, one at each of `places` (machine and devices), or that of a judge, which has the
    devices of all of them, on one machine."""
    settings = config.reward_model
    if reward_model_place(config) == "judge":
        command = partial(judge_command, settings, get_platform().device_name, max(len(places), 1), sleeps)
        everything = tuple(device for _, devices in places for device in devices)
        return [PlannedServer("the judge", command, places[0][0], everything, sleeps, is_judge=True)]
    command = partial(classifier_command, settings, sleeps)
    return [
        PlannedServer(f"server {number} of the reward model", command, node, tuple(devices), sleeps)
        for number, (node, devices) in enumerate(places)
    ]


def start_servers(
    config: RewardConfig, places: Sequence[tuple[int, Sequence[int]]], port: int, sleeps: bool, started: ExitStack
) -> RewardServers:
    """The servers at `places` of this machine; a judge listens on `port`. `started` closes them.

    TransportError where one does not start.
    """
    servers: list[Server] = []
    for planned in planned_servers(config, places, sleeps):
        at = port if planned.is_judge else free_port()
        environment = planned.environment(get_platform().rollout_environment(planned.devices))
        server = HTTPServerProcess(planned.name, planned.command(HOST, at), environment, at)
        started.callback(server.close)
        servers.append(server)
    return RewardServers(servers, config.reward_model, sleeps)


def classifier_command(settings: ScoringModelConfig, sleeps: bool, host: str, port: int) -> list[str]:
    """The command line of a server that classifies."""
    rollout = settings.rollout
    python, dtype = rollout.server.python or sys.executable, None if rollout.dtype == "auto" else rollout.dtype
    own: dict[str, Any] = {"host": host, "port": port, "served_model_name": NAME, "dtype": dtype}
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


def judge_command(
    settings: ScoringModelConfig, device: str, replicas: int, sleeps: bool, host: str, port: int
) -> list[str]:
    """The command line of `verl serve` for a judge on such devices."""
    rollout, path = settings.rollout, str(settings.model_path)
    kwargs = {"vllm": rollout.engine_kwargs.vllm, "sglang": rollout.engine_kwargs.sglang}.get(rollout.name or "", {})
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
        "skip_tokenizer_init": False,  # a question may have stop texts and a form of its answer
        **{f"engine_kwargs.{rollout.name}.{name}": json.dumps(value) for name, value in kwargs.items()},
    }
    overrides = [f"rollout.{name}={value}" for name, value in values.items() if value is not None]
    serve = [sys.executable, "-m", "verl.commands.serve.command", "--host", host, "--port", str(port), "--name", path]
    limits = ["--max-concurrent", "100000", *(["--allow-sleep"] if sleeps else [])]
    return [*serve, *limits, f"model={path}", f"trainer.device={device}", *overrides]
