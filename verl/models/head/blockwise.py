"""Log-prob, entropy and their gradients from hidden states, one block of logits at a time.

Shapes: M rows go through the head, S of them in one pass over the vocabulary, R in one block, V vocabulary, C columns
of it in one block, D hidden. A block is many rows by few columns, so that matmuls run at their full rate in a few
megabytes. Logits are forgotten after the pass that sums their exponentials, and the gradient computes them again,
unless there is room for them, or for their exponentials: in the block itself when it holds whole rows, or in the memory
of the weight's gradient before that gradient exists. Rows with and without room form one group, so that the weight and
its gradient pass through memory once for both.
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

MAX_SUM_EXP = 1e20  # of exponentials; beyond, they are taken again from the largest logit
PRODUCT_COLUMNS = 1024  # of a product with the weight in a narrow type on a CPU, which copies its factors
PRODUCTS_PER_SUM = 4  # that are added up in a narrow type before they go to the sum over all


@dataclass(frozen=True)
class SoftmaxStatistics:
    """What a pass over the vocabulary leaves per row: (S,) each, in nats; entropy None unless asked for."""

    logsumexp: Tensor
    logprobs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class RowBlock:
    """A block of rows: scaled hidden states (R, D), the token each predicts, 1 / temperature (R, 1) or None."""

    in_group: slice  # of the rows of the group
    scaled_RD: Tensor
    inverse_temperature: Tensor | None
    store_logits: bool  # the blocks of logits, for the gradient
    spare_VD: Tensor | None  # where, behind those of the rows before; None: in the buffer
    by_target: Tensor  # (R,) rows in the order of their targets
    sorted_targets: Tensor
    sorted_list: list[int]

    def targets_within(self, columns: slice) -> tuple[Tensor, Tensor]:
        """The rows whose target is inside these columns, and where in them each target is."""
        first, last = (bisect_left(self.sorted_list, column) for column in (columns.start, columns.stop))
        return self.by_target[first:last], self.sorted_targets[first:last] - columns.start


@dataclass(frozen=True)
class RowGroup:
    """Rows that visit the columns of the vocabulary together: where they come from (S,), scaled (S, D), in blocks."""

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
    """Logits that a pass has left where its rows keep them, or their exponentials, of which `sum_exp` (S, 1) are sums.

    Of rows that keep theirs in spare memory the first block of columns is not kept.
    """

    group: RowGroup
    sum_exp: Tensor | None


@dataclass(frozen=True)
class LogitsToGradient:
    """How logits of some rows become their gradient, which is what the block holds times `factor` (R, 1), if any."""

    row_block: RowBlock
    coefficients: LogitGradientCoefficients
    target_gradient: Tensor
    is_stored: bool = False
    factor: Tensor | None = None


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


class BlockwiseHead:
    """logits = (hidden @ weight.T + bias) / temperature, of which one block exists at a time, in the weight's dtype.

    Statistics are float32 (float64 for float64 inputs) whatever the dtype of the matmul. The temperature divides the
    hidden states in full precision; below it the logits, since a scaled row would be rounded twice.
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
        """The hidden states at the `parts` of `source` (M,), ready for the matmul; they hold until the next call.

        The parts, a block of rows each, follow one another. `spare_VD` is memory without content of the weight's shape
        and dtype: what `add_gradients` needs of the first D rows stays there until somebody writes to it.
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
            keep = whole_rows or spare is not None
            blocks.append(
                RowBlock(in_group, scaled[in_group], inverse_block, keep, spare, by_target, ordered, ordered.tolist())
            )
        group = RowGroup(group_slice, source[group_slice], scaled, inverse, blocks)
        self._gather(group)
        return group

    def _gather(self, group: RowGroup) -> None:
        torch.index_select(self.hidden, 0, group.source, out=group.scaled_SD)
        if group.inverse_temperature is not None and not self.low_precision:
            group.scaled_SD.mul_(group.inverse_temperature)

    def statistics(self, group: RowGroup, with_entropy: bool) -> SoftmaxStatistics:
        """Sums over the vocabulary of e^(x-s) and (x-s) e^(x-s), s being the largest logit of the first block.

        Where they are too large, the sums of those rows are taken again with s the largest of all.
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
        """The sums of each block of rows, and whether what is kept are exponentials."""
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
                where, index = row_block.targets_within(columns)
                if len(where):
                    target_logits = logits[where, index].to(self.dtype).unsqueeze(1)
                    accumulator.target_logits[where] = (
                        target_logits if inverse is None else target_logits * inverse[where]
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
        """1 / temperature where the logits of a block are not divided yet."""
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

        Computes the logits again that `statistics` of the same group has not just left.
        """
        stored, self._stored = self._stored if self._stored and self._stored.group is group else None, None
        conversions = self._conversions(group, stats, grad_logprobs, grad_entropy, stored)
        grad_rows = None
        if out.hidden is not None:
            grad_rows = self._buffer("grad_rows", *group.scaled_SD.shape, self.dtype).zero_()
        # the last block comes first: its gradient is written over what is kept of no other
        for columns in reversed(list(self.blocks.column_slices(self.vocab_size))):
            if (
                columns.start == 0 and stored and group.has_spare
            ):  # of these nothing is kept: from the hidden states again
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
        """Exponentials need a factor per row, which goes to the hidden states: there are fewer of them than logits."""
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
        """(R, C) the gradient of these logits, but for the factor of the conversion."""
        row_block = conversion.row_block
        block = self._block_memory(row_block, columns) if conversion.is_stored else self._logits(row_block, columns)
        if conversion.factor is None:
            self.kernels.to_gradient(block, self._inverse(row_block), conversion.coefficients)
        where, index = row_block.targets_within(columns)
        if len(where):
            block[where, index] = conversion.target_gradient[where].squeeze(1).to(block.dtype)
        return block

    def _add_to_rows(self, grad_rows: Tensor, block: Tensor, columns: slice) -> None:
        """grad_rows += block @ weight. Of narrow types a few products are added up before they go to the sum."""
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
        """(R, C) in the weight's dtype, not yet divided by the temperature when that is a narrow one."""
        logits = self._block_memory(row_block, columns)
        torch.mm(row_block.scaled_RD, self.weight[columns].T, out=logits)
        if self.bias is not None:
            bias = self.bias[columns].to(logits.dtype)
            scaled = self.low_precision or row_block.inverse_temperature is None
            logits.add_(bias if scaled else row_block.inverse_temperature * bias)
        return logits

    def _block_memory(self, row_block: RowBlock, columns: slice) -> Tensor:
        """(R, C) memory of a block: the buffer that all blocks share, or spare memory.

        Spare are the columns before, so that what is kept of a block is still there when its own columns are written to
        and the last block comes first. On a CPU the numbers of a column lie side by side, which makes matmuls faster,
        most of all in bfloat16.
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
