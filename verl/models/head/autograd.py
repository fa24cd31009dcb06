"""The head as autograd functions: one recomputes logits in backward, one takes loss and gradient in one pass.

Shapes: T packed tokens, M of them go through the head, V vocabulary, D hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.models.head.block_sizes import BlockSizes, even_part_size
from verl.models.head.blockwise import (
    PRODUCT_COLUMNS,
    BlockwiseHead,
    IdGradients,
    RowBlock,
    SoftmaxStatistics,
    places_within,
)
from verl.models.head.elementwise import CompiledKernels, Kernels, TiledKernels, statistics_dtype


@dataclass(frozen=True)
class Budget:
    """Memory of one block: hidden states and logits, in bytes as if in the dtype of the statistics."""

    hidden_bytes: int
    logit_bytes: int
    max_rows: int


CPU = Budget(7 << 19, 1 << 21, 1024)  # 16 MB in all with gradients and matmul buffers
CPU_LOW_PRECISION = Budget(7 << 19, 1 << 22, 1024)  # 40 MB: matmuls are fast, so starting one costs, and make copies
ACCELERATOR = Budget(32 << 20, 128 << 20, 8192)  # 256 MB in all; a device needs larger matmuls to be busy
MIN_BLOCK_SIDE = 64  # rows and columns of a block
STORED_LOGIT_BYTES = 8 << 20  # for whole rows of logits, where more than the least number fit
MIN_STORED_ROWS = 256  # fewer would stream the weight and its gradient through memory too often


def narrow_blocks(weight_VD: Tensor, num_rows: int, chunk_size: int | None, memory_factor: int = 1) -> BlockSizes:
    """Blocks of many rows and few columns: full matmul rate in a few megabytes; logits are not stored.

    `memory_factor` 2 gives logits twice the memory, for a pass without gradients.
    """
    rows = even_part_size(num_rows, chunk_size or _max_rows(weight_VD))
    return BlockSizes(rows, _block_columns(weight_VD, rows, memory_factor))


def one_pass_blocks(weight_VD: Tensor, num_rows: int, chunk_size: int | None) -> BlockSizes:
    """Blocks of whole rows, whose logits are stored until their gradient is known.

    Low-precision matmuls on a CPU copy their factors: there few rows at a time cost more than recomputing logits.
    """
    vocab_size, budget = weight_VD.shape[0], _budget(weight_VD)
    fit = max(STORED_LOGIT_BYTES, budget.logit_bytes) // (vocab_size * weight_VD.dtype.itemsize)
    if chunk_size is None and _is_low_precision_on_cpu(weight_VD) and fit < min(MIN_STORED_ROWS, num_rows):
        return narrow_blocks(weight_VD, num_rows, None)
    most = chunk_size or min(max(fit, MIN_STORED_ROWS), budget.max_rows)
    return BlockSizes(even_part_size(num_rows, most), vocab_size)


def _budget(weight_VD: Tensor) -> Budget:
    if weight_VD.device.type != "cpu":
        return ACCELERATOR
    return CPU_LOW_PRECISION if _is_low_precision_on_cpu(weight_VD) else CPU


def _is_low_precision_on_cpu(weight_VD: Tensor) -> bool:
    """Whether matmuls copy their factors, and float32 logits exist in tiles only."""
    return weight_VD.device.type == "cpu" and weight_VD.dtype.itemsize < 4


def _max_rows(weight_VD: Tensor) -> int:
    """Rows of a block whose hidden states and their gradients fit."""
    budget = _budget(weight_VD)
    fit = budget.hidden_bytes // (weight_VD.shape[1] * statistics_dtype(weight_VD).itemsize)
    if _is_low_precision_on_cpu(weight_VD):
        fit //= 2
    return min(budget.max_rows, max(MIN_BLOCK_SIDE, fit // MIN_BLOCK_SIDE * MIN_BLOCK_SIDE))


def _block_columns(weight_VD: Tensor, rows: int, memory_factor: int = 1) -> int:
    low_precision = _is_low_precision_on_cpu(weight_VD)
    itemsize = weight_VD.dtype.itemsize if low_precision else statistics_dtype(weight_VD).itemsize
    fit = memory_factor * _budget(weight_VD).logit_bytes // (rows * itemsize)
    unit = PRODUCT_COLUMNS if low_precision and fit >= PRODUCT_COLUMNS else MIN_BLOCK_SIDE
    return min(weight_VD.shape[0], max(MIN_BLOCK_SIDE, fit // unit * unit))


KERNELS: dict[str, Callable[[], Kernels]] = {"torch": TiledKernels, "compiled": CompiledKernels}


def make_kernels(name: str) -> Kernels:
    """The elementwise kernels called "torch", "compiled" or "triton"."""
    if name == "triton":
        from verl.models.head.triton_kernels import TritonKernels

        return TritonKernels()
    return KERNELS[name]()


class LogitsAtIds:
    """Reads the logits (R, k) of the tokens `ids` (M, k)."""

    def __init__(self, ids: Tensor):
        self.all_ids = ids

    def start_part(self, part: slice) -> "LogitsAtIds":
        """The rows that the head goes over next."""
        self.ids = self.all_ids[part]
        return self

    def start(self, row_block: RowBlock, dtype: torch.dtype) -> None:
        self.logits = torch.zeros(self.ids.shape, dtype=dtype, device=self.ids.device)

    def read(self, logits: Tensor, inverse: Tensor | None, columns: slice) -> None:
        at = places_within(self.ids, columns)
        values = logits[at[0], self.ids[at] - columns.start].to(self.logits.dtype)
        self.logits[at] = values if inverse is None else values * inverse[at[0], 0]


@dataclass(frozen=True)
class PassOptions:
    """How a pass through the head is computed."""

    chunk_size: int | None = None  # rows of a block; None: chosen for speed
    with_entropy: bool = False
    kernels: str = "torch"


class ChunkedHead(torch.autograd.Function):
    """(logprobs (M,), entropy (M,) or None, log-probs (M, k) at `ids`) given the hidden states at `source`.

    The first is about `targets`. The `ids` of a row are distinct; without them the last output is None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        source: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        options: PassOptions,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        blocks, with_entropy = narrow_blocks(weight_VD, len(targets), options.chunk_size, 2), options.with_entropy
        head = BlockwiseHead(hidden_TD, weight_VD, bias, blocks, make_kernels(options.kernels))
        logsumexp = torch.empty(len(targets), dtype=head.dtype, device=hidden_TD.device)
        logprobs = torch.empty_like(logsumexp)
        entropy = torch.empty_like(logsumexp) if with_entropy else None
        reader = None if ids is None else LogitsAtIds(ids)
        at_ids = None if ids is None else torch.empty(ids.shape, dtype=head.dtype, device=hidden_TD.device)
        with torch.autocast(hidden_TD.device.type, enabled=False):
            for part in head.blocks.row_slices(len(targets)):
                rows = head.row_block(source, targets, temperature, part)
                stats = head.statistics(rows, with_entropy, reader and reader.start_part(part))
                logsumexp[part], logprobs[part] = stats.logsumexp, stats.logprobs
                if entropy is not None:
                    entropy[part] = stats.entropy
                if reader is not None and at_ids is not None:
                    at_ids[part] = reader.logits - stats.logsumexp.unsqueeze(1)
        inputs = (hidden_TD, weight_VD, bias, source, targets, temperature)
        ctx.save_for_backward(*inputs, logsumexp, logprobs, entropy, ids, at_ids)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return logprobs, entropy, at_ids

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_at_ids: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, bias, source, targets, temperature, *saved = ctx.saved_tensors
        logsumexp, logprobs, entropy, ids, at_ids = saved
        if grad_logprobs is None and grad_entropy is None and grad_at_ids is None:
            return (None,) * 8
        blocks = narrow_blocks(weight_VD, len(targets), ctx.options.chunk_size)
        head = BlockwiseHead(hidden_TD, weight_VD, bias, blocks, make_kernels(ctx.options.kernels))
        out = head.new_gradients(*ctx.needs_input_grad[:3])
        with torch.autocast(hidden_TD.device.type, enabled=False):
            for part in head.blocks.row_slices(len(targets)):
                rows = head.row_block(source, targets, temperature, part)
                stats = SoftmaxStatistics(logsumexp[part], logprobs[part], _part(entropy, part))
                chosen = None if grad_at_ids is None else IdGradients(ids[part], at_ids[part], grad_at_ids[part])
                head.add_gradients(rows, stats, _part(grad_logprobs, part), _part(grad_entropy, part), out, chosen)
        return (*out.finish(None if bias is None else bias.dtype), *(None,) * 5)


class KnownGradient(torch.autograd.Function):
    """The scalar `loss_sum`; `backward` hands over its `gradients` by the `inputs`, once, times its own."""

    @staticmethod
    def forward(ctx: Any, loss_sum: Tensor, gradients: tuple[Tensor | None, ...], *inputs: Tensor | None) -> Tensor:
        ctx.gradients = gradients
        return loss_sum.clone()

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
        return (None, None, *gradients)


def _part(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]
