"""Publishing through a transport: the trainer's ranks send while every replica's workers receive."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import torch

from verl.checkpoint_engine.base import PieceTransport
from verl.checkpoint_engine.ends import Manifest, TransportSettings
from verl.runtime.group import WorkerGroup
from verl.utils.errors import TransportError
from verl.workers.rollout.base import CopyingEngine, StaleWeightsError

PATIENCE = 300.0  # seconds, unless the transport's `timeout` says otherwise


class Courier:
    """Moves the ends of one transport: `trainer` holds `EngineWorker`s, `engine` the replicas.

    Our own transports stay connected from publish to publish; a plug-in's is built and freed for each.
    """

    def __init__(self, settings: TransportSettings, trainer: WorkerGroup, engine: CopyingEngine):
        self.settings, self.trainer, self.engine = settings, trainer, engine
        self.transport = settings.transport()
        self.connected = False

    async def carry(self, version: int) -> tuple[Manifest, int, list[Manifest]]:
        """Fingerprints of what left and its bytes, and of what arrived at each replica.

        Raises StaleWeightsError with what each end that failed had to say; then every end is closed.
        """
        if not self.connected:
            await self._connect()
        sending = {"trainer": self._trainer("send", (version, dtype_name(self.engine.dtype)))}
        sent = await self._all(version, sending) if getattr(self.transport, "sends_first", False) else []
        receiving = self._replicas("receive", [version] * len(self.engine.receivers))
        ranks, *arrived = [*sent, *await self._all(version, receiving if sent else sending | receiving)]
        if not issubclass(self.transport, PieceTransport):
            await self._close()
        manifest = {name: value for names, _ in ranks for name, value in names.items()}
        num_bytes = max(count for _, count in ranks)
        return manifest, num_bytes, [replica for receiver in arrived for replica in receiver]

    async def _connect(self) -> None:
        count = len(self.engine.receivers)
        opening = {"trainer": self._trainer("open", self.settings)} | self._replicas("open", [self.settings] * count)
        ours, *theirs = await self._all(None, opening)
        workers = [len(answers) for answers in theirs]
        facts = [*ours, *(fact for answers in theirs for fact in answers)]
        ours, theirs = map(rows, self.transport.build_topology(len(ours), sum(workers), facts))
        shares = [[theirs.pop(0) for _ in range(share)] for share in workers]
        await self._all(None, {"trainer": self._trainer("connect", ours)} | self._replicas("connect", shares))
        self.connected = True

    async def _close(self) -> None:
        self.connected = False
        calls = {"trainer": self._trainer("close", None)} | self._replicas("close", [None] * len(self.engine.receivers))
        await self._answers(calls, 1.0)

    async def _trainer(self, step: str, argument: Any) -> list[Any]:
        return await asyncio.to_thread(self.trainer.broadcast, "join", step, argument)

    def _replicas(self, step: str, arguments: Sequence[Any]) -> dict[str, Coroutine[Any, Any, Any]]:
        pairs = zip(self.engine.receivers, arguments, strict=True)
        return {f"replica {number}": replica.join(step, argument) for number, (replica, argument) in enumerate(pairs)}

    async def _answers(self, calls: dict[str, Coroutine[Any, Any, Any]], patience: float) -> list[Any]:
        """What the calls return or raise. Once the trainer is done, or one has failed, each answer may take `patience`
        seconds; who does not answer then is given up."""
        tasks = {name: asyncio.create_task(call) for name, call in calls.items()}
        waiting, hurry = set(tasks.values()), "trainer" not in tasks
        while waiting:
            done, waiting = await asyncio.wait(
                waiting, timeout=patience if hurry else None, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            hurry = hurry or tasks["trainer"] in done or any(task.exception() for task in done)
        for task in waiting:
            task.cancel()
        silent = TransportError(f"no answer for {patience} s")
        return [silent if task in waiting else task.exception() or task.result() for task in tasks.values()]

    async def _all(self, version: int | None, calls: dict[str, Coroutine[Any, Any, Any]]) -> list[Any]:
        """What all calls return, carried out side by side. One that fails closes its end, so the others end too."""
        answers = await self._answers(calls, float(self.settings.arguments.get("timeout", PATIENCE)))
        failures = [(name, a) for name, a in zip(calls, answers, strict=True) if isinstance(a, BaseException)]
        if not failures:
            return answers
        await self._close()
        failures.sort(key=lambda failure: isinstance(failure[1], TransportError))  # causes before consequences
        what = "the weights' transport could not be set up" if version is None else f"version {version} did not arrive"
        raise StaleWeightsError(
            f"{what} (checkpoint_engine.backend={self.settings.backend}): "
            + "; ".join(f"{name}: {getattr(error, 'remote_traceback', error)}" for name, error in failures)
        ) from failures[0][1]


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """As JSON carries it."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def rows(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """{name: one value per worker} as one {name: value} per worker."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
