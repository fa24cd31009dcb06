"""Prefill and decode passes for sampling: the lean path, which reads the actor's own tensors.

A decoder owns the KV cache. Each row of the cache stores one sequence. The newest token of every sequence is in the
same column, and a sequence begins at its own `start` column. So a decode step writes one slice, a sliding window is a
slice, and the only index per row is `start`.

Shapes: B rows, N prompts, P prompt columns, W columns attended, H query heads, K key-value heads, E head size.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.models.decoder.decode_attention import fastest_attention
from verl.models.decoder.device_graphs import GraphedDecode
from verl.models.decoder.lean_layer import Layer
from verl.models.decoder.lean_weights import DecoderWeights
from verl.models.decoder.merged_weights import MergedLayer
from verl.models.decoder.prompt_cache import PromptCache, PromptSharing, SharedPromptAttention
from verl.models.decoder.ragged_attention import RaggedRows, can_attend_ragged
from verl.models.decoder.weight_layouts import DecoderShape


@dataclass(frozen=True)
class CacheWindow:
    """The cache columns of a decode step: the column to write and the first column that any row needs."""

    column: int
    first_column: int
    starts_B: Tensor  # (B,) int64
    ragged: bool  # some row's own columns start after `first_column`
    own_starts_B: Tensor | None = None  # (B,) int64: the first column of its own in each row, if prompts are shared
    sharing: PromptSharing | None = None


@dataclass(frozen=True)
class CacheTarget:
    """Where prefill writes keys and values: each prompt to all rows that continue it, or to a prompt cache slot."""

    column: int  # prompts in rows end before this column
    first_row: int
    repeats: list[int]
    slots: slice | None = None


class Decoder(Protocol):
    """The interface of a decoder, lean or generic, for the rollout core."""

    supports_continuous_batching: bool  # prefill while other sequences decode; otherwise only when no row is left
    supports_mixed_batches: bool  # prefill in the same forward pass as the decode step
    supports_shared_prompts: bool  # a prompt may be cached once for several rows
    prompt_cache: PromptCache
    supports_padded_prompts: bool  # prompts of different lengths may be prefilled together
    weights_version: int
    copied_bytes: int  # of weights that are not the module's own tensors
    dtype: torch.dtype

    def bytes_per_token(self) -> int: ...
    def allocate(self, rows: int, columns: int) -> None: ...
    def free_cache(self) -> None: ...
    def free_copies(self) -> None: ...
    def refresh(self, model: nn.Module, version: int) -> None: ...
    def find_stale(self, model: nn.Module) -> str: ...  # the first copy that differs from `model`, empty if none
    def prefill(self, prompts: list[list[int]], target: CacheTarget) -> Tensor: ...
    def decode(self, tokens_B: Tensor, window: CacheWindow) -> Tensor: ...
    def decode_and_prefill(
        self, tokens_B: Tensor, window: CacheWindow, prompts: list[list[int]], target: CacheTarget
    ) -> Tensor: ...
    def move_rows(self, sources: list[int], targets: list[int], count: int, window: CacheWindow) -> None: ...
    def shift_columns(self, count: int, first_column: int, column: int, by: int) -> None: ...


class LeanDecoder:
    """Llama-like models in few operations per layer, reading the module's own parameters."""

    supports_continuous_batching = True
    supports_padded_prompts = True

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None, device: torch.device | None = None):
        self.weights = DecoderWeights(model, dtype, device)
        self.shape: DecoderShape = self.weights.shape
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.rotary_tables: tuple[Tensor, ...] = ()
        self.graphs: GraphedDecode | None = None
        self.prompt_cache = PromptCache(self.shape, self.dtype)
        self.attention = fastest_attention(self.shape, self.dtype, self.weights.device)
        heads = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        self.attends_ragged = can_attend_ragged(self.weights.device, self.dtype, *heads)

    @property
    def supports_mixed_batches(self) -> bool:
        return self.graphs is None

    @property
    def supports_shared_prompts(self) -> bool:
        return self.graphs is None and self.weights.device.type == "cpu" and self.shape.sliding_window is None

    @property
    def weights_version(self) -> int:
        return self.weights.version

    @property
    def copied_bytes(self) -> int:
        return self.weights.copied_bytes

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim * self.dtype.itemsize

    def refresh(self, model: nn.Module, version: int) -> None:
        self.weights.refresh(model, version)

    def find_stale(self, model: nn.Module) -> str:
        return self.weights.find_stale(model)

    def allocate(self, rows: int, columns: int) -> None:
        """Grow the cache to `rows` rows and keep its content; new memory is 0: hidden columns are multiplied by 0."""
        shape = (rows, self.shape.kv_heads, columns, self.shape.head_dim)
        self.keys, self.values = self._grow_caches(self.keys, shape), self._grow_caches(self.values, shape)
        self.rotary_tables = self.weights.rotary_tables(columns)

    def _grow_caches(self, caches: list[Tensor], shape: tuple[int, ...]) -> list[Tensor]:
        grown = [lazy_zeros(shape, self.weights.dtype, self.weights.device) for _ in range(self.shape.layers)]
        for new, old in zip(grown, caches, strict=False):
            new[: len(old)] = old
        return grown

    def addresses(self) -> tuple[int, ...]:
        """Data pointers of a step's tensors: a captured graph is valid while they stay the same."""
        return (*self.weights.addresses, *(t.data_ptr() for t in (*self.keys, *self.values, *self.rotary_tables)))

    def free_cache(self) -> None:
        self.keys, self.values = [], []
        if self.graphs is not None:
            self.graphs.clear()
        self.prompt_cache = PromptCache(self.shape, self.dtype)

    def free_copies(self) -> None:
        self.weights.free_copies()

    def prefill(self, prompts: list[list[int]], target: CacheTarget) -> Tensor:
        """Logits (N, V) after each prompt."""
        return self._forward([PrefillSegment(self, prompts, target)])

    def decode(self, tokens_B: Tensor, window: CacheWindow) -> Tensor:
        """Logits (B, V) after `tokens_B`, which are written to the window's column in rows 0..B-1."""
        logits = self.graphs(tokens_B, window) if self.graphs is not None else None
        return self._forward([DecodeSegment(self, tokens_B, window)]) if logits is None else logits

    def decode_and_prefill(
        self, tokens_B: Tensor, window: CacheWindow, prompts: list[list[int]], target: CacheTarget
    ) -> Tensor:
        """Logits (B + N, V) of both in one pass over the weights."""
        return self._forward([DecodeSegment(self, tokens_B, window), PrefillSegment(self, prompts, target)])

    def _forward(self, parts: "list[DecodeSegment | PrefillSegment]") -> Tensor:
        s, w = self.shape, self.weights
        sizes = [len(part.ids) for part in parts]
        num_rows = sum(sizes)
        extra = w.layout.padded_rows(num_rows) - num_rows  # rows that only the products see
        rotation = self.rotation(F.pad(_concatenate([part.positions for part in parts]), (0, extra)))
        x = w.embed(F.pad(_concatenate([part.ids for part in parts]), (0, extra)))  # (T, D)
        for index, layer in enumerate(w.layers):
            qk, v = layer.qkv(x, rotation)  # (T, H+K, E), (T, K, E)
            q, k = qk[:num_rows].split((s.heads, s.kv_heads), dim=1)
            if len(parts) == 1:
                out = parts[0].attend(index, layer, q, k, v[:num_rows])
            else:
                segments = zip(parts, q.split(sizes), k.split(sizes), v[:num_rows].split(sizes), strict=True)
                out = torch.cat([part.attend(index, layer, *qkv) for part, *qkv in segments])
            x = layer.add_mlp(layer.add_attention(x, _pad_rows(out, extra)))
        hidden = x[:num_rows].split(sizes)
        last = _concatenate([part.last_hidden(y) for part, y in zip(parts, hidden, strict=True)])
        return w.logits(_pad_rows(last, w.layout.padded_rows(len(last)) - len(last)))[: len(last)]

    def rotation(self, positions: Tensor) -> tuple[Tensor, ...] | Tensor:
        """The rows of the rotary tables at `positions`."""
        rows = tuple(table[positions] for table in self.rotary_tables)
        return rows if len(rows) > 1 else rows[0]

    def ragged_rows(self, column: int | Tensor, starts_B: Tensor) -> tuple[RaggedRows, RaggedRows]:
        """The columns that rows from `starts_B` attend to, in full layers and in sliding ones."""
        full = RaggedRows.ending_at(column, starts_B, self.keys[0])
        return full, full.newest(self.shape.sliding_window)

    def write(self, index: int, rows: slice, columns: slice, k: Tensor, v: Tensor, repeats: Tensor | None) -> None:
        """Write keys and values (N, K, P, E) to the cache, each prompt `repeats` times."""
        if repeats is not None:
            k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        self.keys[index][rows, :, columns] = k
        self.values[index][rows, :, columns] = v

    def move_rows(self, sources: list[int], targets: list[int], count: int, window: CacheWindow) -> None:
        """Copy rows `sources` to rows `targets`; afterwards rows 0..count-1 are in use."""
        columns = slice(window.first_column, window.column)
        source_rows, target_rows = (torch.tensor(rows, device=self.weights.device) for rows in (sources, targets))
        for cache in (*self.keys, *self.values) if sources else ():
            part = cache[:, :, columns]
            part.index_copy_(0, target_rows, part.index_select(0, source_rows))

    def shift_columns(self, count: int, first_column: int, column: int, by: int) -> None:
        """Move columns first_column..column-1 of the first `count` rows by `by` columns."""
        old, new = slice(first_column, column), slice(first_column + by, column + by)
        for cache in (*self.keys, *self.values):
            cache[:count, :, new] = cache[:count, :, old].clone()


