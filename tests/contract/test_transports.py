"""Weights between processes: every transport carries them exactly, and says who failed when somebody does."""

import asyncio
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import rollout_server
from tests.contract.test_weight_sync import VOCAB, scores, small_model
from tests.engine_cases import build_engine
from verl.checkpoint_engine import broadcast, shared_memory
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.checkpoint_engine.endpoint import TransportEndpoint, TransportSettings
from verl.config.rollout import RolloutConfig, ServerConfig
from verl.models import lora
from verl.runtime.group import Layout
from verl.runtime.inline import InlineGroup
from verl.runtime.processes import ProcessGroup
from verl.utils.errors import TransportError
from verl.weight_sync.copy_sync import CopySync
from verl.weight_sync.logprob_probe import LogprobProbe, probe_sequences
from verl.weight_sync.weight_transfer import WeightTransfer
from verl.workers.engine_worker import EngineWorker
from verl.workers.rollout.base import StaleWeightsError
from verl.workers.rollout.remote.engine import RemoteEngine
from verl.workers.rollout.router import Router

BACKENDS = ["naive", "nccl", "file"]
BUCKET = 60_000  # bytes: the small model takes several buckets
SEQUENCES = [[1, 2, 3, 4]]
TIMEOUT = 3.0  # seconds; "stall" takes 5
MORE = {f"after {n}": torch.ones(20_000) for n in range(8)}  # buckets that follow what goes wrong


class Rank(EngineWorker):
    """A trainer's rank that sends what `weights` gives."""

    def __init__(self, weights: Callable[[], Any]):
        self.endpoint, self.engine = TransportEndpoint(), SimpleNamespace(rank=0, export_weights=weights)


def settings(backend: str, folder: Path, timeout: float = 20.0, bucket: int = BUCKET) -> TransportSettings:
    more = {"folder": str(folder / "shared")} if backend == "file" else {}
    return TransportSettings(backend, bucket, {"timeout": timeout, **more})


def start(folder: Path, count: int) -> list[RemoteEngine]:
    small_model().save_pretrained(folder)
    python = ServerConfig(python=rollout_server.python_wrapper(folder))
    servers = [
        RemoteEngine(RolloutConfig(name="vllm", dtype="float32", server=python), folder, (), n) for n in range(count)
    ]
    for server in servers:
        server.wait_until_ready()
    return servers


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    router = Router(start(tmp_path_factory.mktemp("model"), 2))
    yield router
    router.close()


class Publishing:
    """A model of this process and its way to the replicas."""

    def __init__(self, engine: Any, how: TransportSettings):
        self.model, self.extra = small_model(), {}
        rank = Rank(lambda: [*self.model.named_parameters(), *self.extra.items()])
        self.weight_transfer = WeightTransfer(how, InlineGroup(rank), engine)
        self.sync = CopySync(lambda: [], engine, None, 0, self.weight_transfer)
        self.engine = engine

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 1e-2)

    def publish(self, version: int) -> Any:
        return asyncio.run(self.sync.publish(version))

    def loses(self, version: int, order: str, reason: str) -> str:
        """A publish in which a replica follows an `order` such as "fail 1"; what is said of it."""
        self.extra = {order: torch.ones(3), **MORE}
        with pytest.raises(StaleWeightsError, match=rf"version {version} did not arrive .*{reason}") as caught:
            self.publish(version)
        self.extra = {}
        return str(caught.value)

    def close(self) -> None:
        asyncio.run(self.weight_transfer._close())


@pytest.fixture
def publishing(servers: Router, tmp_path: Path) -> Iterator[Callable[..., Publishing]]:
    made: list[Publishing] = []

    def make(backend: str, **how: Any) -> Publishing:
        made.append(Publishing(servers, settings(backend, tmp_path, **how)))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


