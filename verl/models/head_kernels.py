"""Elementwise work on one block of logits: sums of exponentials, and logits turned into their gradient in place.

Shapes: R rows and C columns of logits in one block. Everything per row is (R, 1) in float32, or float64 for float64
logits. `inverse` is 1 / temperature where the logits are not divided yet, else None. Each kernel does the same in the
same order every time, so results repeat bit by bit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

import torch
from torch import Tensor

PART_BYTES = 1 << 18  # pieces of a block that stay in a core's cache; in a narrow type more:
NARROW_FACTOR = 2  # its two float32 copies are all there is
DEVICE_ELEMENTS = 1 << 23  # of a piece on other devices, where many small operations are slow
NEEDS_NO_SHIFT = 32.0  # e^x of such logits neither overflows nor is lost
SMALLEST_EXPONENT = {torch.float32: -80.0, torch.float64: -700.0}  # below, exp is subnormal and slow


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64 inputs, float32 for everything narrower."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@dataclass
class Sums:
    """What a sweep over the vocabulary adds up: e^(x-shift), (x-shift) e^(x-shift) if asked, the target's logit."""

    shift: Tensor
    total: Tensor
    weighted: Tensor | None
    target_logits: Tensor
    is_shifted: bool  # False where the shift is 0 for every row

    @classmethod
    def zeros(cls, shift: Tensor, with_entropy: bool, is_shifted: bool = True) -> "Sums":
        zero = torch.zeros_like(shift)
        return cls(shift, zero, zero.clone() if with_entropy else None, zero.clone(), is_shifted)


