"""Log-prob, entropy and their gradients from hidden states, one block of logits at a time.

Shapes: M rows go through the head, S of them in one pass over the vocabulary, R in one block, V vocabulary, C columns
of it in one block, D hidden. A block has many rows and few columns, so that matmuls run at their full rate in a few
megabytes. Logits are dropped after the pass that sums their exponentials, and the gradient recomputes them, unless
there is memory to store them or their exponentials: the block buffer if it has whole rows, or spare memory, which is
the memory of the weight's gradient before that gradient exists. Rows with and without stored logits form one group, so
that the weight and its gradient pass through memory once for both.
"""

from bisect import bisect_left
from dataclasses import dataclass

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
    """Results of a pass over the vocabulary per row: (S,) each, in nats; entropy is None unless requested."""

    logsumexp: Tensor
    logprobs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class RowBlock:
    """A block of rows: scaled hidden states (R, D), the token that each predicts, 1 / temperature (R, 1) or None."""

    in_group: slice  # of the rows of the group
    scaled_RD: Tensor
    inverse_temperature: Tensor | None
    store_logits: bool  # for the gradient
    spare_VD: Tensor | None  # spare memory to store logits in; None: they are in the block buffer
    by_target: Tensor  # (R,) row indices sorted by target
    sorted_targets: Tensor
    sorted_list: list[int]

    def targets_within(self, columns: slice) -> tuple[Tensor, Tensor]:
        """The rows whose target is inside these columns, and the index of each target within the columns."""
        first, last = (bisect_left(self.sorted_list, column) for column in (columns.start, columns.stop))
        return self.by_target[first:last], self.sorted_targets[first:last] - columns.start


@dataclass(frozen=True)
class RowGroup:
    """Rows of one pass over the vocabulary: their hidden state indices (S,), scaled states (S, D) and row blocks."""

    part: slice  # of the M rows
    source: Tensor
    scaled_SD: Tensor
    inverse_temperature: Tensor | None
    blocks: list[RowBlock]

    @property
    def has_spare(self) -> bool:
        return self.blocks[0].spare_VD is not None


@dataclass(frozen=True)
class StoredLogits:
    """Logits that a pass has stored or, with `sum_exp` (S, 1), their exponentials, which have these sums.

    In spare memory the first block of columns is not stored.
    """

    group: RowGroup
    sum_exp: Tensor | None


