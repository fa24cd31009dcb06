"""The head as autograd functions: recomputing logits in backward, or loss and gradient in one pass.

Shapes: T packed tokens, M of them go through the head, V vocabulary, D hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.models.head_blocks import PRODUCT_COLUMNS, Blocks, Head, Statistics, even
from verl.models.head_kernels import CompiledKernels, Kernels, PieceKernels, statistics_dtype

# (loss, d loss / d logprob, d loss / d entropy) of a block of rows; None where the loss does not depend on it
LossOfRows = Callable[[slice, Statistics], tuple[Tensor, Tensor | None, Tensor | None]]


@dataclass(frozen=True)
class Budget:
    """What one block may take: its hidden states and its logits, in bytes as if in the type of the statistics."""

    hidden_bytes: int
    logit_bytes: int
    max_rows: int


CPU = Budget(7 << 19, 1 << 21, 1024)  # 16 MB in all with gradients and matmul buffers
CPU_NARROW = Budget(7 << 19, 1 << 22, 1024)  # whose matmuls are so fast that their start counts, and make copies: 40 MB
ACCELERATOR = Budget(32 << 20, 128 << 20, 8192)  # 256 MB in all; a device needs larger matmuls to be busy
LEAST = 64  # rows and columns of a block
KEPT_BYTES = 8 << 20  # whole rows of logits
MIN_ROWS_KEPT = 256  # fewer would stream the weight and its gradient through memory too often


def narrow_blocks(weight_VD: Tensor, num_rows: int, chunk_size: int | None, share: int = 1) -> Blocks:
    """Many rows by few columns: full matmul rate in a few megabytes, logits forgotten after the sweep.

    `share` 2 gives logits twice the memory: where there are no gradients.
    """
    rows = even(num_rows, chunk_size or _most_rows(weight_VD)[0])
    return Blocks(rows, _columns(weight_VD, rows, share))


def one_pass_blocks(weight_VD: Tensor, num_rows: int, chunk_size: int | None, weight_gradient: bool) -> Blocks:
    """As many rows as possible whose logits can stay until their gradient is known.

    Whole rows of logits where `chunk_size` asks for that or enough of them fit. Otherwise narrow blocks, and as many
    rows as the hidden size keep their logits in the memory of the weight's gradient.
    """
    vocab_size, hidden_size = weight_VD.shape
    fit = KEPT_BYTES // (vocab_size * weight_VD.dtype.itemsize)
    if chunk_size is not None or fit >= min(MIN_ROWS_KEPT, num_rows):
        return Blocks(even(num_rows, chunk_size or min(fit, _budget(weight_VD).max_rows)), vocab_size)
    if not (weight_gradient and weight_VD.is_contiguous()):
        return narrow_blocks(weight_VD, num_rows, None)
    most, together = _most_rows(weight_VD)
    rows = max(1, min(num_rows, most))
    return Blocks(rows, _columns(weight_VD, rows), together, kept=hidden_size)


def _budget(weight_VD: Tensor) -> Budget:
    if weight_VD.device.type != "cpu":
        return ACCELERATOR
    return CPU_NARROW if _is_narrow_on_cpu(weight_VD) else CPU


def _is_narrow_on_cpu(weight_VD: Tensor) -> bool:
    """Where matmuls copy their factors, and float32 values of logits exist in pieces only."""
    return weight_VD.device.type == "cpu" and weight_VD.dtype.itemsize < 4


def _most_rows(weight_VD: Tensor) -> tuple[int, int]:
    """(rows of a block, rows of a sweep) for which the hidden states and their gradients fit."""
    budget = _budget(weight_VD)
    row_bytes = weight_VD.shape[1] * statistics_dtype(weight_VD).itemsize
    together = budget.hidden_bytes // row_bytes
    block = together // 2 if _is_narrow_on_cpu(weight_VD) else together
    return _whole(block, budget.max_rows), _whole(together, budget.max_rows)


def _whole(rows: int, most: int) -> int:
    return min(most, max(LEAST, rows // LEAST * LEAST))


def _columns(weight_VD: Tensor, rows: int, share: int = 1) -> int:
    narrow = _is_narrow_on_cpu(weight_VD)
    itemsize = weight_VD.dtype.itemsize if narrow else statistics_dtype(weight_VD).itemsize
    fit = share * _budget(weight_VD).logit_bytes // (rows * itemsize)
    unit = PRODUCT_COLUMNS if narrow and fit >= PRODUCT_COLUMNS else LEAST
    return min(weight_VD.shape[0], max(LEAST, fit // unit * unit))


KERNELS: dict[str, Callable[[], Kernels]] = {"torch": PieceKernels, "compiled": CompiledKernels}


def kernels(name: str) -> Kernels:
    """The elementwise kernels called "torch", "compiled" or "triton"."""
    if name == "triton":
        from verl.models.head_triton import TritonKernels

        return TritonKernels()
    return KERNELS[name]()


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
        kind: str = "torch",
    ) -> tuple[Tensor, Tensor | None]:
        blocks = narrow_blocks(weight_VD, len(targets), chunk_size, share=2)
        head = Head(hidden_TD, weight_VD, bias, blocks, kernels(kind))
        logsumexp = torch.empty(len(targets), dtype=head.dtype, device=hidden_TD.device)
        logprobs = torch.empty_like(logsumexp)
        entropy = torch.empty_like(logsumexp) if with_entropy else None
        with torch.autocast(hidden_TD.device.type, enabled=False):
            for parts in head.blocks.sweeps(len(targets)):
                sweep = head.sweep(source, targets, temperature, parts)
                part, stats = sweep.part, head.statistics(sweep, with_entropy)
                logsumexp[part], logprobs[part] = stats.logsumexp, stats.logprobs
                if entropy is not None:
                    entropy[part] = stats.entropy
        ctx.save_for_backward(hidden_TD, weight_VD, bias, source, targets, temperature, logsumexp, logprobs, entropy)
        ctx.chunk_size, ctx.kind = chunk_size, kind
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, bias, source, targets, temperature, logsumexp, logprobs, entropy = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 9
        blocks = narrow_blocks(weight_VD, len(targets), ctx.chunk_size)
        head = Head(hidden_TD, weight_VD, bias, blocks, kernels(ctx.kind))
        out = head.new_gradients(*ctx.needs_input_grad[:3])
        with torch.autocast(hidden_TD.device.type, enabled=False):
            for parts in head.blocks.sweeps(len(targets)):
                sweep = head.sweep(source, targets, temperature, parts)
                part = sweep.part
                stats = Statistics(logsumexp[part], logprobs[part], _part(entropy, part))
                head.add_gradients(sweep, stats, _part(grad_logprobs, part), _part(grad_entropy, part), out)
        return (*out.finish(None if bias is None else bias.dtype), *(None,) * 6)


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
        kind: str = "torch",
    ) -> Tensor:
        blocks = one_pass_blocks(weight_VD, len(targets), chunk_size, ctx.needs_input_grad[1])
        head = Head(hidden_TD, weight_VD, bias, blocks, kernels(kind))
        out = head.new_gradients(*ctx.needs_input_grad[:3])
        loss_sum = torch.zeros((), dtype=head.dtype, device=hidden_TD.device)
        with torch.autocast(hidden_TD.device.type, enabled=False):
            for parts in head.blocks.sweeps(len(targets)):
                room = out.weight if blocks.kept and out.empty else None
                sweep = head.sweep(source, targets, temperature, parts, room)
                stats = head.statistics(sweep, with_entropy)
                loss, grad_logprobs, grad_entropy = loss_of_rows(sweep.part, stats)
                loss_sum += loss
                if out.wanted and not (grad_logprobs is None and grad_entropy is None):
                    head.add_gradients(sweep, stats, grad_logprobs, grad_entropy, out)
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
        return (*gradients, *(None,) * 7)


def _part(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]
