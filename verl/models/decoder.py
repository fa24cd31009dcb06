"""Token-by-token forward passes for sampling: the lean path over the actor's own tensors.

A decoder owns the cache of keys and values. Every row of the cache holds one sequence, and all rows share one running
column: the newest token of every sequence lies in the same column, a sequence begins at its own `start` column. So a
step writes one slice, a sliding window is a slice, and the only index per row is `start`.

Shapes: B rows, N prompts, P prompt columns, W columns attended, H query heads, K key-value heads, E head size.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.models.decoder_graphs import GraphedDecode
from verl.models.decoder_weights import DecoderShape, DecoderWeights


@dataclass(frozen=True)
class Window:
    """Where the rows of a step lie: the column to write and the first column any row needs."""

    column: int
    low: int
    starts_B: Tensor  # (B,) int64
    ragged: bool  # some row starts after `low`


class Decoder(Protocol):
    """What the rollout core needs of a decoder, whichever path it takes."""

    joins: bool  # new sequences may enter while others run; otherwise only when no row is left
    pads: bool  # prompts of different lengths may enter together
    weights_version: int
    copied_bytes: int  # weights that are not the module's own tensors
    dtype: torch.dtype

    def bytes_per_token(self) -> int: ...
    def allocate(self, rows: int, columns: int) -> None: ...
    def free_cache(self) -> None: ...
    def free_copies(self) -> None: ...
    def refresh(self, model: nn.Module, version: int) -> None: ...
    def prefill(self, prompts: list[list[int]], repeats: list[int], first_row: int, column: int) -> Tensor: ...
    def decode(self, tokens_B: Tensor, window: Window) -> Tensor: ...
    def move(self, sources: list[int], targets: list[int], count: int, window: Window) -> None: ...
    def shift(self, count: int, low: int, column: int, by: int) -> None: ...


class LeanDecoder:
    """Llama-like models in few operations per layer, reading the module's own parameters."""

    joins = True
    pads = True

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None, device: torch.device | None = None):
        self.weights = DecoderWeights(model, dtype, device)
        self.shape: DecoderShape = self.weights.shape
        self.transposed = self.weights.device.type == "cpu"  # keys (E, columns): what a batched product reads best
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.tables: tuple[Tensor, ...] = ()
        self.graphs: GraphedDecode | None = None

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

    def allocate(self, rows: int, columns: int) -> None:
        """Room for `rows` rows, keeping what is there; zeros, as hidden columns are multiplied by zero."""
        s = self.shape
        tail = (s.head_dim, columns) if self.transposed else (columns, s.head_dim)
        self.keys = self._grown(self.keys, (rows, s.kv_heads, *tail))
        self.values = self._grown(self.values, (rows, s.kv_heads, columns, s.head_dim))
        self.tables = self.weights.rotary_tables(columns)

    def _grown(self, caches: list[Tensor], shape: tuple[int, ...]) -> list[Tensor]:
        grown = [zeros(shape, self.weights.dtype, self.weights.device) for _ in range(self.shape.layers)]
        for new, old in zip(grown, caches, strict=False):
            new[: len(old)] = old
        return grown

    def addresses(self) -> tuple[int, ...]:
        """Where the tensors of a step lie: a captured graph is valid while they stay."""
        return (*self.weights.addresses, *(t.data_ptr() for t in (*self.keys, *self.values, *self.tables)))

    def free_cache(self) -> None:
        self.keys, self.values = [], []

    def free_copies(self) -> None:
        self.weights.free_copies()

    def prefill(self, prompts: list[list[int]], repeats: list[int], first_row: int, column: int) -> Tensor:
        """Logits (N, V) float32 after each prompt, whose keys and values end before `column` in `repeats` rows each."""
        s, w = self.shape, self.weights
        num, width = len(prompts), max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=w.device)
        pads = torch.tensor([width - len(p) for p in prompts], device=w.device)
        positions = (torch.arange(width, device=w.device) - pads.unsqueeze(1)).clamp_(min=0)
        rotation = self.rotation(positions)
        full, sliding = self._prefill_masks(pads, width)
        fan = None if max(repeats) == 1 else torch.tensor(repeats, device=w.device)
        rows, columns = slice(first_row, first_row + sum(repeats)), slice(column - width, column)
        x = w.embed(ids)
        for index, layer in enumerate(w.layers):
            qk, v = layer.qkv(x, rotation)  # (N, P, H+K, E), (N, P, K, E)
            q, k = qk.split((s.heads, s.kv_heads), dim=2)
            self._write(index, rows, columns, k.transpose(1, 2), v.transpose(1, 2), fan)
            mask = full if layer.window is None else sliding
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=mask is None,
                scale=layer.scale, enable_gqa=True,
            )  # fmt: skip
            x = layer.add_mlp(layer.add_attention(x, out.transpose(1, 2).reshape(num, width, -1)))
        return w.logits(x[:, -1])

    def rotation(self, positions: Tensor) -> tuple[Tensor, ...] | Tensor:
        """Rows of the rotary tables, one head dimension wide."""
        rows = tuple(table[positions].unsqueeze(-2) for table in self.tables)
        return rows if len(rows) > 1 else rows[0]

    def _prefill_masks(self, pads: Tensor, width: int) -> tuple[Tensor | None, Tensor | None]:
        """Boolean masks (N, 1, P, P) for full and sliding layers; None is plain causal. Padding sees itself: no nan."""
        s = self.shape
        narrow = s.sliding_window is not None and s.sliding_window < width
        if not narrow and not bool(pads.any()):
            return None, None
        columns = torch.arange(width, device=pads.device)
        causal = columns <= columns.unsqueeze(1)
        itself = columns == columns.unsqueeze(1)
        full = ((columns >= pads.view(-1, 1, 1)) & causal | itself).unsqueeze(1)
        if not narrow:
            return full, full
        return full, full & (columns > columns.unsqueeze(1) - s.sliding_window)

    def _write(self, index: int, rows: slice, columns: slice, k: Tensor, v: Tensor, fan: Tensor | None) -> None:
        """Keys and values (N, K, P, E) into the cache, each prompt `fan` times."""
        if fan is not None:
            k, v = k.repeat_interleave(fan, 0), v.repeat_interleave(fan, 0)
        if self.transposed:
            self.keys[index][rows, :, :, columns] = k.transpose(2, 3)
        else:
            self.keys[index][rows, :, columns] = k
        self.values[index][rows, :, columns] = v

    def decode(self, tokens_B: Tensor, window: Window) -> Tensor:
        """Logits (B, V) float32 after `tokens_B`, which take the window's column in rows 0..B-1."""
        logits = self.graphs(tokens_B, window) if self.graphs is not None else None
        if logits is not None:
            return logits
        s, w = self.shape, self.weights
        positions = window.column - window.starts_B
        rotation = self.rotation(positions)
        bias = self._bias(window)
        x = w.embed(tokens_B)
        for index, layer in enumerate(w.layers):
            qk, v = layer.qkv(x, rotation)  # (B, H+K, E), (B, K, E)
            q, k = qk.split((s.heads, s.kv_heads), dim=1)
            out = self._attend(index, layer, q, k, v, window, bias)
            x = layer.add_mlp(layer.add_attention(x, out.reshape(len(x), -1)))
        return w.logits(x)

    def _bias(self, window: Window) -> Tensor | None:
        """(B*K, 1, W) zero, or minus infinity where a column lies before the row's start."""
        if not window.ragged:
            return None
        columns = torch.arange(window.low, window.column + 1, device=window.starts_B.device)
        hidden = columns < window.starts_B.unsqueeze(1)
        bias = torch.zeros(hidden.shape, dtype=self.weights.dtype, device=hidden.device).masked_fill_(
            hidden, -torch.inf
        )
        return bias.repeat_interleave(self.shape.kv_heads, 0).unsqueeze(1)

    def _attend(
        self, index: int, layer, q: Tensor, k: Tensor, v: Tensor, window: Window, bias: Tensor | None
    ) -> Tensor:
        """Attention (B, K, H/K, E) of one new token per row; the query heads of a group share their keys."""
        s, rows, at = self.shape, len(q), window.column
        keys, values = self.keys[index][:rows], self.values[index][:rows]
        values[:, :, at] = v
        low = window.low if layer.window is None else max(window.low, at + 1 - layer.window)
        if bias is not None and low > window.low:
            bias = bias[:, :, low - window.low :]
        q = q.reshape(rows * s.kv_heads, s.heads // s.kv_heads, s.head_dim)
        if not self.transposed:
            keys[:, :, at] = k
            mask = None if bias is None else bias.view(rows, s.kv_heads, 1, -1)
            return F.scaled_dot_product_attention(
                q.view(rows, s.kv_heads, -1, s.head_dim), keys[:, :, low : at + 1], values[:, :, low : at + 1],
                attn_mask=mask, scale=layer.scale,
            )  # fmt: skip
        keys[:, :, :, at] = k
        keys = keys.flatten(0, 1)[:, :, low : at + 1]
        values = values.flatten(0, 1)[:, low : at + 1]
        if bias is None:
            scores = torch.bmm(q, keys)
            scores = scores if layer.scale == 1 else scores.mul_(layer.scale)
        else:
            scores = torch.baddbmm(bias, q, keys, alpha=layer.scale)
        return torch.bmm(torch.softmax(scores, -1), values)

    def move(self, sources: list[int], targets: list[int], count: int, window: Window) -> None:
        """Rows `sources` take the places `targets`; afterwards rows 0..count-1 are in use."""
        columns = slice(window.low, window.column)
        for source, target in zip(sources, targets, strict=True):
            for cache in self.values:
                cache[target, :, columns] = cache[source, :, columns]
            for cache in self.keys:
                if self.transposed:
                    cache[target, :, :, columns] = cache[source, :, :, columns]
                else:
                    cache[target, :, columns] = cache[source, :, columns]

    def shift(self, count: int, low: int, column: int, by: int) -> None:
        """Columns low..column-1 of the first `count` rows move by `by` columns."""
        old, new = slice(low, column), slice(low + by, column + by)
        for cache in self.values:
            cache[:count, :, new] = cache[:count, :, old].clone()
        for cache in self.keys:
            if self.transposed:
                cache[:count, ..., new] = cache[:count, ..., old].clone()
            else:
                cache[:count, :, new] = cache[:count, :, old].clone()


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose pages the system gives only once they are written (on a CPU)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