@dataclass(frozen=True)
class LogitsToGradient:
    """How the logits of a row block become their gradient: what the block contains times `factor` (R, 1), if any."""

    row_block: RowBlock
    coefficients: LogitGradientCoefficients
    target_gradient: Tensor
    is_stored: bool = False
    factor: Tensor | None = None


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

    def row_group(
        self,
        source: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        parts: list[slice],
        spare_VD: Tensor | None = None,
    ) -> RowGroup:
        """The hidden states at the `parts` of `source` (M,), ready for the matmul; valid until the next call.

        The parts are consecutive, one block of rows each. `spare_VD` is uninitialised memory of the weight's shape and
        dtype: it stores what `add_gradients` needs of the first D rows, until it is written to.
        """
        group_slice = slice(parts[0].start, parts[-1].stop)
        inverse = None if temperature is None else temperature[group_slice].to(self.dtype).reciprocal().unsqueeze(1)
        scaled = self._buffer("rows", group_slice.stop - group_slice.start, self.hidden.shape[1], self.hidden.dtype)
        whole_rows = len(parts) == 1 and self.blocks.columns >= self.vocab_size
        blocks = []
        for part in parts:
            in_group = slice(part.start - group_slice.start, part.stop - group_slice.start)
            ordered, by_target = targets[part].sort(stable=True)
            spare = spare_VD if in_group.stop <= self.hidden.shape[1] else None
            inverse_block = None if inverse is None else inverse[in_group]
            store = whole_rows or spare is not None
            blocks.append(
                RowBlock(in_group, scaled[in_group], inverse_block, store, spare, by_target, ordered, ordered.tolist())
            )
        group = RowGroup(group_slice, source[group_slice], scaled, inverse, blocks)
        self._gather(group)
        return group

    def _gather(self, group: RowGroup) -> None:
        torch.index_select(self.hidden, 0, group.source, out=group.scaled_SD)
        if group.inverse_temperature is not None and not self.low_precision:
            group.scaled_SD.mul_(group.inverse_temperature)

    def statistics(self, group: RowGroup, with_entropy: bool) -> SoftmaxStatistics:
        """Statistics of each row, from sums over the vocabulary of e^(x-s) and (x-s) e^(x-s).

        s is the largest logit of the first block of columns. Sums that are too large are computed again with s the
        largest logit of all.
        """
        self._stored = None
        accumulators, exponentials = self._accumulate_blocks(group.blocks, with_entropy, None)
        for number, (row_block, accumulator) in enumerate(zip(group.blocks, accumulators, strict=True)):
            if not bool((accumulator.sum_exp < MAX_SUM_EXP).all()):
                accumulators[number] = self._accumulate_blocks(
                    [row_block], with_entropy, self._largest_logit(row_block)
                )[0][0]
        shift, sum_exp, target_logits = (
            torch.cat([getattr(accumulator, name) for accumulator in accumulators])
            for name in ("shift", "sum_exp", "target_logits")
        )
        if any(row_block.store_logits for row_block in group.blocks):
            self._stored = StoredLogits(group, sum_exp if exponentials else None)
        log_total, entropy = sum_exp.log(), None
        if with_entropy:
            sum_shifted_exp = torch.cat(
                [accumulator.sum_shifted_exp for accumulator in accumulators if accumulator.sum_shifted_exp is not None]
            )
            entropy = (log_total - sum_shifted_exp / sum_exp).squeeze(1)
        logsumexp = shift + log_total
        return SoftmaxStatistics(logsumexp.squeeze(1), (target_logits - logsumexp).squeeze(1), entropy)

    def _accumulate_blocks(
        self, blocks: list[RowBlock], with_entropy: bool, shift: Tensor | None
    ) -> tuple[list[SoftmaxAccumulator], bool]:
        """The sums of each block of rows, and whether the stored values are exponentials."""
        accumulators: list[SoftmaxAccumulator] = []
        exponentials = False
        for columns in self.blocks.column_slices(self.vocab_size):
            for number, row_block in enumerate(blocks):
                logits, inverse = self._logits(row_block, columns), self._inverse(row_block)
                if columns.start == 0:
                    first_shift = self._block_max(logits, inverse) if shift is None else shift
                    small = bool((first_shift.abs() < NEEDS_NO_SHIFT).all())
                    accumulators.append(
                        SoftmaxAccumulator.zeros(
                            torch.zeros_like(first_shift) if small else first_shift, with_entropy, not small
                        )
                    )
                accumulator = accumulators[number]
                target_rows, target_columns = row_block.targets_within(columns)
                if len(target_rows):
                    target_logits = logits[target_rows, target_columns].to(self.dtype).unsqueeze(1)
                    accumulator.target_logits[target_rows] = (
                        target_logits if inverse is None else target_logits * inverse[target_rows]
                    )
                exponentials = self.kernels.accumulate(logits, inverse, accumulator, row_block.store_logits)
        return accumulators, exponentials

    def _largest_logit(self, row_block: RowBlock) -> Tensor:
        parts = (self._logits(row_block, columns) for columns in self.blocks.column_slices(self.vocab_size))
        return torch.cat([self._block_max(logits, self._inverse(row_block)) for logits in parts], 1).amax(
            1, keepdim=True
        )

    def _block_max(self, logits: Tensor, inverse: Tensor | None) -> Tensor:
        largest = logits.amax(1, keepdim=True).to(self.dtype)
        return largest if inverse is None else largest.mul_(inverse)

    def _inverse(self, row_block: RowBlock) -> Tensor | None:
        """1 / temperature if the logits of a block are not divided by it yet, else None."""
        return row_block.inverse_temperature if self.low_precision else None

    def add_gradients(
        self,
        group: RowGroup,
        stats: SoftmaxStatistics,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        out: Gradients,
    ) -> None:
        """Add the gradient of these rows, given d loss / d logprob and d loss / d entropy (S,).

        Recomputes the logits unless `statistics` of the same group has just stored them.
        """
        stored, self._stored = self._stored if self._stored and self._stored.group is group else None, None
        conversions = self._conversions(group, stats, grad_logprobs, grad_entropy, stored)
        grad_rows = None
        if out.hidden is not None:
            grad_rows = self._buffer("grad_rows", *group.scaled_SD.shape, self.dtype).zero_()
        # the last block comes first: its gradient overwrites no stored logits that are still needed
        for columns in reversed(list(self.blocks.column_slices(self.vocab_size))):
            # the first block of columns is not stored: recompute it from the hidden states
            if columns.start == 0 and stored and group.has_spare:
                self._apply_factors(conversions, grad_rows)
                self._gather(group)
                conversions = self._conversions(group, stats, grad_logprobs, grad_entropy, None)
            for number, conversion in enumerate(conversions):
                block = self._gradient(conversion, columns)
                in_group = conversion.row_block.in_group
                if out.bias is not None:
                    self._add_to_bias(out.bias[columns], block, conversion)
                if grad_rows is not None:
                    self._add_to_rows(grad_rows[in_group], block, columns)
                if out.weight is not None:
                    into, beta = out.weight[columns], 0 if out.empty and number == 0 else 1
                    torch.addmm(into, block.T, conversion.row_block.scaled_RD, beta=beta, out=into)
        out.empty = False
        if grad_rows is not None:
            self._apply_factors(conversions, grad_rows)
            if group.inverse_temperature is not None and not self.low_precision:
                grad_rows.mul_(group.inverse_temperature)
            out.hidden.index_copy_(0, group.source, grad_rows.to(out.hidden.dtype))

    def _conversions(
        self,
        group: RowGroup,
        stats: SoftmaxStatistics,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        stored: StoredLogits | None,
    ) -> list[LogitsToGradient]:
        """Stored exponentials need a factor per row, applied to the hidden states: they are fewer than logits."""
        conversions = []
        for row_block in group.blocks:
            logsumexp, logprobs, entropy, a, b = (
                None if x is None else x[row_block.in_group]
                for x in (stats.logsumexp, stats.logprobs, stats.entropy, grad_logprobs, grad_entropy)
            )
            coefficients = LogitGradientCoefficients.of(logsumexp, entropy, a, b, self._inverse(row_block))
            if stored is None or not row_block.store_logits or stored.sum_exp is None:
                conversions.append(
                    LogitsToGradient(
                        row_block,
                        coefficients,
                        coefficients.target_gradient(logprobs, entropy),
                        bool(stored and row_block.store_logits),
                    )
                )
                continue
            sum_exp = stored.sum_exp[row_block.in_group]
            factor = coefficients.constant / sum_exp
            row_block.scaled_RD.mul_(factor)
            conversions.append(
                LogitsToGradient(row_block, coefficients, logprobs.expm1().unsqueeze(1) * sum_exp, True, factor)
            )
        return conversions

    @staticmethod
    def _apply_factors(conversions: list[LogitsToGradient], grad_rows: Tensor | None) -> None:
        for conversion in conversions:
            if grad_rows is not None and conversion.factor is not None:
                grad_rows[conversion.row_block.in_group].mul_(conversion.factor)

    def _gradient(self, conversion: LogitsToGradient, columns: slice) -> Tensor:
        """(R, C): the gradient of these logits, without the factor of the conversion."""
        row_block = conversion.row_block
        block = self._block_memory(row_block, columns) if conversion.is_stored else self._logits(row_block, columns)
        if conversion.factor is None:
            self.kernels.to_gradient(block, self._inverse(row_block), conversion.coefficients)
        target_rows, target_columns = row_block.targets_within(columns)
        if len(target_rows):
            block[target_rows, target_columns] = conversion.target_gradient[target_rows].squeeze(1).to(block.dtype)
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
        """(R, C) memory of a block: the buffer that all blocks use in turn, or spare memory.

        In spare memory a block is stored at the columns before its own. From the last block to the first, the gradient
        of a block is then written only over logits that were used already. On a CPU a block is column-major, which
        makes matmuls faster, most of all in bfloat16.
        """
        num_rows, num_columns = len(row_block.scaled_RD), columns.stop - columns.start
        if row_block.spare_VD is None or columns.start == 0:
            memory = self._buffer("logits", num_columns, num_rows, self.weight.dtype)
        else:
            before = row_block.spare_VD[columns.start - self.blocks.columns : columns.start].view(-1)
            begin = row_block.in_group.start * num_columns
            memory = before[begin : begin + num_rows * num_columns].view(num_columns, num_rows)
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
