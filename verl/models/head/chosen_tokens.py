"""Log-probs of chosen tokens of the vocabulary: those at given ids, and the most likely ones.

Shapes: M rows go through the head, R of them in one block, k tokens of each, C columns of logits in one block.
"""

import torch
from torch import Tensor

from verl.models.head.autograd import make_kernels, narrow_blocks
from verl.models.head.blockwise import BlockwiseHead, RowBlock


class TopLogits:
    """The `k` largest logits of each row among the ids below `num_ids`, largest first."""

    def __init__(self, k: int, num_ids: int):
        self.k, self.num_ids = k, num_ids

    def start(self, row_block: RowBlock, dtype: torch.dtype) -> None:
        like = row_block.scaled_RD
        self.logits = torch.empty(len(like), 0, dtype=dtype, device=like.device)
        self.ids = torch.empty(len(like), 0, dtype=torch.int64, device=like.device)

    def read(self, logits: Tensor, inverse: Tensor | None, columns: slice) -> None:
        width = min(columns.stop, self.num_ids) - columns.start
        if width <= 0:
            return
        values, ids = logits[:, :width].topk(min(self.k, width), 1)
        values = values.to(self.logits.dtype)
        values = torch.cat([self.logits, values if inverse is None else values * inverse], 1)
        ids = torch.cat([self.ids, ids + columns.start], 1)
        self.logits, order = values.topk(min(self.k, values.shape[1]), 1)
        self.ids = ids.gather(1, order)


@torch.no_grad()
def top_tokens(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias: Tensor | None,
    source: Tensor,
    temperature: Tensor | None,
    top: TopLogits,
    chunk_size: int | None = None,
    kernel_name: str = "torch",
) -> tuple[Tensor, Tensor]:
    """(ids (M, k), log-probs (M, k)) of the most likely tokens given the hidden states at `source` (M,)."""
    blocks = narrow_blocks(weight_VD, len(source), chunk_size, memory_factor=2)
    head = BlockwiseHead(hidden_TD.detach(), weight_VD.detach(), bias, blocks, make_kernels(kernel_name))
    ids = torch.empty(len(source), top.k, dtype=torch.int64, device=hidden_TD.device)
    logprobs = torch.empty(len(source), top.k, dtype=head.dtype, device=hidden_TD.device)
    no_targets = torch.zeros_like(source)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        for part in head.blocks.row_slices(len(source)):
            stats = head.statistics(head.row_block(source, no_targets, temperature, part), False, top)
            ids[part], logprobs[part] = top.ids, top.logits - stats.logsumexp.unsqueeze(1)
    return ids, logprobs
