"""Full tensors from a folder of shards, one at a time: our checkpoints, or pickled shards of the original system."""

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from verl.utils.errors import CheckpointError
from verl.workers.engine.manifest import MANIFEST, read_manifest, verify_files
from verl.workers.engine.tensor_shards import Box, ShardReader, box_of_rank, index_from_json

PICKLED_SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
SHARD_TYPES = (DTensor, DTensorSpec, TensorMeta, DeviceMesh, Shard, Replicate)
WRAPPER_PREFIXES = re.compile(r"_fsdp_wrapped_module\.|_orig_mod\.|_checkpoint_wrapped_module\.|^base_model\.model\.")


class ShardFolder(ABC):
    """The shards of a model."""

    meta_tensors: dict[str, Tensor]  # by name, for shapes and dtypes

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One full tensor, on the host."""


class EngineShardFolder(ShardFolder):
    """A folder that an engine saved; the digest of every model file is checked first."""

    def __init__(self, folder: Path):
        manifest = read_manifest(folder)
        if "model" not in manifest["tensors"]:
            raise CheckpointError(
                f"{folder} holds {', '.join(manifest['contents'])}, not model; there is nothing to merge"
            )
        index = index_from_json(manifest["tensors"]["model"])
        verify_files(folder, sorted({piece.file for entry in index.values() for piece in entry.pieces}), manifest)
        self._reader = ShardReader(folder, index)
        self.meta_tensors = {n: torch.empty(e.shape, dtype=e.torch_dtype, device="meta") for n, e in index.items()}

    def read(self, name: str) -> Tensor:
        return self._reader.read(name)


class PickledShardFolder(ShardFolder):
    """model_world_size_W_rank_R.pt of the original system: plain tensors, or DTensors on a mesh of the W ranks.

    Read with weights_only: no code in a file is run, and objects other than tensors and DTensors are refused.
    """

    def __init__(self, folder: Path):
        matches = {path: PICKLED_SHARD.fullmatch(path.name) for path in folder.glob("*.pt")}
        ranks = {int(match.group(2)): path for path, match in matches.items() if match}
        sizes = {int(match.group(1)) for match in matches.values() if match}
        if len(sizes) != 1:
            raise CheckpointError(
                f"{folder} holds shards of runs of {sorted(sizes)} ranks; leave those of one run there"
            )
        self.world_size = sizes.pop()
        missing = [rank for rank in range(self.world_size) if rank not in ranks]
        if missing:
            raise CheckpointError(
                f"{folder} lacks the shards of ranks {', '.join(map(str, missing))} of {self.world_size}: "
                f"model_world_size_{self.world_size}_rank_{missing[0]}.pt is missing; copy all of them there"
            )
        self.tensors_by_rank = [_load_pickled_shard(ranks[rank]) for rank in range(self.world_size)]
        first = self.tensors_by_rank[0]
        for rank, tensors in enumerate(self.tensors_by_rank):
            if tensors.keys() != first.keys():
                differing = sorted(tensors.keys() ^ first.keys())
                raise CheckpointError(
                    f"{ranks[rank]} and {ranks[0].name} disagree about {differing[0]}; they are of two runs"
                )
        self.meta_tensors = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in first.items()}

    def read(self, name: str) -> Tensor:
        first = self.tensors_by_rank[0][name]
        if not isinstance(first, DTensor):
            return first
        mesh = first.device_mesh.mesh
        full, covered = torch.empty(first.shape, dtype=first.dtype), 0
        for position in range(mesh.numel()):
            coordinate = [int(i) for i in torch.unravel_index(torch.tensor(position), mesh.shape)]
            if any(c for c, kind in zip(coordinate, first.placements, strict=True) if isinstance(kind, Replicate)):
                continue  # a replica
            box = box_of_rank(first.shape, mesh.shape, coordinate, first.placements)
            local = self.tensors_by_rank[int(mesh[tuple(coordinate)])][name]._local_tensor
            if tuple(local.shape) != box.shape:
                raise CheckpointError(
                    f"{name}: rank {int(mesh[tuple(coordinate)])} holds {tuple(local.shape)}, not {box}"
                )
            full[box.slices_in(Box((0,) * full.dim(), tuple(full.shape)))] = local
            covered += local.numel()
        assert covered == full.numel(), f"{name}: the shards hold {covered} of {full.numel()} elements"
        return full


def _load_pickled_shard(path: Path) -> dict[str, Any]:
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)  # it warns that no ranks are running
    try:
        with torch.serialization.safe_globals(list(SHARD_TYPES)):
            state = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read as tensors alone ({reason}); it is damaged, or holds objects that would run code"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{path} is no state dict of tensors; give the folder with model_world_size_*.pt")
    return {WRAPPER_PREFIXES.sub("", name): tensor for name, tensor in state.items()}


def open_shard_folder(folder: Path) -> ShardFolder:
    """The shards of a model in `folder`, of either kind."""
    if (folder / MANIFEST).is_file():
        return EngineShardFolder(folder)
    if any(PICKLED_SHARD.fullmatch(path.name) for path in _files_in(folder)):
        return PickledShardFolder(folder)
    names = ", ".join(sorted(path.name for path in _files_in(folder))[:8]) or "nothing"
    raise CheckpointError(
        f"{folder} has neither {MANIFEST} nor model_world_size_W_rank_R.pt, but {names}; give the folder of one role, "
        "such as global_step_N/actor"
    )


def _files_in(folder: Path) -> Iterable[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
