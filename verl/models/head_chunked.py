"""The head as autograd functions: recomputing logits in backward, or loss and gradient in one pass.

Shapes: T packed tokens, M of them go through the head, V vocabulary, D hidden.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.models.head_blocks import Blocks, Head, Statistics, statistics_dtype

# (loss, d loss / d logprob, d loss / d entropy) of a block of rows; None where the loss does not depend on it
LossOfRows = Callable[[slice, Statistics], tuple[Tensor, Tensor | None, Tensor | None]]


BLOCK_BYTES = 5 << 19  # logits of one block, and hidden states of its rows: 16 MB with gradients and matmul buffers
KEPT_BYTES = 8 << 20  # whole rows of logits
MAX_ROWS = 1024  # more do not raise the matmul rate
MIN_ROWS_KEPT = 256  # fewer would stream the weight and its gradient through memory too often


def narrow_blocks(weight_VD: Tensor, num_rows: int, chunk_size: int | None) -> Blocks:
    """Many rows by few columns: full matmul rate in a few megabytes, logits forgotten after the sweep."""
    vocab_size, hidden_size = weight_VD.shape
    size = statistics_dtype(weight_VD).itemsize
    most = chunk_size or min(MAX_ROWS, max(64, BLOCK_BYTES // (hidden_size * size)))
    rows = _even(num_rows, most)
    return Blocks(rows, min(vocab_size, max(64, BLOCK_BYTES // (rows * size) // 64 * 64)))


def one_pass_blocks(weight_VD: Tensor, num_rows: int, chunk_size: int | None) -> Blocks:
    """Whole rows of logits, kept until their gradient is known, where `chunk_size` asks or enough of them fit.

    Otherwise narrow ones: at a vocabulary of 152k only 27 float32 rows fit into 16 MB, and with so few the three
    matmuls left are bound by memory and take longer than four at their full rate.
    """
    vocab_size = weight_VD.shape[0]
    fit = KEPT_BYTES // (vocab_size * weight_VD.dtype.itemsize)
    if chunk_size is None and fit < min(MIN_ROWS_KEPT, num_rows):
        return narrow_blocks(weight_VD, num_rows, None)
    return Blocks(_even(num_rows, chunk_size or min(fit, MAX_ROWS)), vocab_size)


def _even(num_rows: int, most: int) -> int:
    """Rows per block so that blocks of at most `most` rows are about equal."""
    num_blocks = max(1, -(-num_rows // max(1, most)))
    return max(1, -(-num_rows // num_blocks))


class ChunkedHead(torch.autograd.Function):
    """(logprobs (M,), entropy (M,) or None) of `targets` given the hidden states at `source`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        source: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        chunk_size: int | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        head = Head(hidden_TD, weight_VD, bias, narrow_blocks(weight_VD, len(targets), chunk_size))
        logsumexp = torch.empty(len(targets), dtype=head.dtype, device=hidden_TD.device)
        logprobs = torch.empty_like(logsumexp)
        entropy = torch.empty_like(logsumexp) if with_entropy else None
        with torch.autocast(hidden_TD.device.type, enabled=False):
            for part in head.blocks.row_slices(len(targets)):
                rows = head.rows(source[part], targets[part], _part(temperature, part))
                stats = head.statistics(rows, with_entropy)
                logsumexp[part], logprobs[part] = stats.logsumexp, stats.logprobs
                if entropy is not None:
                    entropy[part] = stats.entropy
        ctx.save_for_backward(hidden_TD, weight_VD, bias, source, targets, temperature, logsumexp, logprobs, entropy)
        ctx.blocks = head.blocks
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, bias, source, targets, temperature, logsumexp, logprobs, entropy = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 8
        head = Head(hidden_TD, weight_VD, bias, ctx.blocks)
        out = head.new_gradients(*ctx.needs_input_grad[:3])
        with torch.autocast(hidden_TD.device.type, enabled=False):
            for part in head.blocks.row_slices(len(targets)):
                rows = head.rows(source[part], targets[part], _part(temperature, part))
                stats = Statistics(logsumexp[part], logprobs[part], _part(entropy, part))
                head.add_gradients(rows, stats, _part(grad_logprobs, part), _part(grad_entropy, part), out)
        return (*out.finish(None if bias is None else bias.dtype), None, None, None, None, None)


class OnePassHead(torch.autograd.Function):
    """The scalar sum of `loss_of_rows` over blocks of rows, whose gradient is taken while their logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        source: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        chunk_size: int | None,
        with_entropy: bool,
        loss_of_rows: LossOfRows,
    ) -> Tensor:
        head = Head(hidden_TD, weight_VD, bias, one_pass_blocks(weight_VD, len(targets), chunk_size))
        out = head.new_gradients(*ctx.needs_input_grad[:3])
        loss_sum = torch.zeros((), dtype=head.dtype, device=hidden_TD.device)
        with torch.autocast(hidden_TD.device.type, enabled=False):
            for part in head.blocks.row_slices(len(targets)):
                rows = head.rows(source[part], targets[part], _part(temperature, part))
                stats = head.statistics(rows, with_entropy)
                loss, grad_logprobs, grad_entropy = loss_of_rows(part, stats)
                loss_sum += loss
                if out.wanted and not (grad_logprobs is None and grad_entropy is None):
                    head.add_gradients(rows, stats, grad_logprobs, grad_entropy, out)
        ctx.gradients = out.finish(None if bias is None else bias.dtype)
        return loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "backward ran twice through a one-pass head, whose gradient is handed over once; "
                "call token_loss_one_pass again, or use token_logprobs(mode='chunked')"
            )
        gradients, ctx.gradients = ctx.gradients, None
        scale = float(grad_loss)
        if scale != 1.0:
            gradients = tuple(None if g is None else g.mul_(scale) for g in gradients)
        return (*gradients, None, None, None, None, None, None)


def _part(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]
