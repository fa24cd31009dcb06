"""Decode steps replayed as device graphs, one per batch size and, where attention needs masks, number of columns.

A captured step has fixed shapes: the batch is padded to a capture size, a masked window to a multiple of `_COLUMN_STEP`
columns. Column and starts are read from device tensors, so one graph serves every step of its shape.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.models.decoder.lean_layer import Layer
from verl.models.decoder.merged_weights import MergedLayer

if TYPE_CHECKING:
    from verl.models.decoder.lean import CacheWindow, LeanDecoder

_COLUMN_STEP = 256
Attend = Callable[[int, Layer | MergedLayer, Tensor], Tensor]  # layer's number, layer, queries (B, H, E)
Replay = Callable[[], Tensor]
Capture = Callable[[Replay, bool], Replay]  # the second argument: call the function first


def can_capture(device: torch.device) -> bool:
    """Whether the device's torch module has graphs; a vendor's may not."""
    module = torch.get_device_module(device)
    return device.type != "cpu" and hasattr(module, "graph") and hasattr(module, _graph_name(device))


def _graph_name(device: torch.device) -> str:
    return "NPUGraph" if device.type == "npu" else "CUDAGraph"


def device_capture(device: torch.device) -> Capture:
    """Captures a function into a device graph; the replay returns its static output.

    All graphs that it makes compute in the same memory, so an output holds until another of them is replayed.
    """
    module = torch.get_device_module(device)
    graph_type = getattr(module, _graph_name(device))
    pool = module.graph_pool_handle()

    def capture(function: Replay, warm_up: bool) -> Replay:
        if warm_up:  # first calls allocate workspaces, which a capture may not
            side = module.Stream()
            side.wait_stream(module.current_stream())
            with module.stream(side):
                function()
                function()
            module.current_stream().wait_stream(side)
        graph = graph_type()
        with module.graph(graph, pool=pool, capture_error_mode="thread_local"):
            out = function()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    return capture


def capture_sizes(wanted: list[int] | None, rows: int) -> list[int]:
    """Batch sizes to capture, ascending, none over `rows`: powers of two and `rows` unless the user lists them."""
    sizes = wanted or [2**i for i in range(rows.bit_length())]
    return sorted({min(size, rows) for size in sizes} | (set() if wanted else {rows}))


class GraphedDecode:
    """Runs `LeanDecoder` steps by replay; batches over the largest capture size run eagerly.

    `make_capture` is called again when tensors have moved: the graphs of before, and their memory, are given up.
    """

    def __init__(self, decoder: "LeanDecoder", sizes: list[int], make_capture: Callable[[], Capture]):
        self.decoder, self.sizes, self.make_capture = decoder, sizes, make_capture
        self._warmed: set[tuple[int, int]] = set()
        self.clear()
        device = decoder.weights.device
        self._tokens = torch.zeros(sizes[-1], dtype=torch.int64, device=device)
        self._starts = torch.zeros(sizes[-1], dtype=torch.int64, device=device)
        self._column = torch.zeros(1, dtype=torch.int64, device=device)

    def clear(self) -> None:
        """Give up all graphs and their memory."""
        self._replays: dict[tuple[int, int], Replay] = {}
        self._addresses: tuple[int, ...] = ()
        self._capture: Capture | None = None

    def __call__(self, tokens_B: Tensor, window: "CacheWindow") -> Tensor | None:
        """Logits (B, V), or None if the batch is larger than every capture size."""
        count = len(tokens_B)
        size = next((s for s in self.sizes if s >= count), None)
        if size is None:
            return None
        self._column.fill_(window.column)
        self._starts[:size].fill_(window.column)  # padding rows attend only to their own new token
        self._starts[:count], self._tokens[:count] = window.starts_B, tokens_B
        columns = self.decoder.keys[0].shape[2]
        masked_columns = min(-(-(window.column + 1) // _COLUMN_STEP) * _COLUMN_STEP, columns)
        num_columns = columns if self.decoder.attends_ragged else masked_columns
        return self._replay(size, num_columns)()[:count].clone()

    def _replay(self, size: int, num_columns: int) -> Replay:
        addresses, shape = self.decoder.addresses(), (size, num_columns)
        if self._capture is None or addresses != self._addresses:
            self.clear()
            self._addresses, self._capture = addresses, self.make_capture()
        if shape not in self._replays:
            self._replays[shape] = self._capture(lambda: self._step(size, num_columns), shape not in self._warmed)
            self._warmed.add(shape)
        return self._replays[shape]

    def _step(self, size: int, num_columns: int) -> Tensor:
        d, w, s = self.decoder, self.decoder.weights, self.decoder.shape
        tokens, starts, column = self._tokens[:size], self._starts[:size], self._column
        rotation = d.rotation(column - starts)
        attend = self._ragged(starts, column) if d.attends_ragged else self._masked(starts, column, num_columns)
        x = w.embed(tokens)
        for index, layer in enumerate(w.layers):
            qk, v = layer.qkv(x, rotation)
            q, k = qk.split((s.heads, s.kv_heads), dim=1)
            d.keys[index][:size].index_copy_(2, column, k.unsqueeze(2))
            d.values[index][:size].index_copy_(2, column, v.unsqueeze(2))
            x = layer.add_mlp(layer.add_attention(x, attend(index, layer, q).reshape(size, -1)))
        return w.logits(x)

    def _ragged(self, starts: Tensor, column: Tensor) -> Attend:
        d = self.decoder
        ragged = d.ragged_rows(column, starts)

        def attend(index: int, layer: Layer | MergedLayer, q: Tensor) -> Tensor:
            return ragged[layer.window is not None].attend(q, d.keys[index], d.values[index], layer.scale)

        return attend

    def _masked(self, starts: Tensor, column: Tensor, num_columns: int) -> Attend:
        d, size = self.decoder, len(starts)
        columns = torch.arange(num_columns, device=column.device)
        full = ((columns >= starts.unsqueeze(1)) & (columns <= column)).view(size, 1, 1, num_columns)

        def attend(index: int, layer: Layer | MergedLayer, q: Tensor) -> Tensor:
            keys, values = (cache[index][:size, :, :num_columns] for cache in (d.keys, d.values))
            mask = full if layer.window is None else full & (columns > column - layer.window)
            q = q.reshape(size, d.shape.kv_heads, -1, d.shape.head_dim)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=layer.scale)

        return attend