class DecodeSegment:
    """The part of a forward pass that decodes one new token for each of the first rows."""

    def __init__(self, decoder: LeanDecoder, tokens_B: Tensor, window: CacheWindow):
        self.decoder, self.window, self.ids = decoder, window, tokens_B
        self.positions = window.column - window.starts_B
        self.own_starts = window.starts_B if window.own_starts_B is None else window.own_starts_B
        self.ragged = decoder.ragged_rows(window.column, self.own_starts) if decoder.attends_ragged else None
        self.bias = self._bias() if self.ragged is None else None
        self.shared = None if window.sharing is None else SharedPromptAttention(decoder.prompt_cache, window.sharing)

    def last_hidden(self, x: Tensor) -> Tensor:
        return x

    def _bias(self) -> Tensor | None:
        """(B, 1, 1, W) zero, or minus infinity where a column lies before the row's start."""
        window, d = self.window, self.decoder
        if not window.ragged:
            return None
        columns = torch.arange(window.first_column, window.column + 1, device=self.own_starts.device)
        hidden = columns < self.own_starts.unsqueeze(1)
        bias = torch.zeros(hidden.shape, dtype=d.dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return bias.view(len(bias), 1, 1, -1)

    def attend(self, index: int, layer: Layer | MergedLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H*E) from (B, H or K, E), written to the cache first; the query heads of a group share one key head."""
        d, window, bias = self.decoder, self.window, self.bias
        rows, at = len(q), window.column
        d.keys[index][:rows, :, at], d.values[index][:rows, :, at] = k, v
        if self.ragged is not None:
            own_rows = self.ragged[layer.window is not None]
            return own_rows.attend(q, d.keys[index], d.values[index], layer.scale).reshape(rows, -1)
        first_column = window.first_column if layer.window is None else max(window.first_column, at + 1 - layer.window)
        if bias is not None and first_column > window.first_column:
            bias = bias[..., first_column - window.first_column :]
        keys, values = (cache[index][:rows, :, first_column : at + 1] for cache in (d.keys, d.values))
        q = q.view(rows, d.shape.kv_heads, -1, d.shape.head_dim)
        if self.shared is not None:
            return self.shared.attend(index, q, keys, values, bias, layer.scale)
        return d.attention(q, keys, values, bias, layer.scale).reshape(rows, -1)


class PrefillSegment:
    """The part of a forward pass that prefills whole prompts, padded on the left to one width."""

    def __init__(self, decoder: LeanDecoder, prompts: list[list[int]], target: CacheTarget):
        device = decoder.weights.device
        self.decoder, self.num, self.width = decoder, len(prompts), max(map(len, prompts))
        self.ids = torch.tensor([[0] * (self.width - len(p)) + p for p in prompts], device=device).flatten()
        pads = torch.tensor([self.width - len(p) for p in prompts], device=device)
        positions = torch.arange(self.width, device=device) - pads.unsqueeze(1)
        self.positions = positions.clamp_(min=0).flatten()
        self.full, self.sliding = self._masks(pads)
        self.slots, repeats = target.slots, target.repeats
        self.repeats = None if max(repeats) == 1 else torch.tensor(repeats, device=device)
        self.rows = slice(target.first_row, target.first_row + sum(repeats))
        self.columns = slice(target.column - self.width, target.column)

    def last_hidden(self, x: Tensor) -> Tensor:
        return x.view(self.num, self.width, -1)[:, -1]

    def _masks(self, pads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Boolean masks (N, 1, P, P) for full and sliding layers; None: plain causal. Padding sees itself: no NaN."""
        window = self.decoder.shape.sliding_window
        window_applies = window is not None and window < self.width
        if not window_applies and not bool(pads.any()):
            return None, None
        columns = torch.arange(self.width, device=pads.device)
        causal = columns <= columns.unsqueeze(1)
        itself = columns == columns.unsqueeze(1)
        full = ((columns >= pads.view(-1, 1, 1)) & causal | itself).unsqueeze(1)
        if not window_applies:
            return full, full
        return full, full & (columns > columns.unsqueeze(1) - window)

    def attend(self, index: int, layer: Layer | MergedLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(N*P, H*E) from (N*P, H or K, E); keys and values are written to the cache."""
        q, k, v = (t.reshape(self.num, self.width, -1, t.shape[-1]).transpose(1, 2) for t in (q, k, v))
        if self.slots is None:
            self.decoder.write(index, self.rows, self.columns, k, v, self.repeats)
        else:
            self.decoder.prompt_cache.write(index, self.slots, k, v)
        mask = self.full if layer.window is None else self.sliding
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=layer.scale, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(self.num * self.width, -1)


def _pad_rows(x: Tensor, extra: int) -> Tensor:
    return F.pad(x, (0, 0, 0, extra)) if extra else x


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU the system allocates their pages only when they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
