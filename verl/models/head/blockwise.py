"""Log-prob, entropy and their gradients from hidden states, one block of logits at a time.

Shapes: M rows go through the head, R of them in one block, V vocabulary, C columns of it in one block, D hidden.
A block has many rows and few columns, so that matmuls run at their full rate in a few megabytes. Logits are dropped
after the pass that sums their exponentials, and the gradient recomputes them. Where a block has whole rows, they or
their exponentials stay in the buffer, and the gradient needs no recomputation.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from verl.models.head.block_sizes import BlockSizes, slices
from verl.models.head.elementwise import (
    NEEDS_NO_SHIFT,
    Kernels,
    LogitGradientCoefficients,
    SoftmaxAccumulator,
    statistics_dtype,
)

MAX_SUM_EXP = 1e20  # a larger sum of exponentials is computed again with the largest logit as shift
PRODUCT_COLUMNS = 1024  # of a low-precision product with the weight on a CPU, which copies its factors
PRODUCTS_PER_SUM = 4  # low-precision products that are added up before they are added to the full sum


@dataclass(frozen=True)
class SoftmaxStatistics:
    """Results of a pass over the vocabulary per row: (R,) each, in nats; entropy is None unless requested."""

    logsumexp: Tensor
    logprobs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class RowBlock:
    """A block of rows: scaled hidden states (R, D), the token that each predicts, 1 / temperature (R, 1) or None."""

    source: Tensor  # (R,) hidden state index of each row
    scaled_RD: Tensor
    inverse_temperature: Tensor | None
    by_target: Tensor  # (R,) row indices sorted by target
    sorted_targets: Tensor
    sorted_list: list[int]

    def targets_within(self, columns: slice) -> tuple[Tensor, Tensor]:
        """The rows whose target is inside these columns, and the index of each target within the columns."""
        first, last = (bisect_left(self.sorted_list, column) for column in (columns.start, columns.stop))
        return self.by_target[first:last], self.sorted_targets[first:last] - columns.start


class BlockReader(Protocol):
    """Reads the logits of a row block, one block of columns after the other."""

    def start(self, row_block: RowBlock, dtype: torch.dtype) -> None:
        """The columns begin again from the first one."""

    def read(self, logits: Tensor, inverse: Tensor | None, columns: slice) -> None:
        """Logits (R, C), to be multiplied by `inverse` (R, 1) unless that is None."""


@dataclass(frozen=True)
class IdGradients:
    """Tokens `ids` (R, k), distinct in a row, their `logprobs`, and the gradient of the loss by each of these."""

    ids: Tensor
    logprobs: Tensor
    grad: Tensor


def places_within(ids: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """(row, place in the row) of those `ids` (R, k) that are inside these columns."""
    rows, places = ((ids >= columns.start) & (ids < columns.stop)).nonzero(as_tuple=True)
    return rows, places


@dataclass(frozen=True)
class StoredLogits:
    """Logits of whole rows that a pass has stored or, with `sum_exp` (R, 1), their exponentials and these sums."""

    row_block: RowBlock
    sum_exp: Tensor | None


class _VocabularySums(NamedTuple):
    """The sums of the rows of a block, and whether the buffer has exponentials instead of logits afterwards."""

    sums: SoftmaxAccumulator
    buffer_has_exponentials: bool


@dataclass(frozen=True)
class LogitsToGradient:
    """How the logits of a row block become their gradient: what the block contains times `factor` (R, 1), if any."""

    row_block: RowBlock
    coefficients: LogitGradientCoefficients
    target_gradient: Tensor
    is_stored: bool = False
    factor: Tensor | None = None
    at_ids: IdGradients | None = None  # its `grad` is that of the logits


@dataclass
class Gradients:
    """Sums over the blocks so far; None where the input needs no gradient. `hidden` is (T, D), unused rows stay 0."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    empty: bool = True  # nothing was added to `weight` yet: the first block overwrites it, later ones add

    @property
    def wanted(self) -> bool:
        return self.hidden is not None or self.weight is not None or self.bias is not None

    def finish(self, bias_dtype: torch.dtype | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(hidden, weight, bias) gradients; zeros when no row was added."""
        if self.empty and self.weight is not None:
            self.weight.zero_()
        return self.hidden, self.weight, None if self.bias is None else self.bias.to(bias_dtype)


class BlockwiseHead:
    """logits = (hidden @ weight.T + bias) / temperature, of which one block exists at a time, in the weight's dtype.

    Statistics are float32 (float64 for float64 inputs) whatever the dtype of the matmul. The temperature divides the
    hidden states in full precision and the logits in low precision, where scaled rows would be rounded twice.
    """

    def __init__(self, hidden_TD: Tensor, weight_VD: Tensor, bias: Tensor | None, blocks: BlockSizes, kernels: Kernels):
        self.hidden, self.weight, self.bias = hidden_TD, weight_VD, bias
        self.blocks, self.kernels = blocks, kernels
        self.vocab_size = weight_VD.shape[0]
        self.dtype = statistics_dtype(weight_VD)
        self.low_precision = self.dtype != weight_VD.dtype
        self._buffers: dict[str, Tensor] = {}
        self._stored: StoredLogits | None = None

    def row_block(self, source: Tensor, targets: Tensor, temperature: Tensor | None, part: slice) -> RowBlock:
        """The hidden states at `part` of `source` (M,), ready for the matmul; valid until the next call."""
        inverse = None if temperature is None else temperature[part].to(self.dtype).reciprocal().unsqueeze(1)
        scaled = self._buffer("rows", part.stop - part.start, self.hidden.shape[1], self.hidden.dtype)
        torch.index_select(self.hidden, 0, source[part], out=scaled)
        if inverse is not None and not self.low_precision:
            scaled.mul_(inverse)
        ordered, by_target = targets[part].sort(stable=True)
        return RowBlock(source[part], scaled, inverse, by_target, ordered, ordered.tolist())

    def statistics(
        self, row_block: RowBlock, with_entropy: bool, reader: BlockReader | None = None
    ) -> SoftmaxStatistics:
        """Statistics of each row, from sums over the vocabulary of e^(x-s) and (x-s) e^(x-s).

        s is the largest logit of the first block of columns. Sums that are too large are computed again with s the
        largest logit of all. The `reader` sees every logit. A block of whole rows stays stored for `add_gradients`.
        """
        sums, exponentials = self._accumulate(row_block, with_entropy, None, reader)
        if not bool((sums.sum_exp < MAX_SUM_EXP).all()):
            sums, exponentials = self._accumulate(row_block, with_entropy, self._largest_logit(row_block), reader)
        self._stored = StoredLogits(row_block, sums.sum_exp if exponentials else None) if self._stores_logits else None
        log_total, entropy = sums.sum_exp.log(), None
        if sums.sum_shifted_exp is not None:
            entropy = (log_total - sums.sum_shifted_exp / sums.sum_exp).squeeze(1)
        logsumexp = sums.shift + log_total
        return SoftmaxStatistics(logsumexp.squeeze(1), (sums.target_logits - logsumexp).squeeze(1), entropy)

    @property
    def _stores_logits(self) -> bool:
        return self.blocks.columns >= self.vocab_size

    def _accumulate(
        self, row_block: RowBlock, with_entropy: bool, shift: Tensor | None, reader: BlockReader | None
    ) -> _VocabularySums:
        inverse, sums, exponentials = self._inverse(row_block), None, False
        if reader is not None:
            reader.start(row_block, self.dtype)
        for columns in self.blocks.column_slices(self.vocab_size):
            logits = self._logits(row_block, columns)
            if sums is None:
                first_shift = self._block_max(logits, inverse) if shift is None else shift
                small = bool((first_shift.abs() < NEEDS_NO_SHIFT).all())
                first_shift = torch.zeros_like(first_shift) if small else first_shift
                sums = SoftmaxAccumulator.zeros(first_shift, with_entropy, not small)
            rows, target_columns = row_block.targets_within(columns)
            if len(rows):
                target_logits = logits[rows, target_columns].to(self.dtype).unsqueeze(1)
                sums.target_logits[rows] = target_logits if inverse is None else target_logits * inverse[rows]
            if reader is not None:
                reader.read(logits, inverse, columns)
            exponentials = self.kernels.accumulate(logits, inverse, sums, self._stores_logits)
        assert sums is not None, "the vocabulary is empty"
        return _VocabularySums(sums, exponentials)

    def _largest_logit(self, row_block: RowBlock) -> Tensor:
        parts = (self._logits(row_block, columns) for columns in self.blocks.column_slices(self.vocab_size))
        largest = torch.cat([self._block_max(logits, self._inverse(row_block)) for logits in parts], 1)
        return largest.amax(1, keepdim=True)

    def _block_max(self, logits: Tensor, inverse: Tensor | None) -> Tensor:
        largest = logits.amax(1, keepdim=True).to(self.dtype)
        return largest if inverse is None else largest.mul_(inverse)

    def _inverse(self, row_block: RowBlock) -> Tensor | None:
        """1 / temperature if the logits of a block are not divided by it yet, else None."""
        return row_block.inverse_temperature if self.low_precision else None

    def add_gradients(
        self,
        row_block: RowBlock,
        stats: SoftmaxStatistics,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        out: Gradients,
        at_ids: IdGradients | None = None,
    ) -> None:
        """Add the gradient of these rows, given d loss / d logprob and d loss / d entropy (R,), and that `at_ids`.

        Recomputes the logits unless `statistics` of the same rows has just stored them.
        """
        stored, self._stored = self._stored if self._stored and self._stored.row_block is row_block else None, None
        if at_ids is not None:
            assert stored is None, "a gradient at given ids needs a head of its own: stored logits may be exponentials"
            conversion = self._conversion_at_ids(row_block, stats, grad_logprobs, grad_entropy, at_ids)
        else:
            conversion = self._conversion(row_block, stats, grad_logprobs, grad_entropy, stored)
        grad_rows = None
        if out.hidden is not None:
            grad_rows = self._buffer("grad_rows", *row_block.scaled_RD.shape, self.dtype).zero_()
        for columns in self.blocks.column_slices(self.vocab_size):
            block = self._gradient(conversion, columns)
            if out.bias is not None:
                self._add_to_bias(out.bias[columns], block, conversion)
            if grad_rows is not None:
                self._add_to_rows(grad_rows, block, columns)
            if out.weight is not None:
                into = out.weight[columns]
                torch.addmm(into, block.T, row_block.scaled_RD, beta=0 if out.empty else 1, out=into)
        out.empty = False
        if grad_rows is not None:
            if conversion.factor is not None:
                grad_rows.mul_(conversion.factor)
            if row_block.inverse_temperature is not None and not self.low_precision:
                grad_rows.mul_(row_block.inverse_temperature)
            out.hidden.index_copy_(0, row_block.source, grad_rows.to(out.hidden.dtype))

    def _conversion(
        self,
        row_block: RowBlock,
        stats: SoftmaxStatistics,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        stored: StoredLogits | None,
    ) -> LogitsToGradient:
        """Stored exponentials need a factor per row; it scales the row block's hidden states in place."""
        inverse = self._inverse(row_block)
        coefficients = LogitGradientCoefficients.of(
            stats.logsumexp, stats.entropy, grad_logprobs, grad_entropy, inverse
        )
        if stored is None or stored.sum_exp is None:
            target_gradient = coefficients.target_gradient(stats.logprobs, stats.entropy)
            return LogitsToGradient(row_block, coefficients, target_gradient, stored is not None)
        factor = coefficients.constant / stored.sum_exp
        row_block.scaled_RD.mul_(factor)
        target_gradient = stats.logprobs.expm1().unsqueeze(1) * stored.sum_exp
        return LogitsToGradient(row_block, coefficients, target_gradient, True, factor)

    def _conversion_at_ids(
        self,
        row_block: RowBlock,
        stats: SoftmaxStatistics,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        at_ids: IdGradients,
    ) -> LogitsToGradient:
        """A logit that is the target, or at an id, has the gradient of its own log-prob besides that of the others."""
        inverse = self._inverse(row_block)
        own = torch.zeros_like(stats.logsumexp) if grad_logprobs is None else grad_logprobs
        coefficients = LogitGradientCoefficients.of(
            stats.logsumexp, stats.entropy, own + at_ids.grad.sum(1), grad_entropy, inverse
        )
        scale = 1.0 if inverse is None else inverse
        targets = torch.empty_like(row_block.by_target)
        targets[row_block.by_target] = row_block.sorted_targets
        is_target = at_ids.ids == targets.unsqueeze(1)
        grad = coefficients.of_logits(at_ids.logprobs) + scale * (at_ids.grad + is_target * own.unsqueeze(1))
        target_gradient = coefficients.of_logits(stats.logprobs.unsqueeze(1)) + scale * own.unsqueeze(1)
        return LogitsToGradient(row_block, coefficients, target_gradient, at_ids=replace(at_ids, grad=grad))

    def _gradient(self, conversion: LogitsToGradient, columns: slice) -> Tensor:
        """(R, C): the gradient of these logits, without the factor of the conversion."""
        row_block = conversion.row_block
        block = self._block_memory(row_block, columns) if conversion.is_stored else self._logits(row_block, columns)
        if conversion.factor is None:
            self.kernels.to_gradient(block, self._inverse(row_block), conversion.coefficients)
        target_rows, target_columns = row_block.targets_within(columns)
        if len(target_rows):
            block[target_rows, target_columns] = conversion.target_gradient[target_rows].squeeze(1).to(block.dtype)
        if conversion.at_ids is not None:
            at = places_within(conversion.at_ids.ids, columns)
            block[at[0], conversion.at_ids.ids[at] - columns.start] = conversion.at_ids.grad[at].to(block.dtype)
        return block

    def _add_to_rows(self, grad_rows: Tensor, block: Tensor, columns: slice) -> None:
        """grad_rows += block @ weight. In low precision a few products are added up first."""
        if not self.low_precision:
            grad_rows.addmm_(block, self.weight[columns])
            return
        product = self._buffer("product", *grad_rows.shape, self.weight.dtype)
        width = PRODUCT_COLUMNS if block.device.type == "cpu" else block.shape[1]
        for number, part in enumerate(slices(0, block.shape[1], width)):
            weight_CD = self.weight[columns][part]
            torch.addmm(product, block[:, part], weight_CD, beta=1 if number % PRODUCTS_PER_SUM else 0, out=product)
            if number % PRODUCTS_PER_SUM == PRODUCTS_PER_SUM - 1 or part.stop == block.shape[1]:
                grad_rows.add_(product)

    def _add_to_bias(self, grad_bias: Tensor, block: Tensor, conversion: LogitsToGradient) -> None:
        row_block = conversion.row_block
        per_row = torch.ones(block.shape[0], dtype=self.dtype, device=block.device)
        if conversion.factor is not None:
            per_row = conversion.factor.squeeze(1)
        if row_block.inverse_temperature is not None and not self.low_precision:
            per_row = per_row * row_block.inverse_temperature.squeeze(1)
        grad_bias.addmv_(block.T.to(self.dtype), per_row)

    def _logits(self, row_block: RowBlock, columns: slice) -> Tensor:
        """(R, C) in the weight's dtype; in low precision not yet divided by the temperature."""
        logits = self._block_memory(row_block, columns)
        torch.mm(row_block.scaled_RD, self.weight[columns].T, out=logits)
        if self.bias is not None:
            bias = self.bias[columns].to(logits.dtype)
            scaled = self.low_precision or row_block.inverse_temperature is None
            logits.add_(bias if scaled else row_block.inverse_temperature * bias)
        return logits

    def _block_memory(self, row_block: RowBlock, columns: slice) -> Tensor:
        """(R, C): the buffer that all blocks use in turn.

        On a CPU a block is column-major, which makes matmuls faster, most of all in bfloat16.
        """
        num_rows, num_columns = len(row_block.scaled_RD), columns.stop - columns.start
        memory = self._buffer("logits", num_columns, num_rows, self.weight.dtype)
        return memory.T if memory.device.type == "cpu" else memory.view(num_rows, num_columns)

    def _buffer(self, name: str, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised (num_rows, num_columns) tensor that reuses the memory of the last one of this name."""
        size = num_rows * num_columns
        flat = self._buffers.get(name)
        if flat is None or flat.numel() < size:
            flat = self._buffers[name] = torch.empty(size, dtype=dtype, device=self.hidden.device)
        return flat[:size].view(num_rows, num_columns)

    def new_gradients(self, hidden: bool, weight: bool, bias: bool) -> Gradients:
        """Zeros even where the first block overwrites them: a matmul takes twice as long to touch new memory."""
        return Gradients(
            torch.zeros_like(self.hidden) if hidden else None,
            torch.zeros_like(self.weight) if weight else None,
            torch.zeros(self.vocab_size, dtype=self.dtype, device=self.hidden.device) if bias else None,
        )
