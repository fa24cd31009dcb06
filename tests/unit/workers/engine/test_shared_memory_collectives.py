"""Gathers and reductions through shared memory give what gloo gives, in any number of pieces."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file

from tests.engine_cases import build_engine, save_tiny_model
from tests.ranks import run_ranks
from verl.workers.engine import shared_memory_collectives
from verl.workers.engine.shared_memory_collectives import SharedMemoryCollectives


def exchanged(total_bytes: int) -> list[bool]:
    """For sizes and types, one after the other: the same as gloo?"""
    collectives, group = SharedMemoryCollectives.create(dist.group.WORLD, total_bytes), dist.group.WORLD
    generator, same = torch.Generator().manual_seed(dist.get_rank()), []
    for count in (1, 7, 64, 1000, 3, 501):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.uint8):
            mine = (torch.randn(count, generator=generator) * 50).to(dtype)
            found, expected = mine.new_zeros(2, group.size() * count)
            rows = found.view(group.size(), -1)
            rows[group.rank()] = mine
            collectives.all_gather(found, rows[group.rank()])  # as FSDP2 does: a part of the output
            dist.all_gather_into_tensor(expected, mine)
            same.append(torch.equal(found, expected))
            if dtype.is_floating_point:
                whole = (torch.randn(group.size() * count, generator=generator) * 50).round().to(dtype)
                reduced, by_gloo = whole.new_empty(2, count)
                collectives.reduce_scatter(reduced, whole)
                dist.reduce_scatter_tensor(by_gloo, whole)
                same.append(torch.equal(reduced, by_gloo) or dtype == torch.bfloat16)
                again = whole.new_empty(count)
                collectives.all_gather(whole.new_empty(group.size() * count), mine)
                collectives.reduce_scatter(again, whole)
                same.append(torch.equal(again, reduced))
    return same


@pytest.mark.parametrize(("ranks", "total_bytes"), [(2, 1 << 20), (2, 1024), (3, 4096)])
def test_ranks_exchange_what_gloo_would(ranks, total_bytes):
    for same in run_ranks(ranks, exchanged, total_bytes):
        assert len(same) == 6 * (4 + 2 * 3) and all(same)


def engines(folder: Path, folder_of_memory: Path, fsdp_size: int = -1) -> tuple[list[str], dict]:
    """The gathering used by a sharded model, and its weights."""
    shared_memory_collectives.FOLDER = folder_of_memory
    engine = build_engine(folder, fsdp_size=fsdp_size)
    kinds = {type(unit.shared_memory).__name__ for unit in engine.weights._deadlock_guard.units}
    return sorted(kinds), {name: tensor.numpy() for name, tensor in engine.export_weights()}


@pytest.mark.parametrize(("ranks", "fsdp_size"), [(2, -1), (4, 2)], ids=["shards", "copies of shards"])
def test_ranks_of_one_machine_share_memory_and_leave_no_file(tmp_path, ranks, fsdp_size):
    folder = save_tiny_model(tmp_path / "model")
    saved, memory = load_file(folder / "model.safetensors"), tmp_path / "memory"  # what lies elsewhere is others'
    memory.mkdir()
    for kinds, weights in run_ranks(ranks, engines, folder, memory, fsdp_size):
        assert kinds == ["SharedMemoryCollectives"]
        assert all(np.array_equal(weights[name], tensor) for name, tensor in saved.items())
    assert not list(memory.iterdir())


def test_where_no_memory_can_be_shared_gloo_does_it(tmp_path):
    folder = save_tiny_model(tmp_path / "model")
    for kinds, _ in run_ranks(2, engines, folder, tmp_path / "nowhere"):
        assert kinds == ["NoneType"]
