"""Decode attention by the varlen flash kernel: each row of the cache is read from its own first column on.

The kernel takes keys as tokens (T, K, E) in which a sequence is a run. A layer's cache is (R, K, W, E): in its view
with the stride of a column between tokens, row r begins at r * K * W, and heads are W columns apart.

Shapes: B rows in use of R, H query heads, K key-value heads, W columns, E head size.
"""

import functools
import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RaggedRows:
    """The columns that rows 0..B-1 attend to, up to one last column."""

    queries: Tensor  # (B + 1,) int32: 0..B, for one query each
    begins: Tensor  # (B + 1,) int32: the first token of each row in the view; the last is not used
    counts: Tensor  # (B,) int32: columns
    most: int  # columns of the cache

    @classmethod
    def ending_at(cls, column: int | Tensor, starts_B: Tensor, cache: Tensor) -> "RaggedRows":
        """Rows that begin at their `starts_B` and have their newest token in `column`."""
        _, kv_heads, columns, _ = cache.shape
        queries = torch.arange(len(starts_B) + 1, dtype=torch.int32, device=starts_B.device)
        begins = queries * (kv_heads * columns)
        begins[:-1] += starts_B
        return cls(queries, begins, (column + 1 - starts_B).int(), columns)

    def newest(self, window: int | None) -> "RaggedRows":
        """The newest `window` columns of each; all for None."""
        if window is None:
            return self
        counts, begins = self.counts.clamp(max=window), self.begins.clone()
        begins[:-1] += self.counts - counts
        return RaggedRows(self.queries, begins, counts, self.most)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """(B, H, E) from queries (B, H, E) and a layer's cache (R, K, W, E)."""
        most = self.most, scale
        return flash_varlen(q, tokens_of(keys), tokens_of(values), self.queries, self.begins, self.counts, *most)


def tokens_of(cache: Tensor) -> Tensor:
    """(T, K, E): a view of (R, K, W, E) in which each row's columns follow one another."""
    rows, kv_heads, columns, size = cache.shape
    return cache.as_strided(((rows - 1) * kv_heads * columns + columns, kv_heads, size), (size, columns * size, 1))


def flash_varlen(
    q: Tensor, keys: Tensor, values: Tensor, queries: Tensor, begins: Tensor, counts: Tensor, most: int, scale: float
) -> Tensor:
    """torch's flash kernel for one query a sequence; `counts` of keys from `begins` on."""
    return torch.ops.aten._flash_attention_forward(
        q, keys, values, queries, begins, 1, most, 0.0, False, False, scale=scale, seqused_k=counts
    )[0]


@functools.cache
def can_attend_ragged(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether the kernel runs here and agrees with `scaled_dot_product_attention`; tried once."""
    if device.type == "cpu" or dtype not in (torch.float16, torch.bfloat16):
        return False
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 3, kv_heads, 40, head_dim, generator=generator).to(device, dtype)
    q = torch.randn(2, heads, head_dim, generator=generator).to(device, dtype)
    starts, scale = torch.tensor([3, 30], device=device), head_dim**-0.5
    try:
        got = RaggedRows.ending_at(36, starts, keys).attend(q, keys, values, scale)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        logger.warning("no ragged flash attention on %s in %s, masks instead: %s", device, dtype, error)
        return False
    expected = [
        F.scaled_dot_product_attention(
            q[row, None, :, None], *(x[row, None, :, start:37] for x in (keys, values)), scale=scale, enable_gqa=True
        )
        for row, start in enumerate(starts.tolist())
    ]
    if torch.allclose(got, torch.cat(expected).squeeze(2), atol=0.02):
        return True
    logger.warning("ragged flash attention on %s in %s gives wrong numbers; masks instead", device, dtype)
    return False
