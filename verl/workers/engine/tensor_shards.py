"""Which box of a tensor this rank holds, where the boxes of a checkpoint lie, and reading any box out of them.

A *box* is a rectangular part of a tensor: offset and shape per dimension. A tensor that is not sharded is one box, and
so is a part of a DTensor; a range of its elements, as FSDP1 deals them out, is a few boxes.
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
        """What both cover; empty where they are apart."""
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
    """The box that `torch.chunk` along each sharded dimension, mesh dimension by mesh dimension, leaves to a rank."""
    offset, size = [0] * len(shape), list(shape)
    for ranks, place, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard:
            raise CheckpointError(f"tensors placed as {placement} are not saved; use Shard or Replicate placements")
        whole, chunk = size[placement.dim], -(-size[placement.dim] // ranks)
        start = min(place * chunk, whole)
        offset[placement.dim] += start
        size[placement.dim] = min(chunk, whole - start)
    return Box(tuple(offset), tuple(size))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements `start` to `stop` of a tensor, row by row, as boxes in that order."""
    if start >= stop:
        return []
    if len(shape) < 2:
        return [Box((start,), (stop - start,)) if shape else Box((), ())]
    row, rest = torch.Size(shape[1:]).numel(), tuple(shape[1:])
    first, last = -(-start // row), stop // row  # the rows that are whole
    if first > last:
        first = last = start // row
        return [_in_row(first, box) for box in boxes_of_range(rest, start - first * row, stop - first * row)]
    head = boxes_of_range(rest, start % row, row) if start % row else []
    whole = [Box((first, *(0 for _ in rest)), (last - first, *rest))] if last > first else []
    tail = boxes_of_range(rest, 0, stop - last * row)
    return [*(_in_row(first - 1, box) for box in head), *whole, *(_in_row(last, box) for box in tail)]


def _in_row(row: int, box: Box) -> Box:
    return Box((row, *box.offset), (1, *box.shape))


@dataclass(frozen=True)
class LocalShard:
    """What this rank has of one tensor: the boxes that `local` is, end to end, and whether this rank saves them."""

    shape: tuple[int, ...]  # of the whole
    boxes: list[Box]
    local: Tensor
    saved_here: bool

    @property
    def meta(self) -> Tensor:
        """The whole, without its values."""
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
    """A tensor of an engine, taken apart. What many ranks hold alike is saved by the first of them."""
    tensor = tensor.detach()
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return LocalShard(shape, [Box((0,) * len(shape), shape)], tensor, rank == 0)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh holds nothing"
    box = box_of_rank(shape, mesh.shape, coordinate, tensor.placements)
    local = tensor.to_local()
    assert tuple(local.shape) == box.shape, f"holds {tuple(local.shape)} where {box} is due"
    first = all(
        place == 0 for place, kind in zip(coordinate, tensor.placements, strict=True) if type(kind) is Replicate
    )
    return LocalShard(shape, [box], local, first and not box.is_empty)


@dataclass(frozen=True)
class SavedBox:
    """A box in a file."""

    file: str
    key: str  # in the file: the tensor's own name, where it has one box there
    offset: list[int]
    shape: list[int]

    @property
    def box(self) -> Box:
        return Box(tuple(self.offset), tuple(self.shape))


@dataclass
class SavedTensor:
    """Where the whole of one tensor lies."""

    dtype: str
    shape: list[int]
    pieces: list[SavedBox] = field(default_factory=list)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def num_missing(self) -> int:
        """Elements that no piece holds."""
        return torch.Size(self.shape).numel() - sum(torch.Size(piece.shape).numel() for piece in self.pieces)


ShardIndex = dict[str, SavedTensor]


def tensors_to_save(tensors: dict[str, LocalShard], file: str) -> tuple[dict[str, Tensor], ShardIndex]:
    """What this rank saves in `file`: tensors by key, and where they belong."""
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
            whole = out.setdefault(name, SavedTensor(entry.dtype, entry.shape))
            assert (whole.dtype, whole.shape) == (entry.dtype, entry.shape), f"ranks disagree about {name}"
            whole.pieces.extend(entry.pieces)
    return out


def index_to_json(index: ShardIndex) -> dict[str, Any]:
    return {name: asdict(entry) for name, entry in index.items()}


def index_from_json(data: dict[str, Any]) -> ShardIndex:
    return {
        name: SavedTensor(entry["dtype"], entry["shape"], [SavedBox(**piece) for piece in entry["pieces"]])
        for name, entry in data.items()
    }


class ShardReader:
    """Reads boxes out of the files of a checkpoint, and of those files only what it needs."""

    def __init__(self, folder: Path, index: ShardIndex):
        self.folder, self.index = folder, index
        self._open: dict[str, Any] = {}

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of tensor `name` on the host; all of it by default."""
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
        """Give this rank's part of a tensor the values that were saved."""
        for box, part in shard.parts():
            part.copy_(self.read(name, box))

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework="pt")
        return self._open[name]
