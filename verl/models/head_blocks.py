"""Log-prob, entropy and their gradients from hidden states, one block of logits at a time.

Shapes: M rows go through the head, S of them in one sweep over the vocabulary, R in one block, V vocabulary, C columns
of it in one block, D hidden. A block is many rows by few columns, so that matmuls run at their full rate in a few
megabytes. Logits are forgotten after the sweep that sums their exponentials, and the gradient computes them again,
unless there is room for them, or for their exponentials: in the block itself when it holds whole rows, or in the memory
of the weight's gradient before that gradient exists. Rows with and without room sweep together, so that the weight and
its gradient pass through memory once for both.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.models.head_kernels import NEEDS_NO_SHIFT, Kernels, Slopes, Sums, statistics_dtype

LARGEST_TOTAL = 1e20  # of exponentials; beyond, they are taken again from the largest logit
PRODUCT_COLUMNS = 1024  # of a product with the weight in a narrow type on a CPU, which copies its factors
PRODUCTS = 4  # that are added up in a narrow type before they go to the sum over all


@dataclass(frozen=True)
class Blocks:
    """Rows and columns of the logits that exist at one time, and rows that sweep the vocabulary together.

    `together` None: those of one block. The first `kept` rows share no block with others.
    """

    rows: int
    columns: int
    together: int | None = None
    kept: int = 0

    def sweeps(self, num_rows: int) -> Iterator[list[slice]]:
        """The blocks of rows of each sweep; an empty one for no rows, so that a per-token loss can name its metrics."""
        if not num_rows:
            yield [slice(0, 0)]
        most, start, kept = self.together or self.rows, 0, self.kept
        while start < num_rows:
            left = num_rows - start
            rows = left if left <= most else min(most, left - most // 4)  # a short sweep costs as much as a long one
            middle, stop = start + min(kept, rows), start + rows
            yield [*self._blocks(start, middle), *self._blocks(middle, stop)]
            start, kept = stop, 0

    def _blocks(self, begin: int, end: int) -> Iterator[slice]:
        return _slices(begin, end, even(end - begin, self.rows))

    def column_slices(self, vocab_size: int) -> Iterator[slice]:
        return _slices(0, vocab_size, self.columns)


def even(number: int, most: int) -> int:
    """The size of parts of at most `most` that are about equal."""
    num_parts = max(1, -(-number // max(1, most)))
    return max(1, -(-number // num_parts))


def _slices(begin: int, end: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, end)) for start in range(begin, end, step))


@dataclass(frozen=True)
class Statistics:
    """What a sweep over the vocabulary leaves per row: (S,) each, in nats; entropy None unless asked for."""

    logsumexp: Tensor
    logprobs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class Rows:
    """A block of rows: scaled hidden states (R, D), the token each predicts, 1 / temperature (R, 1) or None."""

    within: slice  # of the rows of the sweep
    scaled_RD: Tensor
    inverse_temperature: Tensor | None
    keep: bool  # the blocks of logits, for the gradient
    room_VD: Tensor | None  # where, behind those of the rows before; None: in the buffer
    by_target: Tensor  # (R,) rows in the order of their targets
    sorted_targets: Tensor
    sorted_list: list[int]

    def targets_within(self, columns: slice) -> tuple[Tensor, Tensor]:
        """The rows whose target is inside these columns, and where in them each target is."""
        first, last = (bisect_left(self.sorted_list, column) for column in (columns.start, columns.stop))
        return self.by_target[first:last], self.sorted_targets[first:last] - columns.start


@dataclass(frozen=True)
class Sweep:
    """Rows that visit the columns of the vocabulary together: where they come from (S,), scaled (S, D), in blocks."""

    part: slice  # of the M rows
    source: Tensor
    scaled_SD: Tensor
    inverse_temperature: Tensor | None
    blocks: list[Rows]

    @property
    def has_room(self) -> bool:
        return self.blocks[0].room_VD is not None


@dataclass(frozen=True)
class Kept:
    """Logits that a sweep has left where its rows keep them, or their exponentials, of which `total` (S, 1) are sums.

    Of rows that keep theirs in spare memory the first block of columns is not kept.
    """

    sweep: Sweep
    total: Tensor | None


@dataclass(frozen=True)
class Turn:
    """How logits of some rows become their gradient, which is what the block holds times `factor` (R, 1), if any."""

    rows: Rows
    slopes: Slopes
    at_target: Tensor
    is_kept: bool = False
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

    def sweep(
        self,
        source: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        parts: list[slice],
        room_VD: Tensor | None = None,
    ) -> Sweep:
        """The hidden states at the `parts` of `source` (M,), ready for the matmul; they hold until the next call.

        The parts, a block of rows each, follow one another. `room_VD` is memory without content of the weight's shape
        and dtype: what `add_gradients` needs of the first D rows stays there until somebody writes to it.
        """
        together = slice(parts[0].start, parts[-1].stop)
        inverse = None if temperature is None else temperature[together].to(self.dtype).reciprocal().unsqueeze(1)
        scaled = self._buffer("rows", together.stop - together.start, self.hidden.shape[1], self.hidden.dtype)
        whole = len(parts) == 1 and self.blocks.columns >= self.vocab_size
        blocks = []
        for part in parts:
            within = slice(part.start - together.start, part.stop - together.start)
            ordered, by_target = targets[part].sort(stable=True)
            room = room_VD if within.stop <= self.hidden.shape[1] else None
            of_rows = None if inverse is None else inverse[within]
            keep = whole or room is not None
            blocks.append(Rows(within, scaled[within], of_rows, keep, room, by_target, ordered, ordered.tolist()))
        sweep = Sweep(together, source[together], scaled, inverse, blocks)
        self._gather(sweep)
        return sweep

    def _gather(self, sweep: Sweep) -> None:
        torch.index_select(self.hidden, 0, sweep.source, out=sweep.scaled_SD)
        if sweep.inverse_temperature is not None and not self.low_precision:
            sweep.scaled_SD.mul_(sweep.inverse_temperature)

    def statistics(self, sweep: Sweep, with_entropy: bool) -> Statistics:
        """Sums over the vocabulary of e^(x-s) and (x-s) e^(x-s), s being the largest logit of the first block.

        Where they are too large, the sums of those rows are taken again with s the largest of all.
        """
        self._kept = None
        found, exponentials = self._sums(sweep.blocks, with_entropy, None)
        for number, (rows, sums) in enumerate(zip(sweep.blocks, found, strict=True)):
            if not bool((sums.total < LARGEST_TOTAL).all()):
                found[number] = self._sums([rows], with_entropy, self._largest(rows))[0][0]
        shift, total, target_logits = (
            torch.cat([getattr(sums, name) for sums in found]) for name in ("shift", "total", "target_logits")
        )
        if any(rows.keep for rows in sweep.blocks):
            self._kept = Kept(sweep, total if exponentials else None)
        log_total, entropy = total.log(), None
        if with_entropy:
            weighted = torch.cat([sums.weighted for sums in found if sums.weighted is not None])
            entropy = (log_total - weighted / total).squeeze(1)
        logsumexp = shift + log_total
        return Statistics(logsumexp.squeeze(1), (target_logits - logsumexp).squeeze(1), entropy)

    def _sums(self, blocks: list[Rows], with_entropy: bool, shift: Tensor | None) -> tuple[list[Sums], bool]:
        """The sums of each block of rows, and whether what is kept are exponentials."""
        found: list[Sums] = []
        exponentials = False
        for columns in self.blocks.column_slices(self.vocab_size):
            for number, rows in enumerate(blocks):
                logits, inverse = self._logits(rows, columns), self._inverse(rows)
                if columns.start == 0:
                    at = self._largest_of(logits, inverse) if shift is None else shift
                    small = bool((at.abs() < NEEDS_NO_SHIFT).all())
                    found.append(Sums.zeros(torch.zeros_like(at) if small else at, with_entropy, not small))
                sums = found[number]
                where, index = rows.targets_within(columns)
                if len(where):
                    target_logits = logits[where, index].to(self.dtype).unsqueeze(1)
                    sums.target_logits[where] = target_logits if inverse is None else target_logits * inverse[where]
                exponentials = self.kernels.add_sums(logits, inverse, sums, rows.keep)
        return found, exponentials

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
        sweep: Sweep,
        stats: Statistics,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        out: Gradients,
    ) -> None:
        """Add the gradient of these rows, given d loss / d logprob and d loss / d entropy (S,).

        Computes the logits again that `statistics` of the same sweep has not just left.
        """
        kept, self._kept = self._kept if self._kept and self._kept.sweep is sweep else None, None
        turns = self._turns(sweep, stats, grad_logprobs, grad_entropy, kept)
        grad_rows = None
        if out.hidden is not None:
            grad_rows = self._buffer("grad_rows", *sweep.scaled_SD.shape, self.dtype).zero_()
        # the last block comes first: its gradient is written over what is kept of no other
        for columns in reversed(list(self.blocks.column_slices(self.vocab_size))):
            if columns.start == 0 and kept and sweep.has_room:  # of these nothing is kept: from the hidden states again
                self._apply_factors(turns, grad_rows)
                self._gather(sweep)
                turns = self._turns(sweep, stats, grad_logprobs, grad_entropy, None)
            for number, turn in enumerate(turns):
                block = self._gradient(turn, columns)
                within = turn.rows.within
                if out.bias is not None:
                    self._add_to_bias(out.bias[columns], block, turn)
                if grad_rows is not None:
                    self._add_to_rows(grad_rows[within], block, columns)
                if out.weight is not None:
                    into, beta = out.weight[columns], 0 if out.empty and number == 0 else 1
                    torch.addmm(into, block.T, turn.rows.scaled_RD, beta=beta, out=into)
        out.empty = False
        if grad_rows is not None:
            self._apply_factors(turns, grad_rows)
            if sweep.inverse_temperature is not None and not self.low_precision:
                grad_rows.mul_(sweep.inverse_temperature)
            out.hidden.index_copy_(0, sweep.source, grad_rows.to(out.hidden.dtype))

    def _turns(
        self,
        sweep: Sweep,
        stats: Statistics,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        kept: Kept | None,
    ) -> list[Turn]:
        """Exponentials need a factor per row, which goes to the hidden states: there are fewer of them than logits."""
        turns = []
        for rows in sweep.blocks:
            logsumexp, logprobs, entropy, a, b = (
                None if x is None else x[rows.within]
                for x in (stats.logsumexp, stats.logprobs, stats.entropy, grad_logprobs, grad_entropy)
            )
            slopes = Slopes.of(logsumexp, entropy, a, b, self._inverse(rows))
            if kept is None or not rows.keep or kept.total is None:
                turns.append(Turn(rows, slopes, slopes.at_target(logprobs, entropy), bool(kept and rows.keep)))
                continue
            total = kept.total[rows.within]
            factor = slopes.constant / total
            rows.scaled_RD.mul_(factor)
            turns.append(Turn(rows, slopes, logprobs.expm1().unsqueeze(1) * total, True, factor))
        return turns

    @staticmethod
    def _apply_factors(turns: list[Turn], grad_rows: Tensor | None) -> None:
        for turn in turns:
            if grad_rows is not None and turn.factor is not None:
                grad_rows[turn.rows.within].mul_(turn.factor)

    def _gradient(self, turn: Turn, columns: slice) -> Tensor:
        """(R, C) the gradient of these logits, but for the factor of the turn."""
        rows = turn.rows
        block = self._place(rows, columns) if turn.is_kept else self._logits(rows, columns)
        if turn.factor is None:
            self.kernels.to_gradient(block, self._inverse(rows), turn.slopes)
        where, index = rows.targets_within(columns)
        if len(where):
            block[where, index] = turn.at_target[where].squeeze(1).to(block.dtype)
        return block

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

    def _add_to_bias(self, grad_bias: Tensor, block: Tensor, turn: Turn) -> None:
        rows = turn.rows
        per_row = torch.ones(block.shape[0], dtype=self.dtype, device=block.device)
        if turn.factor is not None:
            per_row = turn.factor.squeeze(1)
        if rows.inverse_temperature is not None and not self.low_precision:
            per_row = per_row * rows.inverse_temperature.squeeze(1)
        grad_bias.addmv_(block.T.to(self.dtype), per_row)

    def _logits(self, rows: Rows, columns: slice) -> Tensor:
        """(R, C) in the weight's dtype, not yet divided by the temperature when that is a narrow one."""
        logits = self._place(rows, columns)
        torch.mm(rows.scaled_RD, self.weight[columns].T, out=logits)
        if self.bias is not None:
            bias = self.bias[columns].to(logits.dtype)
            scaled = self.low_precision or rows.inverse_temperature is None
            logits.add_(bias if scaled else rows.inverse_temperature * bias)
        return logits

    def _place(self, rows: Rows, columns: slice) -> Tensor:
        """(R, C) memory of a block: the buffer that all blocks share, or spare memory.

        Spare are the columns before, so that what is kept of a block is still there when its own columns are written to
        and the last block comes first. On a CPU the numbers of a column lie side by side, which makes matmuls faster,
        most of all in bfloat16.
        """
        num_rows, num_columns = len(rows.scaled_RD), columns.stop - columns.start
        if rows.room_VD is None or columns.start == 0:
            memory = self._buffer("logits", num_columns, num_rows, self.weight.dtype)
        else:
            before = rows.room_VD[columns.start - self.blocks.columns : columns.start].view(-1)
            begin = rows.within.start * num_columns
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
