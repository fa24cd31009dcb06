"""The elementwise work of the head in Triton: one read of a block for its sums, one read and write for its gradient.

The matmuls around them are the vendor's own. One program owns a row of a block and walks its columns in order, so
sums repeat bit by bit. Shapes: R rows and C columns of logits in one block; everything per row is (R,) float32, or
float64 for float64 logits. With TRITON_INTERPRET=1 set before this file is imported the kernels run on a CPU, slowly.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.models.head_kernels import Slopes, Sums

WIDTH = 4096  # columns that a program takes at a time


class TritonKernels:
    """The two passes over a block as Triton kernels."""

    def add_sums(self, logits: Tensor, inverse: Tensor | None, sums: Sums, keep: bool) -> bool:
        """Adds this block to `sums.total` and `sums.weighted`, and leaves it as it is."""
        rows, columns = logits.shape
        if rows == 0:
            return False
        with _on(logits.device):
            _add_sums[(rows,)](
                logits,
                sums.shift if inverse is None else inverse,
                sums.shift,
                sums.total,
                sums.total if sums.weighted is None else sums.weighted,
                columns,
                *logits.stride(),
                inverse is not None,
                sums.weighted is not None,
                _width(columns),
                num_warps=8,
            )
        return False

    def to_gradient(self, logits: Tensor, inverse: Tensor | None, slopes: Slopes) -> None:
        """In place: logits -> their gradient, but for the targets."""
        rows, columns = logits.shape
        if rows == 0:
            return
        width = _width(columns)
        with _on(logits.device):
            _to_gradient[(rows, triton.cdiv(columns, width))](
                logits,
                slopes.constant if inverse is None else inverse,
                slopes.logsumexp,
                slopes.constant,
                slopes.constant if slopes.linear is None else slopes.linear,
                columns,
                *logits.stride(),
                inverse is not None,
                slopes.linear is not None,
                width,
                num_warps=8,
            )


def _width(columns: int) -> int:
    return min(WIDTH, triton.next_power_of_2(columns))


def _on(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device, which need not be that of the logits."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device.index)


@triton.jit
def _add_sums(
    logits,
    inverse,
    shift,
    total,
    weighted,
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
    sums = tl.zeros([WIDTH], a.dtype)
    products = tl.zeros([WIDTH], a.dtype)
    for start in range(0, columns, WIDTH):
        column = start + tl.arange(0, WIDTH)
        inside = column < columns
        x = tl.load(logits + row.to(tl.int64) * row_stride + column * column_stride, mask=inside, other=0.0).to(a.dtype)
        y = tl.where(inside, x * scale - a, 0.0)
        p = tl.where(inside, tl.exp(y), 0.0)
        sums += p
        if WITH_ENTROPY:
            products += y * p
    tl.store(total + row, tl.load(total + row) + tl.sum(sums, 0))
    if WITH_ENTROPY:
        tl.store(weighted + row, tl.load(weighted + row) + tl.sum(products, 0))


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
    where = logits + row.to(tl.int64) * row_stride + column * column_stride
    lse = tl.load(logsumexp + row)
    y = tl.load(where, mask=inside, other=0.0).to(lse.dtype)
    if HAS_INVERSE:
        y = y * tl.load(inverse + row)
    y = y - lse
    slope = tl.load(constant + row)
    if HAS_LINEAR:
        slope += tl.load(linear + row) * y
    tl.store(where, (tl.exp(y) * slope).to(logits.dtype.element_ty), mask=inside)
