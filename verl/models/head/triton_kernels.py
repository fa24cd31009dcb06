"""The elementwise kernels of the head in Triton: one read of a block for its sums, one read and write for its gradient.

The matmuls around them are the vendor's own. One program processes the columns of a row in order, so sums repeat bit by
bit. Shapes: R rows and C columns of logits in one block; everything per row is (R,) float32, or float64 for float64
logits. With TRITON_INTERPRET=1 set before this file is imported the kernels run on a CPU, slowly.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.models.head.elementwise import LogitGradientCoefficients, SoftmaxAccumulator

WIDTH = 4096  # columns that a program loads at a time


class TritonKernels:
    """The two passes over a block as Triton kernels."""

    def accumulate(self, logits: Tensor, inverse: Tensor | None, accumulator: SoftmaxAccumulator, keep: bool) -> bool:
        """Adds this block to `accumulator`; the block stays unchanged."""
        rows, columns = logits.shape
        if rows == 0:
            return False
        with _on(logits.device):
            _accumulate[(rows,)](
                logits,
                accumulator.shift if inverse is None else inverse,
                accumulator.shift,
                accumulator.sum_exp,
                accumulator.sum_exp if accumulator.sum_shifted_exp is None else accumulator.sum_shifted_exp,
                columns,
                *logits.stride(),
                inverse is not None,
                accumulator.sum_shifted_exp is not None,
                _width(columns),
                num_warps=8,
            )
        return False

    def to_gradient(self, logits: Tensor, inverse: Tensor | None, coefficients: LogitGradientCoefficients) -> None:
        """In place: logits -> their gradient, except at the targets."""
        rows, columns = logits.shape
        if rows == 0:
            return
        width = _width(columns)
        with _on(logits.device):
            _to_gradient[(rows, triton.cdiv(columns, width))](
                logits,
                coefficients.constant if inverse is None else inverse,
                coefficients.logsumexp,
                coefficients.constant,
                coefficients.constant if coefficients.linear is None else coefficients.linear,
                columns,
                *logits.stride(),
                inverse is not None,
                coefficients.linear is not None,
                width,
                num_warps=8,
            )


def _width(columns: int) -> int:
    return min(WIDTH, triton.next_power_of_2(columns))


def _on(device: torch.device) -> AbstractContextManager:
    """Makes the logits' device current, because Triton launches on the current device."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device.index)


@triton.jit
def _accumulate(
    logits,
    inverse,
    shift,
    sum_exp,
    sum_shifted_exp,
    columns,
    row_stride,
    column_stride,
    HAS_INVERSE: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0)
    a = tl.load(shift + row)
    scale = a * 0 + 1
    if HAS_INVERSE:
        scale = tl.load(inverse + row)
    partial_exp = tl.zeros([WIDTH], a.dtype)
    partial_shifted_exp = tl.zeros([WIDTH], a.dtype)
    for start in range(0, columns, WIDTH):
        column = start + tl.arange(0, WIDTH)
        inside = column < columns
        x = tl.load(logits + row.to(tl.int64) * row_stride + column * column_stride, mask=inside, other=0.0).to(a.dtype)
        y = tl.where(inside, x * scale - a, 0.0)
        p = tl.where(inside, tl.exp(y), 0.0)
        partial_exp += p
        if WITH_ENTROPY:
            partial_shifted_exp += y * p
    tl.store(sum_exp + row, tl.load(sum_exp + row) + tl.sum(partial_exp, 0))
    if WITH_ENTROPY:
        tl.store(sum_shifted_exp + row, tl.load(sum_shifted_exp + row) + tl.sum(partial_shifted_exp, 0))


@triton.jit
def _to_gradient(
    logits,
    inverse,
    logsumexp,
    constant,
    linear,
    columns,
    row_stride,
    column_stride,
    HAS_INVERSE: tl.constexpr,
    HAS_LINEAR: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    pointers = logits + row.to(tl.int64) * row_stride + column * column_stride
    lse = tl.load(logsumexp + row)
    y = tl.load(pointers, mask=inside, other=0.0).to(lse.dtype)
    if HAS_INVERSE:
        y = y * tl.load(inverse + row)
    y = y - lse
    coefficient = tl.load(constant + row)
    if HAS_LINEAR:
        coefficient += tl.load(linear + row) * y
    tl.store(pointers, (tl.exp(y) * coefficient).to(logits.dtype.element_ty), mask=inside)
