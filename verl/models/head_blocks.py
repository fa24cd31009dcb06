"""Log-prob, entropy and their gradients from hidden states, one block of logits at a time.

Shapes: M rows go through the head, R of them in one block, V vocabulary, C columns of it in one block, D hidden.
Two blockings share this file. Narrow blocks (many rows, few columns) run at the full matmul rate and forget the logits,
so gradients compute them again. Full-width blocks (few rows, every column) keep them until their gradient is known.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

PART_ELEMENTS = 1 << 18  # elementwise work goes over pieces of a block that stay in a core's cache
PART_COLUMNS = 8192


@dataclass(frozen=True)
class Blocks:
    """Rows and columns of the logits that exist at one time."""

    rows: int
    columns: int

    def row_slices(self, num_rows: int) -> Iterator[slice]:
        """At least one slice, an empty one for no rows, so that a per-token loss can always name its metrics."""
        return _slices(num_rows, self.rows) if num_rows else iter([slice(0, 0)])

    def column_slices(self, vocab_size: int) -> Iterator[slice]:
        return _slices(vocab_size, self.columns)


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _parts(num_rows: int, num_columns: int) -> Iterator[tuple[slice, slice]]:
    """(rows, columns) pieces of a block, all columns of some rows before the next rows."""
    width = min(num_columns, PART_COLUMNS)
    for rows in _slices(num_rows, max(1, PART_ELEMENTS // width)):
        for columns in _slices(num_columns, width):
            yield rows, columns


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

    def targets_within(self, columns: slice) -> tuple[Tensor, Tensor]:
        """(R, 1) index of each target inside these columns (0 where it is elsewhere), and whether it is inside."""
        inside = (self.targets >= columns.start) & (self.targets < columns.stop)
        index = torch.where(inside, self.targets - columns.start, 0)
        return index.unsqueeze(1), inside.unsqueeze(1)


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

    def __init__(self, hidden_TD: Tensor, weight_VD: Tensor, bias: Tensor | None, blocks: Blocks):
        self.hidden, self.weight, self.bias, self.blocks = hidden_TD, weight_VD, bias, blocks
        self.vocab_size = weight_VD.shape[0]
        self.dtype = statistics_dtype(weight_VD)
        self.low_precision = self.dtype != weight_VD.dtype
        self.smallest_exponent = -700.0 if self.dtype == torch.float64 else -80.0  # below, exp is subnormal and slow
        self._buffers: dict[str, Tensor] = {}
        self._kept: tuple[Rows, Tensor] | None = None  # rows whose logits are all in the buffer

    def rows(self, source: Tensor, targets: Tensor, temperature: Tensor | None) -> Rows:
        """The hidden states at `source`, ready for the matmul; they hold until the next call."""
        scaled = self._buffer("rows", len(source), self.hidden.shape[1], self.hidden.dtype)
        torch.index_select(self.hidden, 0, source, out=scaled)
        inverse = None if temperature is None else temperature.to(self.dtype).reciprocal().unsqueeze(1)
        if inverse is not None and not self.low_precision:
            scaled.mul_(inverse)
        return Rows(scaled, targets, inverse, source)

    def statistics(self, rows: Rows, with_entropy: bool) -> Statistics:
        """One sweep: running maximum m, sum of e^(x-m), and for the entropy sum of (x-m) e^(x-m)."""
        running = _RunningStatistics(len(rows.targets), self.dtype, self.hidden.device, with_entropy)
        for columns in self.blocks.column_slices(self.vocab_size):
            logits = self._logits(rows, columns)
            index, inside = rows.targets_within(columns)
            target_logits = logits.gather(1, index).to(self.dtype)
            if self.low_precision and rows.inverse_temperature is not None:
                target_logits.mul_(rows.inverse_temperature)
            running.target_logits = torch.where(inside, target_logits, running.target_logits)
            for part_rows, part_columns in _parts(*logits.shape):
                x = self._in_full_precision(logits[part_rows, part_columns], rows, part_rows)
                running.add(part_rows, x, self._buffer("scratch", *x.shape, self.dtype), self.smallest_exponent)
            self._kept = (rows, logits) if logits.shape[1] == self.vocab_size else None
        return running.finish()

    def add_gradients(
        self,
        rows: Rows,
        stats: Statistics,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        out: Gradients,
    ) -> None:
        """Add the gradient of these rows, given d loss / d logprob and d loss / d entropy (R,).

        Computes the logits again unless `statistics` of the same rows has just left all of them in the buffer.
        """
        kept, self._kept = self._kept, None
        grad_rows = None
        if out.hidden is not None:
            grad_rows = self._buffer("grad_rows", *rows.scaled_RD.shape, self.dtype).zero_()
        slopes = _Slopes.of(stats, grad_logprobs, grad_entropy)
        for columns in self.blocks.column_slices(self.vocab_size):
            logits = kept[1] if kept is not None and kept[0] is rows else self._logits(rows, columns)
            self._logits_to_gradient(logits, rows, columns, slopes)
            self._accumulate(logits, rows, columns, grad_rows, out)
        out.empty = False
        if grad_rows is not None:
            if rows.inverse_temperature is not None and not self.low_precision:
                grad_rows.mul_(rows.inverse_temperature)
            out.hidden.index_copy_(0, rows.source, grad_rows.to(out.hidden.dtype))

    def _logits(self, rows: Rows, columns: slice) -> Tensor:
        """(R, C) in the weight's dtype, not yet divided by the temperature when that is a narrow one."""
        logits = self._buffer("logits", len(rows.targets), columns.stop - columns.start, self.weight.dtype)
        torch.mm(rows.scaled_RD, self.weight[columns].T, out=logits)
        if self.bias is not None:
            bias = self.bias[columns].to(logits.dtype)
            scaled = self.low_precision or rows.inverse_temperature is None
            logits.add_(bias if scaled else rows.inverse_temperature * bias)
        return logits

    def _in_full_precision(self, logits: Tensor, rows: Rows, part_rows: slice) -> Tensor:
        if not self.low_precision:
            return logits
        x = self._buffer("full", *logits.shape, self.dtype).copy_(logits)
        return x if rows.inverse_temperature is None else x.mul_(rows.inverse_temperature[part_rows])

    def _logits_to_gradient(self, logits: Tensor, rows: Rows, columns: slice, slopes: "_Slopes") -> None:
        """In place: x -> d loss / d x = a (onehot - p) - b p (log p + H); a, b: gradients of logprob and entropy."""
        for part_rows, part_columns in _parts(*logits.shape):
            piece = logits[part_rows, part_columns]
            x = self._in_full_precision(piece, rows, part_rows)
            x.sub_(slopes.logsumexp[part_rows]).clamp_(min=self.smallest_exponent)
            if slopes.linear is None:
                x.exp_().mul_(slopes.constant[part_rows])
            else:
                p = torch.exp(x, out=self._buffer("scratch", *x.shape, self.dtype))
                x.mul_(slopes.linear[part_rows]).add_(slopes.constant[part_rows]).mul_(p)
            if self.low_precision and rows.inverse_temperature is not None:
                x.mul_(rows.inverse_temperature[part_rows])
            if self.low_precision:
                piece.copy_(x)
        if slopes.target is not None:
            index, inside = rows.targets_within(columns)
            target = slopes.target
            if self.low_precision and rows.inverse_temperature is not None:
                target = target * rows.inverse_temperature
            logits.scatter_add_(1, index, torch.where(inside, target, 0).to(logits.dtype))

    def _accumulate(
        self, grad_logits: Tensor, rows: Rows, columns: slice, grad_rows: Tensor | None, out: Gradients
    ) -> None:
        if out.bias is not None:
            scaled = self.low_precision or rows.inverse_temperature is None
            per_column = grad_logits if scaled else grad_logits * rows.inverse_temperature
            out.bias[columns] += per_column.sum(0, dtype=self.dtype)
        if grad_rows is not None and self.low_precision:
            product = self._buffer("product", *grad_rows.shape, self.weight.dtype)
            grad_rows.add_(torch.mm(grad_logits, self.weight[columns], out=product))
        elif grad_rows is not None:
            grad_rows.addmm_(grad_logits, self.weight[columns])
        if out.weight is not None:
            into = out.weight[columns]
            torch.addmm(into, grad_logits.T, rows.scaled_RD, beta=0 if out.empty else 1, out=into)

    def _buffer(self, name: str, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
        """A (num_rows, num_columns) tensor without content that reuses the memory of the last one of this name."""
        size = num_rows * num_columns
        flat = self._buffers.get(name)
        if flat is None or flat.numel() < size:
            flat = self._buffers[name] = torch.empty(size, dtype=dtype, device=self.hidden.device)
        return flat[:size].view(num_rows, num_columns)

    def new_gradients(self, hidden: bool, weight: bool, bias: bool) -> Gradients:
        return Gradients(
            torch.zeros_like(self.hidden) if hidden else None,
            torch.empty_like(self.weight) if weight else None,
            torch.zeros(self.vocab_size, dtype=self.dtype, device=self.hidden.device) if bias else None,
        )


@dataclass(frozen=True)
class _Slopes:
    """What turns a logit into its gradient: p (constant + linear log p), plus `target` at the target; (R, 1) each."""

    logsumexp: Tensor
    constant: Tensor
    linear: Tensor | None
    target: Tensor | None

    @classmethod
    def of(cls, stats: Statistics, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> "_Slopes":
        constant = torch.zeros_like(stats.logsumexp) if grad_logprobs is None else -grad_logprobs
        if grad_entropy is not None:
            constant = constant - grad_entropy * stats.entropy
        return cls(
            stats.logsumexp.unsqueeze(1),
            constant.unsqueeze(1),
            None if grad_entropy is None else -grad_entropy.unsqueeze(1),
            None if grad_logprobs is None else grad_logprobs.unsqueeze(1),
        )


class _RunningStatistics:
    """Online log-sum-exp and entropy over pieces of the logits, (R, 1) each while running."""

    def __init__(self, num_rows: int, dtype: torch.dtype, device: torch.device, with_entropy: bool):
        self.maximum = torch.full((num_rows, 1), torch.finfo(dtype).min, dtype=dtype, device=device)
        self.total = torch.zeros(num_rows, 1, dtype=dtype, device=device)
        self.weighted = torch.zeros_like(self.total) if with_entropy else None
        self.target_logits = torch.zeros_like(self.total)

    def add(self, part_rows: slice, x: Tensor, scratch: Tensor, smallest_exponent: float) -> None:
        """Take in the logits x of some rows; scratch of the same shape is overwritten."""
        old, total = self.maximum[part_rows], self.total[part_rows]
        maximum = torch.maximum(old, x.amax(1, keepdim=True))
        shift = (old - maximum).clamp_(min=10 * smallest_exponent)  # finite, and e^shift is 0 there
        rescale = shift.exp()
        torch.sub(x, maximum, out=scratch).clamp_(min=smallest_exponent)
        if self.weighted is None:
            sums = scratch.exp_().sum(1, keepdim=True)
        else:
            weighted, exponentials = self.weighted[part_rows], scratch.exp()
            sums = exponentials.sum(1, keepdim=True)
            weighted.add_(shift * total).mul_(rescale).add_(scratch.mul_(exponentials).sum(1, keepdim=True))
        total.mul_(rescale).add_(sums)
        old.copy_(maximum)

    def finish(self) -> Statistics:
        log_total = self.total.log()
        entropy = None if self.weighted is None else (log_total - self.weighted / self.total).squeeze(1)
        logsumexp = self.maximum + log_total
        return Statistics(logsumexp.squeeze(1), (self.target_logits - logsumexp).squeeze(1), entropy)


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64 inputs, float32 for everything narrower."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