@dataclass(frozen=True)
class Slopes:
    """What turns a logit x into its gradient where it is not the target's: p (constant + linear log p).

    `logprob` is the gradient of the target's log-prob, if it has one.
    """

    logsumexp: Tensor
    constant: Tensor
    linear: Tensor | None
    logprob: Tensor | None

    @cached_property
    def without_shift(self) -> tuple[Tensor, Tensor | None] | None:
        """Constant and linear of the same gradient as e^x (constant + linear x); None where e^x might overflow."""
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
    ) -> "Slopes":
        """From (R,) statistics and gradients a of the log-prob, b of the entropy: a (onehot - p) - b p (log p + H)."""
        scale = 1.0 if inverse is None else inverse
        a = None if grad_logprobs is None else grad_logprobs.unsqueeze(1) * scale
        logsumexp = logsumexp.unsqueeze(1)
        if grad_entropy is None:
            assert a is not None, "neither output has a gradient"
            return cls(logsumexp, -a, None, a)
        assert entropy is not None, "no entropy was taken"
        linear = -grad_entropy.unsqueeze(1) * scale
        constant = linear * entropy.unsqueeze(1)
        return cls(logsumexp, constant if a is None else constant - a, linear, a)

    def at_target(self, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        """(R, 1) gradient of the target's logit: exact where its probability is close to 1."""
        logprobs, minus = logprobs.unsqueeze(1), logprobs.expm1().unsqueeze(1)
        if self.linear is None:
            return self.constant * minus
        assert entropy is not None, "no entropy was taken"
        out = self.linear * (logprobs + entropy.unsqueeze(1)) * logprobs.exp()
        return out if self.logprob is None else out - self.logprob * minus


class Kernels(Protocol):
    """One implementation of the two passes over a block."""

    def add_sums(self, logits: Tensor, inverse: Tensor | None, sums: Sums, keep: bool) -> bool:
        """Adds this block to `sums.total` and `sums.weighted`. True: the block now holds e^(x-shift), not x.

        With `keep` it holds either afterwards; without, it may hold anything.
        """

    def to_gradient(self, logits: Tensor, inverse: Tensor | None, slopes: Slopes) -> None:
        """In place: logits -> their gradient, but for the targets."""


class PieceKernels:
    """Plain tensor operations over pieces of a block: the fastest there is on a CPU without a compiler."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, torch.dtype], Tensor] = {}
        self._ones: Tensor | None = None

    def add_sums(self, logits: Tensor, inverse: Tensor | None, sums: Sums, keep: bool) -> bool:
        same = logits.dtype == sums.total.dtype
        exponentials = sums.weighted is None and logits.dtype != torch.float16  # whose range is too small for them
        for rows, columns in _pieces(logits):
            piece = logits[rows, columns]
            shift = sums.shift if sums.is_shifted else None
            if sums.weighted is None:
                into = piece if same else self._memory(0, piece, sums.total)
                p = self._shifted(piece, into, inverse, shift, rows).exp_()
                self._add_row_sums(sums.total[rows], p, same)
                if keep and exponentials and not same:
                    piece.copy_(p)
            else:
                whole = same and shift is None
                y = piece if whole else self._memory(0, piece, sums.total)
                y = y if whole else self._shifted(piece, y, inverse, shift, rows)
                p = torch.exp(y, out=self._memory(1, piece, sums.total))
                self._add_row_sums(sums.total[rows], p, same)
                self._add_row_sums(sums.weighted[rows], p.mul_(y), same)
        return exponentials

    def to_gradient(self, logits: Tensor, inverse: Tensor | None, slopes: Slopes) -> None:
        same = logits.dtype == slopes.constant.dtype
        shift, constant, linear = slopes.logsumexp, slopes.constant, slopes.linear
        if not same and slopes.without_shift is not None:
            (constant, linear), shift = slopes.without_shift, None
        for rows, columns in _pieces(logits):
            piece = logits[rows, columns]
            into = piece if same else self._memory(0, piece, constant)
            y = self._shifted(piece, into, inverse, shift, rows)
            if linear is None:
                y.exp_().mul_(constant[rows])
            else:
                p = torch.exp(y, out=self._memory(1, piece, constant))
                torch.addcmul(constant[rows], linear[rows], y, out=y).mul_(p)
            if not same:
                piece.copy_(y)

    @staticmethod
    def _shifted(piece: Tensor, into: Tensor, inverse: Tensor | None, shift: Tensor | None, rows: slice) -> Tensor:
        """x / temperature - shift."""
        if piece.dtype == into.dtype:
            if shift is None:
                return piece
            return torch.sub(piece, shift[rows], out=into).clamp_(min=SMALLEST_EXPONENT[into.dtype])
        into.copy_(piece)
        if inverse is not None:
            into.mul_(inverse[rows])
        return into if shift is None else into.sub_(shift[rows])

    def _memory(self, number: int, piece: Tensor, like: Tensor) -> Tensor:
        """Memory laid out like the piece, without content; two kinds of it exist at a time."""
        key, size = (number, like.dtype), piece.numel()
        flat = self._scratch.get(key)
        if flat is None or flat.numel() < size:
            flat = self._scratch[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return flat.as_strided(piece.shape, piece.stride())

    def _add_row_sums(self, out: Tensor, values: Tensor, exactly: bool) -> None:
        """(R, 1) += sums of (R, C). A product with ones takes half the time; it adds one number after another.

        That goes unnoticed in bfloat16.
        """
        if exactly:
            out += values.sum(1, keepdim=True)
            return
        if self._ones is None or len(self._ones) < values.shape[1]:
            self._ones = values.new_ones(values.shape[1])
        out.view(-1).addmv_(values, self._ones[: values.shape[1]])


def _pieces(logits: Tensor) -> Iterator[tuple[slice, slice]]:
    """(rows, columns) pieces of a block, each without gaps in memory."""
    num_rows, num_columns = logits.shape
    elements = DEVICE_ELEMENTS
    if logits.device.type == "cpu":
        size = logits.element_size()
        elements = PART_BYTES * (NARROW_FACTOR if size < 4 else 1) // size
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

    def add_sums(self, logits: Tensor, inverse: Tensor | None, sums: Sums, keep: bool) -> bool:
        total, weighted = compiled(exponential_sums)(logits, inverse, sums.shift, sums.weighted is not None)
        sums.total += total
        if sums.weighted is not None:
            sums.weighted += weighted
        return False

    def to_gradient(self, logits: Tensor, inverse: Tensor | None, slopes: Slopes) -> None:
        compiled(gradient_in_place)(logits, inverse, slopes.logsumexp, slopes.constant, slopes.linear)


@cache
def compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True, fullgraph=True)


def exponential_sums(
    logits: Tensor, inverse: Tensor | None, shift: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum over columns of e^y and, if asked, of y e^y, for y = x / temperature - shift."""
    y = logits.to(shift.dtype) * (1.0 if inverse is None else inverse) - shift
    p = y.exp()
    return p.sum(1, keepdim=True), (y * p).sum(1, keepdim=True) if with_entropy else None


def gradient_in_place(
    logits: Tensor, inverse: Tensor | None, logsumexp: Tensor, constant: Tensor, linear: Tensor | None
) -> None:
    """logits := p (constant + linear log p)."""
    y = logits.to(constant.dtype) * (1.0 if inverse is None else inverse) - logsumexp
    logits.copy_(y.exp() * (constant if linear is None else constant + linear * y))
