"""Prompts that several rows continue: their keys and values are cached once and attended to in one product.

Shapes: B rows, S slots (one prompt each), n rows of the fullest slot, P prompt columns, H query heads, K key-value
heads, E head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.models.decoder.weight_layouts import DecoderShape

# The kernel of scaled_dot_product_attention on a CPU, which also returns the log-sum-exp.
flash_attention_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class PromptCache:
    """Keys and values of prompts. Slots 0..len(lengths)-1 are in use; every prompt ends at the last column."""

    def __init__(self, shape: DecoderShape, dtype: torch.dtype):
        self.shape, self.dtype = shape, dtype
        self.lengths: list[int] = []
        empty = torch.zeros(0, shape.kv_heads, 0, shape.head_dim, dtype=dtype)
        self.keys, self.values = [empty] * shape.layers, [empty] * shape.layers

    def allocate_slots(self, lengths: list[int]) -> slice:
        """Slots for prompts of these lengths; one empty slot always follows the last."""
        first = len(self.lengths)
        self.lengths += lengths
        slots, _, columns, _ = self.keys[0].shape
        if len(self.lengths) >= slots or max(self.lengths) > columns:
            slots = max(slots, len(self.lengths) + 1 + slots // 2)
            self._grow(slots, max(columns, -(-max(self.lengths) // 16) * 16))
        return slice(first, len(self.lengths))

    def _grow(self, slots: int, columns: int) -> None:
        for caches in (self.keys, self.values):
            for index, old in enumerate(caches):
                caches[index] = torch.zeros(slots, self.shape.kv_heads, columns, self.shape.head_dim, dtype=self.dtype)
                caches[index][: len(old), :, columns - old.shape[2] :] = old

    def write(self, index: int, slots: slice, k: Tensor, v: Tensor) -> None:
        """Write keys and values (N, K, P, E) of one layer."""
        self.keys[index][slots, :, -k.shape[2] :] = k
        self.values[index][slots, :, -k.shape[2] :] = v

    def free_slot(self, slot: int) -> None:
        """Free a slot; the last slot moves into its place."""
        last = self.lengths.pop()
        if slot < len(self.lengths):
            self.lengths[slot] = last
            for cache in (*self.keys, *self.values):
                cache[slot] = cache[len(self.lengths)]


@dataclass(frozen=True)
class PromptSharing:
    """Which cached prompt each row continues. Rows without one use the empty slot behind the others."""

    grid_index_B: Tensor  # (B,) int64: slot * n + the row's number in its slot
    rows_per_slot: int  # n
    num_slots: int  # in use when the indices were computed

    def scatter_to_slots(self, x: Tensor) -> Tensor:
        """(B, K, H/K, X) -> (S, K, n*H/K, X), the empty slot included; zero where a slot has fewer rows."""
        slots, heads = self.num_slots + 1, x.shape[1]
        placed = x.new_zeros(slots * self.rows_per_slot, *x.shape[1:]).index_copy_(0, self.grid_index_B, x)
        by_head = placed.view(slots, self.rows_per_slot, *x.shape[1:]).transpose(1, 2)
        return by_head.reshape(slots, heads, -1, x.shape[-1])

    def gather_to_rows(self, x: Tensor) -> Tensor:
        """(S, K, n*H/K, X) -> (B, K, H/K, X)."""
        slots, heads = x.shape[:2]
        by_row = x.view(slots, heads, self.rows_per_slot, -1, x.shape[-1]).transpose(1, 2)
        return by_row.reshape(slots * self.rows_per_slot, heads, -1, x.shape[-1]).index_select(0, self.grid_index_B)


class SharedPromptAttention:
    """Attention of the rows of one step to their cached prompts and their own columns."""

    def __init__(self, prompt_cache: PromptCache, sharing: PromptSharing):
        self.prompt_cache, self.sharing = prompt_cache, sharing
        lengths = torch.tensor([*prompt_cache.lengths[: sharing.num_slots], 0])
        self.prompt_columns = int(lengths.max())
        hidden = torch.arange(self.prompt_columns) < (self.prompt_columns - lengths).unsqueeze(1)
        bias = torch.zeros(hidden.shape, dtype=prompt_cache.dtype).masked_fill_(hidden, -torch.inf)
        self.bias = bias.view(len(lengths), 1, 1, -1)  # (S, 1, 1, P)

    def attend(self, index: int, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """(B, H*E): one softmax over the prompt and the row's own columns.

        `q` (B, K, H/K, E), the rows' own `keys` and `values` (B, K, W, E), `bias` (B, 1, 1, W). Each part is attended
        to separately; the log-sum-exps give its weight in the result.
        """
        slots, prompt_cache = slice(self.sharing.num_slots + 1), self.prompt_cache
        prompt_keys, prompt_values = (
            c[index][slots, :, -self.prompt_columns :] for c in (prompt_cache.keys, prompt_cache.values)
        )
        own_out, own_lse = flash_attention_cpu(q, keys, values, attn_mask=bias, scale=scale)
        q = self.sharing.scatter_to_slots(q)
        prompt_out, prompt_lse = flash_attention_cpu(q, prompt_keys, prompt_values, attn_mask=self.bias, scale=scale)
        prompt_lse[-1] = -torch.inf  # the empty slot
        prompt_weight = torch.sigmoid(self.sharing.gather_to_rows(prompt_lse.unsqueeze(-1)) - own_lse.unsqueeze(-1))
        out = torch.lerp(own_out, self.sharing.gather_to_rows(prompt_out), prompt_weight.to(own_out.dtype))
        return out.reshape(len(own_out), -1)
