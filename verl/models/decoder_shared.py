"""Prompts that several rows continue: keys and values held once, attended to by all their rows in one product.

Shapes: B rows, S slots (one prompt each), n rows of the fullest slot, P prompt columns, H query heads, K key-value
heads, E head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.models.decoder_weights import DecoderShape


class SharedPrompts:
    """Slots 0..len(lengths)-1 are in use. A prompt ends with the last column, whatever its length."""

    def __init__(self, shape: DecoderShape, dtype: torch.dtype):
        self.shape, self.dtype = shape, dtype
        self.lengths: list[int] = []
        self.keys = [torch.zeros(0, shape.kv_heads, shape.head_dim, 0, dtype=dtype) for _ in range(shape.layers)]
        self.values = [torch.zeros(0, shape.kv_heads, 0, shape.head_dim, dtype=dtype) for _ in range(shape.layers)]

    def enter(self, lengths: list[int]) -> slice:
        """Slots for prompts of these lengths, with one empty slot behind them."""
        first = len(self.lengths)
        self.lengths += lengths
        slots, columns = self.keys[0].shape[0], self.keys[0].shape[3]
        if len(self.lengths) >= slots or max(self.lengths) > columns:
            slots = max(slots, len(self.lengths) + 1 + slots // 2)
            self._grow(slots, max(columns, -(-max(self.lengths) // 16) * 16))
        return slice(first, len(self.lengths))

    def _grow(self, slots: int, columns: int) -> None:
        heads, size = self.shape.kv_heads, self.shape.head_dim
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            old = slice(len(keys)), slice(columns - keys.shape[3], None)
            self.keys[index] = torch.zeros(slots, heads, size, columns, dtype=self.dtype)
            self.keys[index][old[0], ..., old[1]] = keys
            self.values[index] = torch.zeros(slots, heads, columns, size, dtype=self.dtype)
            self.values[index][old[0], :, old[1]] = values

    def write(self, index: int, slots: slice, k: Tensor, v: Tensor) -> None:
        """Keys and values (N, K, P, E) of one layer."""
        self.keys[index][slots, ..., -k.shape[2] :] = k.transpose(2, 3)
        self.values[index][slots, :, -k.shape[2] :] = v

    def drop(self, slot: int) -> None:
        """Free a slot; the last one takes its place."""
        last = self.lengths.pop()
        if slot < len(self.lengths):
            self.lengths[slot] = last
            for cache in (*self.keys, *self.values):
                cache[slot] = cache[len(self.lengths)]


@dataclass(frozen=True)
class Sharing:
    """Which prompt each row continues. Rows without one go to the empty slot behind the others."""

    places_B: Tensor  # (B,) int64: slot * n + the row's number in its slot
    each: int  # n
    slots: int  # in use when the places were given out

    def spread(self, x: Tensor, kv_heads: int) -> Tensor:
        """(B, H, X) -> (S*K, n*H/K, X), the empty slot included; zero where a slot has fewer rows."""
        slots = self.slots + 1
        placed = x.new_zeros(slots * self.each, *x.shape[1:]).index_copy_(0, self.places_B, x)
        by_head = placed.view(slots, self.each, kv_heads, -1, x.shape[-1]).transpose(1, 2)
        return by_head.reshape(slots * kv_heads, -1, x.shape[-1])

    def collect(self, x: Tensor, kv_heads: int) -> Tensor:
        """(S*K, n*H/K, X) -> (B, H, X)."""
        slots = self.slots + 1
        by_row = x.view(slots, kv_heads, self.each, -1, x.shape[-1]).transpose(1, 2)
        return by_row.reshape(slots * self.each, -1, x.shape[-1]).index_select(0, self.places_B)


class SharedAttention:
    """What the rows of one step see of their prompts."""

    def __init__(self, prompts: SharedPrompts, sharing: Sharing):
        self.prompts, self.sharing, self.kv_heads = prompts, sharing, prompts.shape.kv_heads
        lengths = torch.tensor([*prompts.lengths[: sharing.slots], 0])
        self.reach = int(lengths.max())
        hidden = torch.arange(self.reach) < (self.reach - lengths).unsqueeze(1)
        bias = torch.zeros(hidden.shape, dtype=prompts.dtype).masked_fill_(hidden, -torch.inf)
        self.bias = bias.repeat_interleave(self.kv_heads, 0).unsqueeze(1)  # (S*K, 1, P)

    def attend(self, index: int, q: Tensor, scale: float, own_scores: Tensor, own_values: Tensor) -> Tensor:
        """(B, H*E): one softmax over the prompt and the row's own columns.

        `q` (B, H, E), `own_scores` (B*K, H/K, W) scaled, `own_values` (B*K, W, E).
        """
        rows, heads, slots = len(q), self.kv_heads, slice(self.sharing.slots + 1)
        keys = self.prompts.keys[index][slots, ..., -self.reach :].flatten(0, 1)
        values = self.prompts.values[index][slots, :, -self.reach :].flatten(0, 1)
        scores = torch.baddbmm(self.bias, self.sharing.spread(q, heads), keys, alpha=scale)
        scores = torch.cat((self.sharing.collect(scores, heads), own_scores.view(rows, q.shape[1], -1)), -1)
        weights = torch.softmax(scores, -1)
        theirs, own = weights[..., : self.reach], weights[..., self.reach :]
        out = self.sharing.collect(torch.bmm(self.sharing.spread(theirs, heads), values), heads)
        return out.view(rows, -1) + torch.bmm(own.reshape(own_scores.shape), own_values).view(rows, -1)
