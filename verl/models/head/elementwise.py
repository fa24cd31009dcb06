"""Elementwise kernels over one block of logits: sums of exponentials, and logits turned into their gradient in place.

Shapes: R rows and C columns of logits in one block. Everything per row is (R, 1) in float32, or float64 for float64
logits. `inverse` is 1 / temperature if the logits are not divided by it yet, else None. Each kernel keeps the order of
its operations, so results repeat bit by bit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

import torch
from torch import Tensor

TILE_BYTES = 1 << 18  # of a tile of a block, which stays in a core's cache
LOW_PRECISION_FACTOR = 2  # larger tiles in low precision, of which only two float32 copies are needed
DEVICE_TILE_ELEMENTS = 1 << 23  # of a tile on other devices, where many small operations are slow
NEEDS_NO_SHIFT = 32.0  # below this absolute value e^x neither overflows nor vanishes
SMALLEST_EXPONENT = {torch.float32: -80.0, torch.float64: -700.0}  # below, exp is subnormal and slow


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64 inputs, float32 for everything narrower."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@dataclass
class SoftmaxAccumulator:
    """Sums of a pass over the vocabulary: e^(x-shift), (x-shift) e^(x-shift) if requested; and the target's logit."""

    shift: Tensor
    sum_exp: Tensor
    sum_shifted_exp: Tensor | None
    target_logits: Tensor
    is_shifted: bool  # False if the shift is 0 for every row

    @classmethod
    def zeros(cls, shift: Tensor, with_entropy: bool, is_shifted: bool = True) -> "SoftmaxAccumulator":
        zero = torch.zeros_like(shift)
        return cls(shift, zero, zero.clone() if with_entropy else None, zero.clone(), is_shifted)


