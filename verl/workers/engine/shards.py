"""Which box of a tensor this rank holds, where the boxes of a checkpoint lie, and reading any box out of them.

A *box* is a rectangular part of a tensor: offset and shape per dimension. A tensor that is not sharded is one box.
"""

from collections.abc import Iterator, Sequence
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

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Indices of this box in a tensor that holds `outer`."""
        begin = [a - b for a, b in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(first, first + size) for first, size in zip(begin, self.shape, strict=True))


def placed_box(shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Any) -> Box:
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


@dataclass(frozen=True)
class Held:
    """What this rank has of one tensor: `local`, the box of the whole that it is, and whether this rank saves it."""

    shape: tuple[int, ...]
    box: Box
    local: Tensor
    saves: bool


def held(tensor: Tensor, rank: int) -> Held:
    """A tensor of an engine, taken apart. What many ranks hold alike is saved by the first of them."""
    tensor = tensor.detach()
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Held(shape, Box((0,) * len(shape), shape), tensor, rank == 0)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh holds nothing"
    box = placed_box(shape, mesh.shape, coordinate, tensor.placements)
    local = tensor.to_local()
    assert tuple(local.shape) == box.shape, f"holds {tuple(local.shape)} where {box} is due"
    first = all(
        place == 0 for place, kind in zip(coordinate, tensor.placements, strict=True) if type(kind) is Replicate
    )
    return Held(shape, box, local, first and not box.is_empty)


@dataclass(frozen=True)
class Piece:
    """A box in a file, under the tensor's own name."""

    file: str
    offset: list[int]
    shape: list[int]

    @property
    def box(self) -> Box:
        return Box(tuple(self.offset), tuple(self.shape))


@dataclass
class Entry:
    """Where the whole of one tensor lies."""

    dtype: str
    shape: list[int]
    pieces: list[Piece] = field(default_factory=list)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def missing(self) -> int:
        """Elements that no piece holds."""
        return torch.Size(self.shape).numel() - sum(torch.Size(piece.shape).numel() for piece in self.pieces)


Index = dict[str, Entry]


def index_of(tensors: dict[str, Held], file: str) -> Index:
    """What this rank's `file` holds of each tensor."""
    return {
        name: Entry(
            DTYPE_NAMES[held.local.dtype], list(held.shape), [Piece(file, list(held.box.offset), list(held.box.shape))]
        )
        for name, held in tensors.items()
        if held.saves
    }


def merge(indices: Sequence[Index]) -> Index:
    """One index of the files of all ranks."""
    out: Index = {}
    for index in indices:
        for name, entry in index.items():
            whole = out.setdefault(name, Entry(entry.dtype, entry.shape))
            assert (whole.dtype, whole.shape) == (entry.dtype, entry.shape), f"ranks disagree about {name}"
            whole.pieces.extend(entry.pieces)
    return out


def to_json(index: Index) -> dict[str, Any]:
    return {name: asdict(entry) for name, entry in index.items()}


def from_json(data: dict[str, Any]) -> Index:
    return {
        name: Entry(entry["dtype"], entry["shape"], [Piece(**piece) for piece in entry["pieces"]])
        for name, entry in data.items()
    }


class Reader:
    """Reads boxes out of the files of a checkpoint, and of those files only what it needs."""

    def __init__(self, folder: Path, index: Index):
        self.folder, self.index = folder, index
        self._open: dict[str, Any] = {}

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of tensor `name` on the host; all of it by default."""
        entry = self.index[name]
        box = box if box is not None else Box((0,) * len(entry.shape), tuple(entry.shape))
        pieces = [(piece, common) for piece in entry.pieces if not (common := piece.box.overlap(box)).is_empty]
        if len(pieces) == 1 and pieces[0][0].box == box:
            return self._file(pieces[0][0].file).get_tensor(name)
        out = torch.empty(box.shape, dtype=entry.torch_dtype)
        for piece, common in pieces:
            out[common.within(box)] = self._file(piece.file).get_slice(name)[common.within(piece.box)]
        return out

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, whole, one at a time."""
        return ((name, self.read(name)) for name in self.index)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework="pt")
        return self._open[name]
