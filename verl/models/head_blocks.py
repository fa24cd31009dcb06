"""Log-prob, entropy and their gradients from hidden states, one block of logits at a time.

Shapes: M rows go through the head, R of them in one block, V vocabulary, C columns of it in one block, D hidden.
A block is many rows by few columns, so that matmuls run at their full rate in a few megabytes. Logits are forgotten
after the sweep that sums their exponentials, and the gradient computes them again, unless there is room for them, or
for their exponentials: in the block itself when it holds whole rows, or in the memory of the weight's gradient before
that gradient exists.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from verl.models.head_kernels import Kernels, Slopes, Sums, statistics_dtype

NEEDS_NO_SHIFT = 32.0  # e^x of such logits neither overflows nor is lost
LARGEST_TOTAL = 1e20  # of exponentials; beyond, they are taken again from the largest logit
PRODUCT_COLUMNS = 1024  # of a product with the weight in a narrow type on a CPU, which copies its factors
PRODUCTS = 4  # that are added up in a narrow type before they go to the sum over all


@dataclass(frozen=True)
class Blocks:
    """Rows and columns of the logits that exist at one time; the first block may have fewer rows than the others."""

    rows: int
    columns: int
    first_rows: int | None = None

    def row_slices(self, num_rows: int) -> Iterator[slice]:
        """At least one slice, an empty one for no rows, so that a per-token loss can always name its metrics."""
        first = min(num_rows, self.rows if self.first_rows is None else self.first_rows)
        return chain([slice(0, first)], _slices(first, num_rows, self.rows))

    def column_slices(self, vocab_size: int) -> Iterator[slice]:
        return _slices(0, vocab_size, self.columns)


def _slices(begin: int, end: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, end)) for start in range(begin, end, step))


@dataclass(frozen=True)
class Statistics:
    """What a sweep over the vocabulary leaves per row: (R,) each, in nats; entropy None unless asked for."""

    logsumexp: Tensor
    logprobs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class Rows:
    """A block of rows: scaled hidden states (R, D), the token each predicts (R,), 1 / temperature (R, 1) or None."""

    scaled_RD: Tensor
    targets: Tensor
    inverse_temperature: Tensor | None
    source: Tensor
    by_target: Tensor  # (R,) rows in the order of their targets
    sorted_targets: Tensor
    sorted_list: list[int]

    def targets_within(self, columns: slice) -> tuple[Tensor, Tensor]:
        """The rows whose target is inside these columns, and where in them each target is."""
        first, last = (bisect_left(self.sorted_list, column) for column in (columns.start, columns.stop))
        return self.by_target[first:last], self.sorted_targets[first:last] - columns.start


@dataclass(frozen=True)
class Kept:
    """Logits of all columns that a sweep has left, or their exponentials."""

    rows: Rows
    spare_VD: Tensor | None  # memory they are in; None: the buffer of the block
    total: Tensor | None  # (R, 1) sums of the exponentials; None for logits


@dataclass
class Gradients:
    """Sums over the blocks so far; None where the input needs no gradient. `hidden` is (T, D), rows not used stay 0."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    empty: bool = True  # `weight` holds nothing yet: the first block writes, later ones add

    @property
    def wanted(self) -> bool:
        return self.hidden is not None or self.weight is not None or self.bias is not None

    def finish(self, bias_dtype: torch.dtype | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(hidden, weight, bias) gradients; zeros when no row was added."""
        if self.empty and self.weight is not None:
            self.weight.zero_()
        return self.hidden, self.weight, None if self.bias is None else self.bias.to(bias_dtype)


class Head:
    """logits = (hidden @ weight.T + bias) / temperature, of which one block exists at a time, in the weight's dtype.

    Statistics are float32 (float64 for float64 inputs) whatever the dtype of the matmul. The temperature divides the
    hidden states in full precision; below it the logits, since a scaled row would be rounded twice.
    """

    def __init__(self, hidden_TD: Tensor, weight_VD: Tensor, bias: Tensor | None, blocks: Blocks, kernels: Kernels):
        self.hidden, self.weight, self.bias = hidden_TD, weight_VD, bias
        self.blocks, self.kernels = blocks, kernels
        self.vocab_size = weight_VD.shape[0]
        self.dtype = statistics_dtype(weight_VD)
        self.low_precision = self.dtype != weight_VD.dtype
        self._buffers: dict[str, Tensor] = {}
        self._kept: Kept | None = None

    def rows(self, source: Tensor, targets: Tensor, temperature: Tensor | None) -> Rows:
        """The hidden states at `source`, ready for the matmul; they hold until the next call."""
        scaled = self._buffer("rows", len(source), self.hidden.shape[1], self.hidden.dtype)
        torch.index_select(self.hidden, 0, source, out=scaled)
        inverse = None if temperature is None else temperature.to(self.dtype).reciprocal().unsqueeze(1)
        if inverse is not None and not self.low_precision:
            scaled.mul_(inverse)
        ordered, by_target = targets.sort(stable=True)
        return Rows(scaled, targets, inverse, source, by_target, ordered, ordered.tolist())

    def statistics(self, rows: Rows, with_entropy: bool, spare_VD: Tensor | None = None) -> Statistics:
        """Sums over the vocabulary of e^(x-s) and (x-s) e^(x-s), s being the largest logit of the first block.

        Where they are too large, sums are taken again with s the largest of all. `spare_VD` is memory without content
        of the weight's shape and dtype: what `add_gradients` needs stays there, if R <= D, until somebody writes to it.
        """
        self._kept = None
        sums, exponentials = self._sums(rows, with_entropy, None, spare_VD)
        if not bool((sums.total < LARGEST_TOTAL).all()):
            sums, exponentials = self._sums(rows, with_entropy, self._largest(rows), spare_VD)
        if spare_VD is not None or self.blocks.columns >= self.vocab_size:
            self._kept = Kept(rows, spare_VD, sums.total if exponentials else None)
        log_total = sums.total.log()
        entropy = None if sums.weighted is None else (log_total - sums.weighted / sums.total).squeeze(1)
        logsumexp = sums.shift + log_total
        return Statistics(logsumexp.squeeze(1), (sums.target_logits - logsumexp).squeeze(1), entropy)

    def _sums(self, rows: Rows, with_entropy: bool, shift: Tensor | None, spare_VD: Tensor | None) -> tuple[Sums, bool]:
        """The sums, and whether blocks hold exponentials now."""
        sums, inverse, exponentials = None, self._inverse(rows), False
        keep = spare_VD is not None or self.blocks.columns >= self.vocab_size
        for columns in self.blocks.column_slices(self.vocab_size):
            logits = self._logits(rows, columns, spare_VD)
            if sums is None:
                shift = self._largest_of(logits, inverse) if shift is None else shift
                small = bool((shift.abs() < NEEDS_NO_SHIFT).all())
                sums = Sums.zeros(torch.zeros_like(shift) if small else shift, with_entropy, not small)
            where, index = rows.targets_within(columns)
            if len(where):
                target_logits = logits[where, index].to(self.dtype).unsqueeze(1)
                sums.target_logits[where] = target_logits if inverse is None else target_logits * inverse[where]
            exponentials = self.kernels.add_sums(logits, inverse, sums, keep)
        assert sums is not None, "a vocabulary has tokens"
        return sums, exponentials

    def _largest(self, rows: Rows) -> Tensor:
        parts = (self._logits(rows, columns) for columns in self.blocks.column_slices(self.vocab_size))
        return torch.cat([self._largest_of(logits, self._inverse(rows)) for logits in parts], 1).amax(1, keepdim=True)

    def _largest_of(self, logits: Tensor, inverse: Tensor | None) -> Tensor:
        largest = logits.amax(1, keepdim=True).to(self.dtype)
        return largest if inverse is None else largest.mul_(inverse)

    def _inverse(self, rows: Rows) -> Tensor | None:
        """1 / temperature where the logits of a block are not divided yet."""
        return rows.inverse_temperature if self.low_precision else None

    def add_gradients(
        self,
        rows: Rows,
        stats: Statistics,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        out: Gradients,
    ) -> None:
        """Add the gradient of these rows, given d loss / d logprob and d loss / d entropy (R,).

        Computes the logits again unless `statistics` of the same rows has just left all of them.
        """
        kept, self._kept = self._kept if self._kept and self._kept.rows is rows else None, None
        inverse = self._inverse(rows)
        slopes = Slopes.of(stats.logsumexp, stats.entropy, grad_logprobs, grad_entropy, inverse)
        at_target, factor = slopes.at_target(stats.logprobs, stats.entropy), None
        grad_rows, scaled = None, rows.scaled_RD
        if kept and kept.total is not None:  # the exponentials need a factor per row: rows are fewer than logits
            factor = slopes.constant / kept.total
            at_target = stats.logprobs.expm1().unsqueeze(1) * kept.total
            scaled.mul_(factor)
        if out.hidden is not None:
            grad_rows = self._buffer("grad_rows", *scaled.shape, self.dtype).zero_()
        blocks = list(self.blocks.column_slices(self.vocab_size))
        for columns in reversed(blocks) if kept else blocks:
            block = self._place(rows, columns, kept.spare_VD) if kept else self._logits(rows, columns)
            if kept is None or kept.total is None:
                self.kernels.to_gradient(block, inverse, slopes)
            where, index = rows.targets_within(columns)
            if len(where):
                block[where, index] = at_target[where].squeeze(1).to(block.dtype)
            if out.bias is not None:
                self._add_to_bias(out.bias[columns], block, rows, factor)
            if grad_rows is not None:
                self._add_to_rows(grad_rows, block, columns)
            if out.weight is not None:
                into = out.weight[columns]
                torch.addmm(into, block.T, scaled, beta=0 if out.empty else 1, out=into)
        out.empty = False
        if grad_rows is not None:
            if rows.inverse_temperature is not None and not self.low_precision:
                grad_rows.mul_(rows.inverse_temperature)
            if factor is not None:
                grad_rows.mul_(factor)
            out.hidden.index_copy_(0, rows.source, grad_rows.to(out.hidden.dtype))

    def _add_to_rows(self, grad_rows: Tensor, block: Tensor, columns: slice) -> None:
        """grad_rows += block @ weight. Of narrow types a few products are added up before they go to the sum."""
        if not self.low_precision:
            grad_rows.addmm_(block, self.weight[columns])
            return
        product = self._buffer("product", *grad_rows.shape, self.weight.dtype)
        width = PRODUCT_COLUMNS if block.device.type == "cpu" else block.shape[1]
        for number, part in enumerate(_slices(0, block.shape[1], width)):
            weight_CD = self.weight[columns][part]
            torch.addmm(product, block[:, part], weight_CD, beta=1 if number % PRODUCTS else 0, out=product)
            if number % PRODUCTS == PRODUCTS - 1 or part.stop == block.shape[1]:
                grad_rows.add_(product)

    def _add_to_bias(self, grad_bias: Tensor, block: Tensor, rows: Rows, factor: Tensor | None) -> None:
        per_row = torch.ones_like(rows.targets, dtype=self.dtype) if factor is None else factor.squeeze(1)
        if rows.inverse_temperature is not None and not self.low_precision:
            per_row = per_row * rows.inverse_temperature.squeeze(1)
        grad_bias.addmv_(block.T.to(self.dtype), per_row)

    def _logits(self, rows: Rows, columns: slice, spare_VD: Tensor | None = None) -> Tensor:
        """(R, C) in the weight's dtype, not yet divided by the temperature when that is a narrow one."""
        logits = self._place(rows, columns, spare_VD)
        torch.mm(rows.scaled_RD, self.weight[columns].T, out=logits)
        if self.bias is not None:
            bias = self.bias[columns].to(logits.dtype)
            scaled = self.low_precision or rows.inverse_temperature is None
            logits.add_(bias if scaled else rows.inverse_temperature * bias)
        return logits

    def _place(self, rows: Rows, columns: slice, spare_VD: Tensor | None) -> Tensor:
        """(R, C) memory of a block: the buffer that all blocks share, or spare memory.

        That is the first R * C elements of the rows of the block before, so that what is kept of a block is still there
        when its rows are written to and the last block comes first. The first block stays in the buffer. On a CPU the
        numbers of a column lie side by side, which makes matmuls faster, most of all in bfloat16.
        """
        num_rows, num_columns = len(rows.targets), columns.stop - columns.start
        if spare_VD is None or columns.start == 0:
            memory = self._buffer("logits", num_columns, num_rows, self.weight.dtype)
        else:
            before = spare_VD[columns.start - self.blocks.columns : columns.start]
            memory = before.view(-1)[: num_rows * num_columns].view(num_columns, num_rows)
        return memory.T if memory.device.type == "cpu" else memory.view(num_rows, num_columns)

    def _buffer(self, name: str, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
        """A (num_rows, num_columns) tensor without content that reuses the memory of the last one of this name."""
        size = num_rows * num_columns
        flat = self._buffers.get(name)
        if flat is None or flat.numel() < size:
            flat = self._buffers[name] = torch.empty(size, dtype=dtype, device=self.hidden.device)
        return flat[:size].view(num_rows, num_columns)

    def new_gradients(self, hidden: bool, weight: bool, bias: bool) -> Gradients:
        """Zeros even where the first block overwrites them: new memory costs a matmul twice as much to touch."""
        return Gradients(
            torch.zeros_like(self.hidden) if hidden else None,
            torch.zeros_like(self.weight) if weight else None,
            torch.zeros(self.vocab_size, dtype=self.dtype, device=self.hidden.device) if bias else None,
        )
