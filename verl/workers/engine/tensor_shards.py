"""Boxes of tensors: those that this rank holds, the index of those in a checkpoint, and a reader of any box.

A *box* is a rectangular part of a tensor: offset and shape per dimension. An unsharded tensor is one box, and
so is a shard of a DTensor; a shard of FSDP1, which is a range of elements, is a few boxes.
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


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements `start` to `stop` of a tensor, row by row, as boxes in that order."""
    if start >= stop:
        return []
    if len(shape) < 2:
        return [Box((start,), (stop - start,)) if shape else Box((), ())]
    row, row_shape = torch.Size(shape[1:]).numel(), tuple(shape[1:])
    first, last = -(-start // row), stop // row  # complete rows of `row` elements
    if first > last:
        first = last = start // row
        return [_in_row(first, box) for box in boxes_of_range(row_shape, start - first * row, stop - first * row)]
    head = boxes_of_range(row_shape, start % row, row) if start % row else []
    whole = [Box((first, *(0 for _ in row_shape)), (last - first, *row_shape))] if last > first else []
    tail = boxes_of_range(row_shape, 0, stop - last * row)
    return [*(_in_row(first - 1, box) for box in head), *whole, *(_in_row(last, box) for box in tail)]


def _in_row(row: int, box: Box) -> Box:
    return Box((row, *box.offset), (1, *box.shape))


@dataclass(frozen=True)
class LocalShard:
    """This rank's shard of one tensor: its boxes, end to end in `local`, and whether this rank saves them."""

    shape: tuple[int, ...]  # of the full tensor
    boxes: list[Box]
    local: Tensor
    saved_here: bool

    @property
    def meta(self) -> Tensor:
        """The full tensor, on the meta device."""
        return torch.empty(self.shape, dtype=self.local.dtype, device="meta")

    def parts(self) -> list[tuple[Box, Tensor]]:
        """Each box with its part of `local`."""
        if not self.boxes:
            return []
        if len(self.boxes) == 1:
            return [(self.boxes[0], self.local.view(self.boxes[0].shape))]
        sizes = [torch.Size(box.shape).numel() for box in self.boxes]
        return [(b, t.view(b.shape)) for b, t in zip(self.boxes, self.local.flatten().split(sizes), strict=True)]


def local_shard(tensor: Tensor, rank: int) -> LocalShard:
    """This rank's shard of an engine's tensor. Of the ranks that hold replicas, the first saves them."""
    tensor = tensor.detach()
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return LocalShard(shape, [Box((0,) * len(shape), shape)], tensor, rank == 0)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh holds nothing"
    box = box_of_rank(shape, mesh.shape, coordinate, tensor.placements)
    local = tensor.to_local()
    assert tuple(local.shape) == box.shape, f"the shard has shape {tuple(local.shape)}, not that of {box}"
    first = all(
        place == 0 for place, kind in zip(coordinate, tensor.placements, strict=True) if type(kind) is Replicate
    )
    return LocalShard(shape, [box], local, first and not box.is_empty)


@dataclass(frozen=True)
class SavedBox:
    """A box in a file."""

    file: str
    key: str  # in the file: the tensor's name, with @number after its first box there
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
            entry = index[name] = SavedTensor(DTYPE_NAMES[shard.local.dtype], list(shard.shape))
            for number, (box, part) in enumerate(shard.parts()):
                key = name if number == 0 else f"{name}@{number}"
                entry.pieces.append(SavedBox(file, key, list(box.offset), list(box.shape)))
                out[key] = part
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
        for box, part in shard.parts():
            part.copy_(self.read(name, box))

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework="pt")
        return self._open[name]