def nobody_waited(said: str) -> bool:
    """No end learnt of the failure by the timeout alone."""
    return not re.search(r"(?i)timed out|timeout|no answer|came for|offer|did not take", said)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where ends meet in this test alone; a socket's path must be short."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setattr(shared_memory, "SHARED_MEMORY", Path(folder))
        yield Path(folder)


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_replicas_compute_with_what_was_published(
    backend: str, publishing: Any, servers: Router, memory: Path, tmp_path: Path
):
    publisher = publishing(backend)
    for version in range(4):
        publisher.step()
        publisher.extra = {"more": torch.arange(100_000.0 * version)} if version else {}  # beyond the buffer
        receipt = publisher.publish(version)
        assert receipt.num_replicas == 2
        numbers = sum(p.numel() for p in publisher.model.parameters()) + sum(
            t.numel() for t in publisher.extra.values()
        )
        assert receipt.bytes_moved == 2 * 4 * numbers
        for replica in servers.engines:
            assert replica.version == version
            assert asyncio.run(replica.compute_logprobs(SEQUENCES))[0] == pytest.approx(
                scores(publisher.model, SEQUENCES)[0], abs=1e-6
            )
    assert not list(memory.iterdir())
    assert len(list(tmp_path.glob("shared/*/*"))) == (backend == "file")  # only the newest version is kept
    publisher.close()
    assert not list(tmp_path.glob("shared/*"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replica_that_fails_is_named_at_once_and_the_next_publish_succeeds(backend: str, publishing: Any):
    publisher = publishing(backend)
    publisher.publish(0)
    assert nobody_waited(publisher.loses(1, "fail 1", r"replica 1: .*no room for a tensor"))
    assert publisher.publish(2).num_replicas == 2


@pytest.mark.parametrize("backend", ["naive", "nccl"])
def test_a_replica_that_stops_is_given_up_after_the_timeout(backend: str, publishing: Any):
    publisher = publishing(backend, timeout=TIMEOUT)
    publisher.publish(0)
    assert not nobody_waited(publisher.loses(1, "stall 1", "trainer: "))
    publisher.publish(2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replica_that_is_silent_is_given_up_and_may_come_back(backend: str, publishing: Any, servers: Router):
    publisher = publishing(backend, timeout=TIMEOUT)
    publisher.publish(0)
    publisher.extra = dict(MORE)
    process = servers.engines[1].server.process
    process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(StaleWeightsError, match=r"version 1 did not arrive .*replica 1: no answer for 3.0 s"):
            publisher.publish(1)
    finally:
        process.send_signal(signal.SIGCONT)
    publisher.publish(2)
    assert servers.version == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trainer_that_fails_half_way_leaves_nobody_waiting(backend: str, publishing: Any):
    publisher = publishing(backend)
    publisher.publish(0)
    weights, rank = list(publisher.model.named_parameters()), publisher.weight_transfer.trainer.local_worker

    def half() -> Iterator[tuple[str, Tensor]]:
        yield from weights[: len(weights) // 2]
        raise ValueError("a shard is gone")

    rank.engine.export_weights = half
    with pytest.raises(StaleWeightsError, match=r"version 1 did not arrive .*: trainer: a shard is gone") as caught:
        publisher.publish(1)
    assert nobody_waited(str(caught.value))
    rank.engine.export_weights = lambda: weights
    publisher.publish(2)


def test_a_trainer_that_cannot_send_what_it_announced_closes_its_connections(
    publishing: Any, monkeypatch: pytest.MonkeyPatch
):
    """Its error is alive for as long as the replicas are waited for, and what it names must not keep them waiting."""
    publisher = publishing("nccl")
    publisher.publish(0)
    publisher.extra, begin = dict(MORE), broadcast.BroadcastTransport._broadcast

    def second_fails(transport: broadcast.BroadcastTransport, half: int, run: Tensor) -> None:
        if half == 1:
            raise TransportError("the line is gone")
        begin(transport, half, run)

    with monkeypatch.context() as patch, pytest.raises(StaleWeightsError, match=r"trainer: the line is gone") as caught:
        patch.setattr(broadcast.BroadcastTransport, "_broadcast", second_fails)
        publisher.publish(1)
    assert nobody_waited(str(caught.value))
    assert len(re.findall(r"replica \d: .*?(Connection|Broken pipe|peer)", str(caught.value))) == 2
    publisher.publish(2)


@pytest.mark.parametrize("backend", ["naive", "nccl"])
def test_a_replica_that_dies_is_named(backend: str, tmp_path: Path):
    (server,) = start(tmp_path, 1)
    publisher = Publishing(Router([server]), settings(backend, tmp_path))
    publisher.publish(0)
    assert nobody_waited(publisher.loses(1, "die 0", r"replica 0: .*ended with signal SIGKILL"))
    server.close()


class ShardedTrainer(EngineWorker):
    """A rank of a sharded trainer with adapters, which may forget them when it publishes."""

    def __init__(self, folder: Path):
        self.endpoint = TransportEndpoint()
        self.engine = build_engine(
            folder, "fp32", strategy="fsdp2", model={"lora_rank": 4, "target_modules": "all-linear"}
        )
        self.export = self.engine.export_weights

    def move(self, seed: int) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.engine.weights.named_parameters:
                if ".lora_" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        self.engine.weights.copy_to_model()

    def whole(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.export()}

    def forget_adapters(self, forget: bool) -> None:
        self.engine.export_weights = self.without_adapters if forget else self.export

    def without_adapters(self) -> Iterator[tuple[str, Tensor]]:
        scales = {name: 0.0 for name in lora.adapter_scales(self.engine.model)}
        return lora.merge_adapters(self.engine.weights.full_tensors(), scales)


def sharded_trainer(folder: Path) -> ShardedTrainer:
    return ShardedTrainer(folder)


@pytest.fixture(scope="module")
def shards(servers: Router) -> Iterator[ProcessGroup]:
    group = ProcessGroup(partial(sharded_trainer, servers.engines[0].model_path), Layout.data_parallel(2))
    yield group
    group.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_shards_and_adapters_arrive_and_forgotten_adapters_are_noticed(
    backend: str, shards: ProcessGroup, servers: Router, tmp_path: Path
):
    async def trainer_logprobs(sequences: Any) -> Any:
        model = small_model()
        model.load_state_dict(shards.broadcast("whole")[0], strict=False)
        return scores(model, sequences)

    shards.broadcast("forget_adapters", False)
    weight_transfer = WeightTransfer(settings(backend, tmp_path), shards, servers)
    sync = CopySync(lambda: [], servers, LogprobProbe(probe_sequences(VOCAB), trainer_logprobs), 1, weight_transfer)
    for version in range(3):
        shards.broadcast("move", version)
        receipt = asyncio.run(sync.publish(version))
    assert all(result.difference < 1e-5 < result.bound for result in receipt.probes)
    shards.broadcast("forget_adapters", True)
    shards.broadcast("move", 4)
    with pytest.raises(StaleWeightsError, match="replica 0 does not compute with version 3"):
        asyncio.run(sync.publish(3))
    asyncio.run(weight_transfer._close())


@CheckpointEngineRegistry.register("a plug-in's")
class PluginTransport(CheckpointEngine):
    """As a vendor writes one: truly asynchronous, built and freed for every publish. Through a folder."""

    def __init__(self, bucket_size: int, place: str):
        self.place = Path(place)

    def prepare(self) -> dict[str, Any]:
        return {"process": os.getpid()}

    @classmethod
    def build_topology(cls, actor_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]) -> Any:
        assert len({fact["process"] for fact in metadata}) == actor_world_size + rollout_world_size == 3
        return {"rank": [0]}, {"rank": [1, 2]}

    def init_process_group(self, rank: int) -> None:
        self.place.mkdir(exist_ok=True)

    def finalize(self) -> None:
        (self.place / f"freed by {os.getpid()}").touch()

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        for number, (name, tensor) in enumerate(weights):
            await asyncio.sleep(0)
            torch.save([name, tensor.detach().clone()], self.place / "partial")
            (self.place / "partial").rename(self.place / f"{global_steps}-{number}")
        (self.place / f"{global_steps}-{number + 1}").touch()

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        number = 0
        while True:
            file = self.place / f"{global_steps}-{number}"
            while not file.exists():
                await asyncio.sleep(0.001)
            if not file.stat().st_size:
                return
            name, tensor = torch.load(file, weights_only=True)
            yield name, tensor
            number += 1


def test_a_transport_of_a_plug_in_carries_weights(servers: Router, tmp_path: Path):
    place = tmp_path / "place"
    how = TransportSettings("a plug-in's", 1 << 20, {"place": str(place)}, "tests.contract.test_transports")
    publisher = Publishing(servers, how)
    for version in range(2):
        publisher.step()
        assert publisher.publish(version).num_replicas == 2
        assert servers.engines[1].version == version and len(list(place.glob("freed by *"))) == 3
        assert asyncio.run(servers.compute_logprobs(SEQUENCES))[0] == pytest.approx(
            scores(publisher.model, SEQUENCES)[0], abs=1e-6
        )