@dataclass(frozen=True)
class LogitGradientCoefficients:
    """Coefficients of the gradient p (constant + linear log p) of a logit with probability p that is not the target's.

    `grad_logprob` is the gradient of the target's log-prob, if it has one.
    """

    logsumexp: Tensor
    constant: Tensor
    linear: Tensor | None
    grad_logprob: Tensor | None

    @cached_property
    def unshifted(self) -> tuple[Tensor, Tensor | None] | None:
        """Constant and linear of the same gradient as e^x (constant + linear x); None if e^x might overflow."""
        if not bool((self.logsumexp.abs() < NEEDS_NO_SHIFT).all()):
            return None
        scale = self.logsumexp.neg().exp()
        if self.linear is None:
            return self.constant * scale, None
        return (self.constant - self.linear * self.logsumexp) * scale, self.linear * scale

    @classmethod
    def of(
        cls,
        logsumexp: Tensor,
        entropy: Tensor | None,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        inverse: Tensor | None,
    ) -> "LogitGradientCoefficients":
        """From (R,) statistics and gradients a of the log-prob, b of the entropy: a (onehot - p) - b p (log p + H)."""
        scale = 1.0 if inverse is None else inverse
        a = None if grad_logprobs is None else grad_logprobs.unsqueeze(1) * scale
        logsumexp = logsumexp.unsqueeze(1)
        if grad_entropy is None:
            assert a is not None, "neither output has a gradient"
            return cls(logsumexp, -a, None, a)
        assert entropy is not None, "entropy was not computed"
        linear = -grad_entropy.unsqueeze(1) * scale
        constant = linear * entropy.unsqueeze(1)
        return cls(logsumexp, constant if a is None else constant - a, linear, a)

    def of_logits(self, logprobs: Tensor) -> Tensor:
        """(R, k) gradient of logits with these log-probs, that of their own log-probs left out."""
        return logprobs.exp() * (self.constant if self.linear is None else self.constant + self.linear * logprobs)

    def target_gradient(self, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        """(R, 1) gradient of the target's logit: exact where its probability is close to 1."""
        logprobs, p_minus_one = logprobs.unsqueeze(1), logprobs.expm1().unsqueeze(1)
        if self.linear is None:
            return self.constant * p_minus_one
        assert entropy is not None, "entropy was not computed"
        out = self.linear * (logprobs + entropy.unsqueeze(1)) * logprobs.exp()
        return out if self.grad_logprob is None else out - self.grad_logprob * p_minus_one


class Kernels(Protocol):
    """One implementation of the two passes over a block."""

    def accumulate(self, logits: Tensor, inverse: Tensor | None, accumulator: SoftmaxAccumulator, keep: bool) -> bool:
        """Adds this block to `accumulator`. Returns True if the block then contains e^(x-shift) instead of x.

        Without `keep` the content of the block is undefined afterwards.
        """

    def to_gradient(self, logits: Tensor, inverse: Tensor | None, coefficients: LogitGradientCoefficients) -> None:
        """In place: logits -> their gradient, except at the targets."""


class TiledKernels:
    """Plain tensor operations over tiles of a block: the fastest on a CPU without a compiler."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, torch.dtype], Tensor] = {}
        self._ones: Tensor | None = None

    def accumulate(self, logits: Tensor, inverse: Tensor | None, accumulator: SoftmaxAccumulator, keep: bool) -> bool:
        same_dtype = logits.dtype == accumulator.sum_exp.dtype
        # the range of float16 is too small for exponentials
        exponentials = accumulator.sum_shifted_exp is None and logits.dtype != torch.float16
        for rows, columns in _tiles(logits):
            tile = logits[rows, columns]
            shift = accumulator.shift if accumulator.is_shifted else None
            if accumulator.sum_shifted_exp is None:
                into = tile if same_dtype else self._scratch_like(0, tile, accumulator.sum_exp)
                p = self._shifted(tile, into, inverse, shift, rows).exp_()
                self._add_row_sums(accumulator.sum_exp[rows], p, same_dtype)
                if keep and exponentials and not same_dtype:
                    tile.copy_(p)
            else:
                use_tile = same_dtype and shift is None
                y = tile if use_tile else self._scratch_like(0, tile, accumulator.sum_exp)
                y = y if use_tile else self._shifted(tile, y, inverse, shift, rows)
                p = torch.exp(y, out=self._scratch_like(1, tile, accumulator.sum_exp))
                self._add_row_sums(accumulator.sum_exp[rows], p, same_dtype)
                self._add_row_sums(accumulator.sum_shifted_exp[rows], p.mul_(y), same_dtype)
        return exponentials

    def to_gradient(self, logits: Tensor, inverse: Tensor | None, coefficients: LogitGradientCoefficients) -> None:
        same_dtype = logits.dtype == coefficients.constant.dtype
        shift, constant, linear = coefficients.logsumexp, coefficients.constant, coefficients.linear
        if not same_dtype and coefficients.unshifted is not None:
            (constant, linear), shift = coefficients.unshifted, None
        for rows, columns in _tiles(logits):
            tile = logits[rows, columns]
            into = tile if same_dtype else self._scratch_like(0, tile, constant)
            y = self._shifted(tile, into, inverse, shift, rows)
            if linear is None:
                y.exp_().mul_(constant[rows])
            else:
                p = torch.exp(y, out=self._scratch_like(1, tile, constant))
                torch.addcmul(constant[rows], linear[rows], y, out=y).mul_(p)
            if not same_dtype:
                tile.copy_(y)

    @staticmethod
    def _shifted(tile: Tensor, into: Tensor, inverse: Tensor | None, shift: Tensor | None, rows: slice) -> Tensor:
        """x / temperature - shift, in `into` or, without a shift, in the tile itself."""
        if tile.dtype == into.dtype:
            if shift is None:
                return tile
            return torch.sub(tile, shift[rows], out=into).clamp_(min=SMALLEST_EXPONENT[into.dtype])
        into.copy_(tile)
        if inverse is not None:
            into.mul_(inverse[rows])
        return into if shift is None else into.sub_(shift[rows])

    def _scratch_like(self, number: int, tile: Tensor, like: Tensor) -> Tensor:
        """Uninitialised memory with the tile's layout; tensors of different `number` coexist."""
        key, size = (number, like.dtype), tile.numel()
        flat = self._scratch.get(key)
        if flat is None or flat.numel() < size:
            flat = self._scratch[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return flat.as_strided(tile.shape, tile.stride())

    def _add_row_sums(self, out: Tensor, values: Tensor, exactly: bool) -> None:
        """(R, 1) += sums of (R, C), by a product with ones unless `exactly`.

        The product takes half the time, but adds one number after another, which does not matter in bfloat16.
        """
        if exactly:
            out += values.sum(1, keepdim=True)
            return
        if self._ones is None or len(self._ones) < values.shape[1]:
            self._ones = values.new_ones(values.shape[1])
        out.view(-1).addmv_(values, self._ones[: values.shape[1]])


def _tiles(logits: Tensor) -> Iterator[tuple[slice, slice]]:
    """(rows, columns) tiles of a block, each without gaps in memory."""
    num_rows, num_columns = logits.shape
    elements = DEVICE_TILE_ELEMENTS
    if logits.device.type == "cpu":
        size = logits.element_size()
        elements = TILE_BYTES * (LOW_PRECISION_FACTOR if size < 4 else 1) // size
    if logits.stride(0) == 1:
        width = max(1, elements // max(1, num_rows))
        for column in range(0, num_columns, width):
            yield slice(0, num_rows), slice(column, min(column + width, num_columns))
    else:
        height = max(1, elements // max(1, num_columns))
        for row in range(0, num_rows, height):
            yield slice(row, min(row + height, num_rows)), slice(0, num_columns)


class CompiledKernels:
    """The same formulas through torch.compile: one pass over the block each (`use_torch_compile`)."""

    def accumulate(self, logits: Tensor, inverse: Tensor | None, accumulator: SoftmaxAccumulator, keep: bool) -> bool:
        sum_exp, sum_shifted_exp = compiled(exponential_sums)(
            logits, inverse, accumulator.shift, accumulator.sum_shifted_exp is not None
        )
        accumulator.sum_exp.add_(sum_exp)
        if accumulator.sum_shifted_exp is not None:
            accumulator.sum_shifted_exp.add_(sum_shifted_exp)
        return False

    def to_gradient(self, logits: Tensor, inverse: Tensor | None, coefficients: LogitGradientCoefficients) -> None:
        compiled(gradient_in_place)(logits, inverse, coefficients.logsumexp, coefficients.constant, coefficients.linear)


@cache
def compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True, fullgraph=True)


def exponential_sums(
    logits: Tensor, inverse: Tensor | None, shift: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum over columns of e^y and, if requested, of y e^y, for y = x / temperature - shift."""
    y = logits.to(shift.dtype) * (1.0 if inverse is None else inverse) - shift
    p = y.exp()
    return p.sum(1, keepdim=True), (y * p).sum(1, keepdim=True) if with_entropy else None


def gradient_in_place(
    logits: Tensor, inverse: Tensor | None, logsumexp: Tensor, constant: Tensor, linear: Tensor | None
) -> None:
    """logits := p (constant + linear log p)."""
    y = logits.to(constant.dtype) * (1.0 if inverse is None else inverse) - logsumexp
    logits.copy_(y.exp() * (constant if linear is None else constant + linear * y))
