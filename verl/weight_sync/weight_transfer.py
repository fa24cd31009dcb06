"""Weight transfer through a transport: the trainer's ranks send while every replica's workers receive."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import torch

from verl.checkpoint_engine.base import BucketTransport
from verl.checkpoint_engine.endpoint import Manifest, TransportSettings
from verl.runtime.group import WorkerGroup
from verl.utils.errors import TransportError
from verl.workers.rollout.base import CopyingEngine, StaleWeightsError

DEFAULT_TIMEOUT_S = 300.0  # seconds, unless the transport's `timeout` is set


class WeightTransfer:
    """Drives the endpoints of one transport: `trainer` is a group of `EngineWorker`s, `engine` has the replicas.

    Our own transports stay connected between publishes; a plug-in's transport is built and freed for each publish.
    """

    def __init__(self, settings: TransportSettings, trainer: WorkerGroup, engine: CopyingEngine):
        self.settings, self.trainer, self.engine = settings, trainer, engine
        self.transport = settings.transport()
        self.connected = False
        self.receivers: Sequence[CopyingEngine] = ()  # that were connected

    async def transfer(self, version: int, with_base: bool | None = None) -> tuple[Manifest, int, list[Manifest]]:
        """Fingerprints and bytes of the sent tensors, and the fingerprints that each replica received.

        `with_base`: None sends whole weights; else adapters, and the base weights where it is true.
        If endpoints fail, closes every endpoint and raises StaleWeightsError with the error of each that failed.
        """
        if not self.connected or list(self.engine.receivers) != list(self.receivers):
            await self._connect()
        argument = (version, dtype_name(self.engine.dtype), *(() if with_base is None else (with_base,)))
        sending = {"trainer": self._call_trainer("send", argument)}
        sent = await self._gather_or_raise(version, sending) if getattr(self.transport, "sends_first", False) else []
        receiving = self._call_replicas("receive", [version] * len(self.engine.receivers))
        sent_by_rank, *arrived = [
            *sent,
            *await self._gather_or_raise(version, receiving if sent else sending | receiving),
        ]
        if not issubclass(self.transport, BucketTransport):
            await self._close()
        manifest = {name: value for names, _ in sent_by_rank for name, value in names.items()}
        num_bytes = max(count for _, count in sent_by_rank)
        return manifest, num_bytes, [replica for receiver in arrived for replica in receiver]

    async def _connect(self) -> None:
        num_receivers = len(self.engine.receivers)
        calls = {"trainer": self._call_trainer("open", self.settings)} | self._call_replicas(
            "open", [self.settings] * num_receivers
        )
        trainer_side, *rollout_side = await self._gather_or_raise(None, calls)
        worker_counts = [len(answers) for answers in rollout_side]
        metadata = [*trainer_side, *(metadata_of_worker for answers in rollout_side for metadata_of_worker in answers)]
        trainer_side, rollout_side = map(
            per_worker, self.transport.build_topology(len(trainer_side), sum(worker_counts), metadata)
        )
        per_receiver = [[rollout_side.pop(0) for _ in range(count)] for count in worker_counts]
        await self._gather_or_raise(
            None,
            {"trainer": self._call_trainer("connect", trainer_side)} | self._call_replicas("connect", per_receiver),
        )
        self.connected, self.receivers = True, self.engine.receivers

    async def _close(self) -> None:
        self.connected = False
        calls = {"trainer": self._call_trainer("close", None)} | self._call_replicas(
            "close", [None] * len(self.engine.receivers)
        )
        await self._results_or_errors(calls, 1.0)

    async def _call_trainer(self, step: str, argument: Any) -> list[Any]:
        return await asyncio.to_thread(self.trainer.broadcast, "transport_step", step, argument)

    def _call_replicas(self, step: str, arguments: Sequence[Any]) -> dict[str, Coroutine[Any, Any, Any]]:
        numbers = self.engine.replica_numbers  # one receiver may hold several replicas
        return {
            f"replica {number}": replica.transport_step(step, argument)
            for number, replica, argument in zip(numbers, self.engine.receivers, arguments, strict=False)
        }

    async def _results_or_errors(self, calls: dict[str, Coroutine[Any, Any, Any]], timeout_s: float) -> list[Any]:
        """Results or exceptions of the calls. Once the trainer is done or a call has failed, each next answer may take
        `timeout_s` seconds; then the remaining calls are cancelled."""
        tasks = {name: asyncio.create_task(call) for name, call in calls.items()}
        waiting, is_limited = set(tasks.values()), "trainer" not in tasks
        while waiting:
            done, waiting = await asyncio.wait(
                waiting, timeout=timeout_s if is_limited else None, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            is_limited = is_limited or tasks["trainer"] in done or any(task.exception() for task in done)
        for task in waiting:
            task.cancel()
        no_answer = TransportError(f"no answer for {timeout_s} s")
        return [no_answer if task in waiting else task.exception() or task.result() for task in tasks.values()]

    async def _gather_or_raise(self, version: int | None, calls: dict[str, Coroutine[Any, Any, Any]]) -> list[Any]:
        """Results of all calls, run concurrently; StaleWeightsError, after closing every endpoint, if any failed."""
        answers = await self._results_or_errors(calls, float(self.settings.arguments.get("timeout", DEFAULT_TIMEOUT_S)))
        failures = [(name, a) for name, a in zip(calls, answers, strict=True) if isinstance(a, BaseException)]
        if not failures:
            return answers
        await self._close()
        failures.sort(key=lambda failure: isinstance(failure[1], TransportError))  # causes before consequences
        problem = (
            "the weights' transport could not be set up" if version is None else f"version {version} did not arrive"
        )
        raise StaleWeightsError(
            f"{problem} (checkpoint_engine.backend={self.settings.backend}): "
            + "; ".join(f"{name}: {getattr(error, 'remote_traceback', error)}" for name, error in failures)
        ) from failures[0][1]


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """Name of a dtype, as it is sent in JSON."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def per_worker(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """{name: one value per worker} as one {name: value} per worker."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
