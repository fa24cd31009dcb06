"""Transports without the processes that use them: device memory, a plug-in's library, what cannot work."""

import os
import shutil
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.contract.test_transports import settings
from verl.checkpoint_engine import broadcast, shared_memory
from verl.checkpoint_engine.buckets import buckets
from verl.checkpoint_engine.endpoint import TransportEndpoint, TransportSettings
from verl.config import load_config
from verl.placement.plan import Machine, plan_placement
from verl.trainer.ppo import rollout_setup
from verl.trainer.ppo.rollout_setup import build_weight_sync, check_rollout_engine_can_train
from verl.utils.errors import ConfigError, PluginError, TransportError


def test_replicas_read_from_the_rank_on_their_device_and_the_others_from_the_first(monkeypatch: pytest.MonkeyPatch):
    """Three ranks on devices a, b and c; replicas on c and a, and one whose device no rank has."""
    here, used = threading.local(), list[str]()
    monkeypatch.setattr(shared_memory, "device_identity", lambda: here.device)

    def allocate(size: int) -> shared_memory.BufferHalf:
        used.append(here.device)
        return shared_memory.allocate_host_half(size)

    monkeypatch.setattr(shared_memory, "allocate_device_half", allocate)
    devices, ends, metadata = ["a", "b", "c", "c", "a", "d"], [], []
    for here.device in devices:
        ends.append(shared_memory.SharedMemoryTransport(4000, timeout=60))
        metadata.append(ends[-1].prepare())
    trainer, rollout = shared_memory.SharedMemoryTransport.build_topology(3, 3, metadata)
    assert (trainer["rank"], trainer["receivers"]) == ([0, -1, 0], [2, 0, 1])
    arrived: dict[int, list[float]] = {}

    def run(number: int) -> None:
        here.device = devices[number]
        side, index = (trainer, number) if number < 3 else (rollout, number - 3)
        ends[number].init_process_group(**{name: values[index] for name, values in side.items()})
        if number >= 3:
            arrived[number] = [float(t[0]) for bucket in ends[number].receive_buckets(0) for _, t in bucket]
        elif trainer["rank"][number] == 0:  # each rank sends its own number
            weights = [(f"{n}", torch.full((50,), float(number))) for n in range(20)]
            for _ in ends[number].send_buckets(buckets(weights, 1000), None, 0):
                pass

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arrived == {3: [2.0] * 20, 4: [0.0] * 20, 5: [0.0] * 20}
    assert set(used) == {"c"}  # rank 0 has a receiver on another device, so it sends through host memory
    for end in ends:
        end.finalize()


def test_replicas_on_several_machines_read_from_a_rank_of_theirs():
    transport = shared_memory.SharedMemoryTransport
    machines = ["m", "m", "n", "n", "m"]  # three ranks, two replicas
    metadata = [{"device": "", "machine": machine, "root": f"/shared of {machine}"} for machine in machines]
    trainer, rollout = transport.build_topology(3, 2, metadata)
    assert (trainer["rank"], trainer["receivers"]) == ([0, -1, 0], [1, 0, 1])
    assert rollout["folder"] == [trainer["folder"][2], trainer["folder"][0]]
    assert [folder.partition("/verl-weights-")[0] for folder in rollout["folder"]] == ["/shared of n", "/shared of m"]
    metadata[4]["machine"] = "another"
    with pytest.raises(ConfigError, match="rollout worker 1 is on a machine without a rank"):
        transport.build_topology(3, 2, metadata)


