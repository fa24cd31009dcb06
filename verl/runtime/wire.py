"""Serialization of calls and results between driver and ranks: JSON, followed by the bytes of its tensors.

Reading a message cannot run code. Supported types: None, booleans, numbers, strings, paths, lists, tuples,
dictionaries, tensors, `Extra`, `Batch`, `Metrics` and the dataclasses of this package.
"""

import dataclasses
import importlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.config.extra import Extra
from verl.data.batch import Batch
from verl.data.metrics import Metrics

_ALIGNMENT = 16  # bytes; every tensor starts at a multiple of it
_LONG = 64  # whole or floating-point numbers of a list that travel as bytes, not as text


class NotSerializableError(TypeError):
    """A value of a type that `serialize` does not support."""


Packed = tuple[bytes, list[np.ndarray]]  # JSON, and the bytes of its tensors, each (N,) uint8


def pack(item: Any) -> Packed:
    """`item` in parts, for a carrier that keeps parts apart. Arrays share memory with the tensors on the CPU."""
    tensors: list[Tensor] = []
    return json.dumps(_to_json(item, tensors)).encode(), [tensor.numpy() for tensor in tensors]


def unpack(packed: Packed) -> Any:
    """The item that `pack` took apart. Tensors share memory with the arrays, unless these are not aligned."""
    text, arrays = packed
    return _from_json(json.loads(text), _ArrayReader(arrays))


def serialize(item: Any) -> bytes:
    """The bytes of `item`; its tensors arrive on the CPU, without gradient."""
    text, arrays = pack(item)
    header = struct.pack("<Q", len(text)) + text
    parts = [header + b"\0" * (-len(header) % _ALIGNMENT)]
    for array in arrays:
        data = array.tobytes()
        parts.append(data + b"\0" * (-len(data) % _ALIGNMENT))
    return b"".join(parts)


def deserialize(data: bytes) -> Any:
    """The item that `serialize` turned into `data`."""
    (size,) = struct.unpack_from("<Q", data)
    start = 8 + size
    return _from_json(json.loads(data[8:start]), _TensorReader(data, start + -start % _ALIGNMENT))


def _to_json(item: Any, tensors: list[Tensor]) -> Any:
    """`item` as JSON: plain values as they are, everything else as [kind, …]."""
    if item is None or type(item) in (bool, int, float, str):
        return item
    if type(item) in (list, tuple):
        kinds = set(map(type, item))
        if len(item) >= _LONG and kinds in ({int}, {float}):  # token ids, log-probs: several times as fast
            array = np.array(item)
            if array.dtype == (np.int64 if kinds == {int} else np.float64):  # not so beyond 64 bits
                tensors.append(torch.from_numpy(array.view(np.uint8)))
                return ["numbers", type(item).__name__, array.dtype.name, len(item), array.nbytes]
        if kinds <= {int, float}:
            return [type(item).__name__, 0, list(item)]
        return [type(item).__name__, 1, [_to_json(value, tensors) for value in item]]
    if type(item) is dict:
        return ["dict", [[_to_json(part, tensors) for part in pair] for pair in item.items()]]
    if isinstance(item, Extra):
        return ["extra", _to_json(list(item.__reduce__()[1]), tensors)]
    if isinstance(item, Tensor):
        flat = item.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        tensors.append(flat)
        return ["tensor", str(item.dtype).removeprefix("torch."), list(item.shape), flat.numel()]
    if isinstance(item, Path):
        return ["path", str(item)]
    if isinstance(item, Batch):
        return ["batch", _to_json([item.cu_seqlens, item.token_columns, item.sequence_columns], tensors)]
    if isinstance(item, Metrics):
        return ["metrics", item.state()]
    kind = type(item)
    if dataclasses.is_dataclass(item) and kind.__module__.startswith("verl."):
        values = {field.name: _to_json(getattr(item, field.name), tensors) for field in dataclasses.fields(item)}
        return ["dataclass", kind.__module__, kind.__qualname__, values]
    raise NotSerializableError(
        f"a {kind.__module__}.{kind.__qualname__} cannot travel between driver and ranks; send numbers, strings, "
        "paths, lists, dictionaries, tensors, batches, metrics or dataclasses of this package"
    )


class _TensorReader:
    """Reads the tensors of a message in order, as views of one buffer."""

    def __init__(self, data: bytes, start: int):
        self.data, self.start = bytearray(data[start:]), 0

    def next(self, dtype: str, shape: list[int], size: int) -> Tensor:
        kind = getattr(torch, dtype)
        if size == 0:
            return torch.empty(shape, dtype=kind)
        tensor = torch.frombuffer(self.data, dtype=kind, offset=self.start, count=size // kind.itemsize)
        self.start += size + -size % _ALIGNMENT
        return tensor.reshape(shape)


class _ArrayReader:
    """Reads the tensors of a packed item in order."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays = iter(arrays)

    def next(self, dtype: str, shape: list[int], size: int) -> Tensor:
        kind, array = getattr(torch, dtype), next(self.arrays)
        if size == 0:
            return torch.empty(shape, dtype=kind)
        aligned = array if array.ctypes.data % _ALIGNMENT == 0 else array.copy()
        return torch.frombuffer(aligned, dtype=kind).reshape(shape)


def _from_json(item: Any, tensors: _TensorReader | _ArrayReader) -> Any:
    if not isinstance(item, list):
        return item
    kind, *fields = item
    if kind in ("list", "tuple"):
        values = [_from_json(value, tensors) for value in fields[1]] if fields[0] else fields[1]
        return values if kind == "list" else tuple(values)
    if kind == "numbers":
        values = tensors.next(fields[1], [fields[2]], fields[3]).tolist()
        return values if fields[0] == "list" else tuple(values)
    if kind == "dict":
        return {_from_json(key, tensors): _from_json(value, tensors) for key, value in fields[0]}
    if kind == "extra":
        return Extra(*_from_json(fields[0], tensors))
    if kind == "tensor":
        return tensors.next(*fields)
    if kind == "path":
        return Path(fields[0])
    if kind == "batch":
        return Batch(*_from_json(fields[0], tensors))
    if kind == "metrics":
        return Metrics(fields[0])
    return _find_dataclass(*fields[:2])(**{name: _from_json(value, tensors) for name, value in fields[2].items()})


def _find_dataclass(module: str, name: str) -> type:
    cls = getattr(importlib.import_module(module), name, None) if module.startswith("verl.") else None
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise NotSerializableError(
            f"{module}.{name} is not a dataclass of this package; driver and ranks must run the same version"
        )
    return cls
