"""Boxes of tensors: those that this rank holds, the index of those in a checkpoint, and a reader of any box.

A *box* is a rectangular part of a tensor: offset and shape per dimension. An unsharded tensor is one box, and
so is a shard of a DTensor. A rank of FSDP1, in older checkpoints, saved a few boxes of a tensor.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from verl.models.tensor_file import DTYPE_NAMES, DTYPES
from verl.utils.errors import CheckpointError


@dataclass(frozen=True)
class Box:
    """A part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    def overlap(self, other: "Box") -> "Box":
        """The intersection of both; empty if they are disjoint."""
        start = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        return Box(tuple(start), tuple(max(end - first, 0) for end, first in zip(ends, start, strict=True)))

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Indices of this box in a tensor that holds `outer`."""
        begin = [a - b for a, b in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(first, first + size) for first, size in zip(begin, self.shape, strict=True))


def box_of_rank(shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Any) -> Box:
    """A rank's box after `torch.chunk` along each sharded dimension, one mesh dimension after the other."""
    offset, size = [0] * len(shape), list(shape)
    for ranks, position, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard:
            raise CheckpointError(f"tensors placed as {placement} are not saved; use Shard or Replicate placements")
        length, chunk = size[placement.dim], -(-size[placement.dim] // ranks)
        start = min(position * chunk, length)
        offset[placement.dim] += start
        size[placement.dim] = min(chunk, length - start)
    return Box(tuple(offset), tuple(size))


@dataclass(frozen=True)
class LocalShard:
    """This rank's shard of one tensor: its box, the values there, and whether this rank saves them."""

    shape: tuple[int, ...]  # of the full tensor
    box: Box
    local: Tensor
    saved_here: bool


def local_shard(tensor: Tensor, rank: int) -> LocalShard:
    """This rank's shard of an engine's tensor. Of the ranks that hold replicas, the first saves them."""
    tensor = tensor.detach()
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return LocalShard(shape, Box((0,) * len(shape), shape), tensor, rank == 0)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh holds nothing"
    box = box_of_rank(shape, mesh.shape, coordinate, tensor.placements)
    local = tensor.to_local()
    assert tuple(local.shape) == box.shape, f"the shard has shape {tuple(local.shape)}, not that of {box}"
    first = all(
        place == 0 for place, kind in zip(coordinate, tensor.placements, strict=True) if type(kind) is Replicate
    )
    return LocalShard(shape, box, local, first and not box.is_empty)


@dataclass(frozen=True)
class SavedBox:
    """A box in a file."""

    file: str
    key: str  # in the file: the tensor's name; in older checkpoints with @number after its first box there
    offset: list[int]
    shape: list[int]

    @property
    def box(self) -> Box:
        return Box(tuple(self.offset), tuple(self.shape))


@dataclass
class SavedTensor:
    """The boxes in which one tensor is saved."""

    dtype: str
    shape: list[int]
    pieces: list[SavedBox] = field(default_factory=list)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def num_missing(self) -> int:
        """The number of elements that no box holds."""
        return torch.Size(self.shape).numel() - sum(torch.Size(piece.shape).numel() for piece in self.pieces)


ShardIndex = dict[str, SavedTensor]


def tensors_to_save(tensors: dict[str, LocalShard], file: str) -> tuple[dict[str, Tensor], ShardIndex]:
    """The tensors that this rank saves in `file`, by key, and their index."""
    out: dict[str, Tensor] = {}
    index: ShardIndex = {}
    for name, shard in tensors.items():
        if shard.saved_here:
            saved = SavedBox(file, name, list(shard.box.offset), list(shard.box.shape))
            index[name] = SavedTensor(DTYPE_NAMES[shard.local.dtype], list(shard.shape), [saved])
            out[name] = shard.local
    return out, index


def merge_indices(indices: Sequence[ShardIndex]) -> ShardIndex:
    """One index of the files of all ranks."""
    out: ShardIndex = {}
    for index in indices:
        for name, entry in index.items():
            merged = out.setdefault(name, SavedTensor(entry.dtype, entry.shape))
            assert (merged.dtype, merged.shape) == (entry.dtype, entry.shape), f"ranks disagree about {name}"
            merged.pieces.extend(entry.pieces)
    return out


def index_to_json(index: ShardIndex) -> dict[str, Any]:
    return {name: asdict(entry) for name, entry in index.items()}


def index_from_json(data: dict[str, Any]) -> ShardIndex:
    return {
        name: SavedTensor(entry["dtype"], entry["shape"], [SavedBox(**piece) for piece in entry["pieces"]])
        for name, entry in data.items()
    }


class ShardReader:
    """Reads boxes from the files of a checkpoint, and only the parts of the files that it needs."""

    def __init__(self, folder: Path, index: ShardIndex):
        self.folder, self.index = folder, index
        self._open: dict[str, Any] = {}

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of tensor `name` on the host; the full tensor by default."""
        entry = self.index[name]
        box = box if box is not None else Box((0,) * len(entry.shape), tuple(entry.shape))
        pieces = [(piece, common) for piece in entry.pieces if not (common := piece.box.overlap(box)).is_empty]
        if len(pieces) == 1 and pieces[0][0].box == box:
            return self._file(pieces[0][0].file).get_tensor(pieces[0][0].key)
        out = torch.empty(box.shape, dtype=entry.torch_dtype)
        for piece, common in pieces:
            out[common.slices_in(box)] = self._file(piece.file).get_slice(piece.key)[common.slices_in(piece.box)]
        return out

    def read_into(self, name: str, shard: LocalShard) -> None:
        """Copy the saved values into this rank's shard of a tensor."""
        shard.local.copy_(self.read(name, shard.box))

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework="pt")
        return self._open[name]
