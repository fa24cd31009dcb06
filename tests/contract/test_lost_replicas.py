"""Rollout replicas that die or hang: their requests are answered once, and others take their place."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import rollout_server
from tests.contract.test_transports import BUCKET, Rank, ShardedTrainer, settings, sharded_trainer
from tests.contract.test_weight_sync import VOCAB, scores, small_model
from tests.sampling_server import answer_to
from verl.config.rollout import RolloutConfig, ServerConfig
from verl.runtime.group import Layout, ObjectOnNode, WorkerGroup
from verl.runtime.inline import InlineGroup
from verl.runtime.processes import ProcessGroup
from verl.utils.errors import VerlError, WorkerError
from verl.weight_sync.base import Receipt
from verl.weight_sync.copy_sync import CopySync
from verl.weight_sync.logprob_probe import LogprobProbe, probe_sequences
from verl.weight_sync.weight_transfer import WeightTransfer
from verl.workers.rollout.base import Completion, GenerationRequest, SamplingParams
from verl.workers.rollout.engine_stats import metrics_between
from verl.workers.rollout.remote.engine import RemoteEngine
from verl.workers.rollout.remote.handshake import new_secret
from verl.workers.rollout.remote.process import DriversSettings, ServerOnNode, start_on_node
from verl.workers.rollout.router import Router

TIMEOUT_S = 2.0  # without a sign of life


class Run:
    """Two replicas in processes of their own, and a trainer that publishes to them."""

    def __init__(
        self,
        folder: Path,
        max_restarts: int,
        timeout: float = TIMEOUT_S,
        shares_devices: bool = False,
        nodes: "list[Node] | None" = None,
    ):
        self.model, self.folder = small_model(), folder
        self.model.save_pretrained(folder)
        server = ServerConfig(python=rollout_server.python_wrapper(folder, "tests.sampling_server"), timeout=timeout)
        config = RolloutConfig(name="vllm", dtype="float32", server=server)

        def start(number: int) -> RemoteEngine:
            if nodes is None:
                return RemoteEngine(config, folder, (), number)
            nodes.append(Node(str(server.python), secret := new_secret()))
            return RemoteEngine(config, folder, (), number, (), ServerOnNode(nodes[-1], secret, 120.0))

        engines = [start(number) for number in range(2)]
        for engine in engines:
            engine.wait_until_ready()
        self.router = Router(engines, start, max_restarts, shares_devices)
        self.extra: dict[str, torch.Tensor] = {}
        self.publish_from(InlineGroup(Rank(lambda: [*self.model.named_parameters(), *self.extra.items()])))

    def publish_from(self, trainer: WorkerGroup, backend: str = "naive") -> None:
        async def logprobs(sequences: list[list[int]]) -> list[list[float]]:
            return scores(self.model, sequences)

        transfer = WeightTransfer(settings(backend, self.folder), trainer, self.router)
        probe = LogprobProbe(probe_sequences(VOCAB), logprobs)
        self.sync = CopySync(lambda: [], self.router, probe, 0, transfer)

    def publish(self, version: int) -> Receipt:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 1e-2)
        return asyncio.run(self.sync.publish(version))

    def wait_for_replacement(self, number: int) -> None:
        end = time.monotonic() + 120
        while not self.router.starting[number].has_started:
            assert time.monotonic() < end
            time.sleep(0.05)

    def answers(
        self, requests: list[GenerationRequest], disturb: Callable[[], None], after_s: float = 0.3
    ) -> list[list[Completion]]:
        async def ask() -> list[list[Completion]]:
            waiting = [asyncio.create_task(self.router.generate(request)) for request in requests]
            await asyncio.sleep(after_s)
            disturb()
            return await asyncio.gather(*waiting)

        return asyncio.run(ask())

    def signal(self, number: int, what: signal.Signals) -> None:
        self.router.engines[number].server.process.send_signal(what)


class Node(ObjectOnNode):
    """Another machine, played by this one: its server listens, and it does not answer once it is lost."""

    def __init__(self, python: str, secret: bytes):
        self.server = start_on_node(python, secret, DriversSettings(os.getcwd(), False, (), {}), "127.0.0.1", ())
        self.is_lost = False

    def call(self, method: str, *args: Any, limit_s: float = 5.0) -> Any:
        if self.is_lost:
            raise VerlError("its node has ended")
        return getattr(self.server, method)(*args)

    def end(self) -> None:
        if self.server.process.stdin is not None:
            self.server.process.stdin.close()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(**how: float) -> Run:
        runs.append(Run(tmp_path, **how))
        return runs[-1]

    yield start
    for run in runs:
        run.router.close()


def some_requests(first: int = 0) -> list[GenerationRequest]:
    return [GenerationRequest(first + i, [1, 2], SamplingParams(n=2, max_tokens=60)) for i in range(6)]


def check_answers(requests: list[GenerationRequest], answers: list[list[Completion]], version: int) -> None:
    """Each request has one answer, the same that it would have had without a loss."""
    for request, completions in zip(requests, answers, strict=True):
        assert [c.token_ids for c in completions] == [answer_to(request, sample) for sample in range(2)]
        assert all(c.policy_version == (version, version) for c in completions)


def test_a_killed_and_a_stopped_replica_are_replaced(started: Callable[..., Run], caplog: pytest.LogCaptureFixture):
    run = started(max_restarts=1)
    assert run.publish(0).num_replicas == 2
    before = asyncio.run(run.router.stats())

    check_answers(requests := some_requests(), run.answers(requests, lambda: run.signal(1, signal.SIGKILL)), 0)
    assert "replica 1: its process ended with signal SIGKILL" in caplog.text and "1 of at most" in caplog.text
    assert len(run.router.replicas) == 1
    run.wait_for_replacement(1)
    receipt = run.publish(1)
    assert (receipt.num_replicas, len(receipt.probes)) == (2, 2)
    check_answers(requests := some_requests(10), run.answers(requests, lambda: None), 1)
    now = asyncio.run(run.router.stats())
    assert before[1].gauges != now[1].gauges
    assert (
        metrics_between(before, now)["generated_tokens"] >= 2 * 6 * 2 * 60 - 1
    )  # what the dead one had said of its own
    assert run.publish(2).probes == ()

    caplog.clear()
    check_answers(requests := some_requests(20), run.answers(requests, lambda: run.signal(0, signal.SIGSTOP)), 2)
    assert "no sign of life" in caplog.text and "rollout.server.timeout=2" in caplog.text and "SIGSTOP" in caplog.text
    with pytest.raises(WorkerError, match=r"(?s)replica 1: .*SIGKILL; its last lines.*no replica is left") as caught:
        run.answers(some_requests(30), lambda: run.signal(1, signal.SIGKILL))
    assert not caught.value.is_death and "server.max_restarts=1" in str(caught.value)


@pytest.mark.slow
def test_on_shared_devices_no_replacement_starts_or_stays_awake_beside_the_trainer(started: Callable[..., Run]):
    run = started(max_restarts=2, shares_devices=True)
    run.publish(0)
    asyncio.run(run.router.sleep_until_update())
    run.signal(1, signal.SIGKILL)
    asyncio.run(run.router.renew())
    assert not run.router.starting and run.router.restarts == [0, 1]
    assert run.publish(1).num_replicas == 1
    [replacement] = run.router.starting.values()  # since the replicas woke
    asyncio.run(run.router.sleep_until_update())
    assert replacement._started.done() and replacement._asleep
    receipt = run.publish(2)
    assert (receipt.num_replicas, len(receipt.probes)) == (2, 2) and run.router.engines[1] is replacement
    check_answers(requests := some_requests(), run.answers(requests, lambda: None), 2)


@pytest.mark.slow
def test_a_replica_that_computes_or_waits_for_the_trainer_is_no_loss(started: Callable[..., Run]):
    run = started(max_restarts=1, timeout=1.0)
    run.extra = {"stall 1": torch.ones(3)}  # it sleeps 5 s in the transfer
    assert run.publish(0).num_replicas == 2 and run.router.restarts == [0, 0]


@pytest.mark.slow
def test_replicas_on_other_machines_are_replaced_and_one_whose_machine_is_lost_is_told(
    started: Callable[..., Run], caplog: pytest.LogCaptureFixture
):
    nodes: list[Node] = []
    run = started(max_restarts=2, nodes=nodes)
    assert run.publish(0).num_replicas == 2
    check_answers(
        requests := some_requests(),
        run.answers(requests, lambda: nodes[1].server.process.send_signal(signal.SIGSTOP)),
        0,
    )
    assert "its process on node 127.0.0.1 gave no sign of life" in caplog.text and "SIGSTOP" in caplog.text
    assert nodes[1].server.process.wait(60) == -signal.SIGKILL
    run.wait_for_replacement(1)
    assert run.publish(1).num_replicas == 2

    def lose() -> None:  # nothing comes any more, not even the end of the connection
        nodes[0].server.process.send_signal(signal.SIGSTOP)
        nodes[0].is_lost = True

    check_answers(requests := some_requests(10), run.answers(requests, lose), 1)
    assert "rollout replica 0: its node has ended" in caplog.text
    nodes[0].server.kill()
    run.wait_for_replacement(0)
    run.router.close()
    assert all(node.server.process.wait(60) is not None for node in nodes)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["naive", "nccl"])
def test_a_replica_that_dies_in_a_publish_is_left_out(started: Callable[..., Run], backend: str):
    run = started(max_restarts=1)
    run.publish_from(run.sync.weight_transfer.trainer, backend)
    run.extra = {"die 1": torch.ones(3), "more": torch.ones(2 * BUCKET)}
    assert run.publish(0).num_replicas == 1
    run.extra = {}
    run.wait_for_replacement(1)
    assert run.publish(1).num_replicas == 2 and run.router.version == 1
    check_answers(requests := some_requests(), run.answers(requests, lambda: None), 1)


class DeadlyTrainer(ShardedTrainer):
    """A rank whose weights end replica 1 when they arrive there, early among many."""

    def export_deadly(self) -> None:
        self.engine.export_weights = lambda: iter(
            [("die 1", torch.ones(3)), *self.export(), *((f"more {i}", torch.ones(BUCKET)) for i in range(8))]
        )


def deadly_trainer(folder: Path) -> DeadlyTrainer:
    trainer = sharded_trainer(folder)
    trainer.__class__ = DeadlyTrainer
    trainer.export_deadly()
    return trainer


@pytest.mark.slow
def test_the_ranks_of_a_sharded_trainer_survive_a_replica_that_dies_in_a_publish(started: Callable[..., Run]):
    run = started(max_restarts=1)
    group = ProcessGroup(partial(deadly_trainer, run.folder), Layout.data_parallel(2))
    try:
        run.publish_from(group)
        run.sync.probe = None
        assert asyncio.run(run.sync.publish(0)).num_replicas == 1
    finally:
        group.close()


@pytest.mark.slow
def test_a_stream_goes_on_where_a_killed_replica_ended(started: Callable[..., Run], caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    run = started(max_restarts=1)
    request, passed = some_requests()[0], {0: [], 1: []}

    async def ask() -> list[Completion]:
        task = asyncio.create_task(run.router.stream(request, lambda sample, ids, *_: passed[sample].extend(ids)))
        while not (passed[0] or task.done()):
            await asyncio.sleep(0.02)
        run.signal(0, signal.SIGKILL)
        return await task

    check_answers([request], [asyncio.run(ask())], -1)
    assert [passed[0], passed[1]] == [answer_to(request, sample) for sample in range(2)]
    run.wait_for_replacement(0)  # never published: it joins at the next request
    check_answers(requests := some_requests(9), run.answers(requests, lambda: None), -1)
    assert len(run.router.replicas) == 2