def test_replicas_on_machines_without_ranks_get_a_broadcast_from_the_address_of_rank_0():
    actor: Any = SimpleNamespace(group=SimpleNamespace(address="10.0.0.1"))
    rollout = "actor_rollout_ref.rollout"

    def reaching(backend: str, *words: str, **given: str) -> tuple[str, dict[str, str]]:
        config = load_config([f"{rollout}.name=vllm", "trainer.n_gpus_per_node=8", f"{rollout}.n=8", *words])
        plan = plan_placement(config, Machine("cuda", 8), "ray")
        found = rollout_setup._reaching(TransportSettings(backend, 1, given), config, plan, actor)
        return found.backend, found.arguments

    far = [f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=8"]
    assert reaching("naive", *far) == ("nccl", {"address": "10.0.0.1"})
    assert reaching("naive", "trainer.nnodes=2") == ("naive", {})  # each machine has ranks
    assert reaching("nccl", "trainer.nnodes=2") == ("nccl", {"address": "10.0.0.1"})
    assert reaching("nccl", *far, address="10.9.9.9") == ("nccl", {"address": "10.9.9.9"})
    assert reaching("file", *far, folder="/x") == ("file", {"folder": "/x"})
    assert reaching("nccl") == ("nccl", {})  # one machine: loopback


def test_processes_that_share_a_device_share_its_memory(monkeypatch: pytest.MonkeyPatch):
    """The device is played by this process: what CUDA's handles would name is looked up in a table."""
    table: list[Tensor] = []

    def allocate_device_half(size: int) -> shared_memory.BufferHalf:
        table.append(torch.zeros(size, dtype=torch.uint8))
        return shared_memory.BufferHalf(table[-1], handle=[len(table) - 1])

    monkeypatch.setattr(shared_memory, "device_identity", lambda: "the one device")
    monkeypatch.setattr(shared_memory, "allocate_device_half", allocate_device_half)
    monkeypatch.setattr(shared_memory, "open_device_memory", lambda handle: table[handle[0]])
    sent = [(f"{n}", torch.randn(50 + n)) for n in range(40)]
    ends = [shared_memory.SharedMemoryTransport(4000, timeout=60) for _ in range(3)]
    arguments = shared_memory.SharedMemoryTransport.build_topology(1, 2, [end.prepare() for end in ends])
    folder, modes, remove = arguments[0]["folder"][0], list[int](), shutil.rmtree

    def note_and_remove(path: str, ignore_errors: bool) -> None:
        modes.append(os.stat(path).st_mode & 0o777)
        remove(path, ignore_errors)

    monkeypatch.setattr(shared_memory.shutil, "rmtree", note_and_remove)
    arrived: dict[int, list[tuple[str, Tensor]]] = {}

    def receive(number: int) -> None:
        ends[number].init_process_group(number, folder, 2)
        arrived[number] = [named for bucket in ends[number].receive_buckets(0) for named in bucket]

    threads = [threading.Thread(target=receive, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    ends[0].init_process_group(0, folder, 2)
    assert ends[0].max_bucket_bytes() == 2000 and modes == [0o700] and not os.path.exists(folder)
    for _ in ends[0].send_buckets(buckets(sent, 2000), torch.bfloat16, 0):
        pass
    for thread in threads:
        thread.join()
    for number in (1, 2):
        assert [name for name, _ in arrived[number]] == [name for name, _ in sent]
        assert all(torch.equal(a, b.bfloat16()) for (_, a), (_, b) in zip(arrived[number], sent, strict=True))
    assert len(table) == 2  # one per half, used again and again
    for end in ends:
        end.finalize()


def test_a_library_that_a_plug_in_brings_to_torch_is_used():
    made = []

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        made.append((rank, size))
        return broadcast.process_group("gloo", store, rank, size, timeout, broadcast.LOOPBACK)

    dist.Backend.register_backend("acmeccl", create, devices=["cpu"])
    store = dist.HashStore()
    group = broadcast.process_group("acmeccl", store, 0, 1, broadcast.timedelta(seconds=60))
    assert made == [(0, 1)] and group.size() == 1
    with pytest.raises(ConfigError, match=r"no process groups of 'nobodyccl' in this torch"):
        broadcast.process_group("nobodyccl", store, 0, 1, broadcast.timedelta(seconds=60))


def test_what_cannot_work_is_refused_with_the_way_out(tmp_path: Path):
    with pytest.raises(PluginError, match=r"unknown checkpoint engine 'nixl'; known: .*naive"):
        settings("nixl", tmp_path).transport()
    with pytest.raises(ConfigError, match=r"engine_kwargs.file.folder=DIR"):
        TransportEndpoint().open(TransportSettings("file", 1, {}))
    nccl = "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"
    with pytest.raises(ConfigError, match=r"backend=nccl has nothing to carry: rollout.name=native samples where"):
        check_rollout_engine_can_train(load_config([nccl]).actor_rollout_ref)
    config = load_config([nccl, "actor_rollout_ref.rollout.name=vllm"])
    plan = plan_placement(config, Machine("cpu"))
    here = SimpleNamespace(group=SimpleNamespace(local_worker=nn.Identity()), model=None)
    with pytest.raises(ConfigError, match=r"backend=nccl has nothing to carry: with rollout.name=vllm"):
        build_weight_sync(config, plan, here, SimpleNamespace(receivers=[SimpleNamespace(out_of_process=False)]))
    with pytest.raises(TransportError, match=r"did not offer its weights within 0.05 s"):
        shared_memory.SharedMemoryTransport(1, timeout=0.05).init_process_group(1, str(tmp_path), 1)


def test_a_rank_whose_receiver_is_gone_takes_part_until_all_weights_are_produced(monkeypatch: pytest.MonkeyPatch):
    produced: list[int] = []

    def weights() -> Any:
        for i in range(5):
            produced.append(i)
            yield str(i), torch.ones(3)

    def send_buckets(offered: Any, *_: Any) -> Any:
        yield next(iter(offered))
        raise BrokenPipeError

    endpoint = TransportEndpoint()
    endpoint.transport = transport = shared_memory.SharedMemoryTransport(12)
    transport.rank = 0
    monkeypatch.setattr(transport, "send_buckets", send_buckets)
    with pytest.raises(BrokenPipeError):
        endpoint.send(weights(), 0, None)
    assert produced == [0, 1, 2, 3, 4]
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(TransportError, match="disconnected"):
        shared_memory.send_descriptor(ours, 0)
