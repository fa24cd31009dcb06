"""Block sizes for the matrix of logits: which of its rows and columns exist at one time."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockSizes:
    """Rows and columns of the logits that exist at one time, and rows that visit the vocabulary together.

    `rows_per_group` None: those of one block. The first `stored_rows` rows share no block with others.
    """

    rows: int
    columns: int
    rows_per_group: int | None = None
    stored_rows: int = 0

    def row_groups(self, num_rows: int) -> Iterator[list[slice]]:
        """The blocks of rows of each group; an empty one for no rows, so that a per-token loss can name its metrics."""
        if not num_rows:
            yield [slice(0, 0)]
        most, start, stored_rows = self.rows_per_group or self.rows, 0, self.stored_rows
        while start < num_rows:
            left = num_rows - start
            rows = left if left <= most else min(most, left - most // 4)  # a short group costs as much as a long one
            middle, stop = start + min(stored_rows, rows), start + rows
            yield [*self._blocks(start, middle), *self._blocks(middle, stop)]
            start, stored_rows = stop, 0

    def _blocks(self, begin: int, end: int) -> Iterator[slice]:
        return slices(begin, end, even_part_size(end - begin, self.rows))

    def column_slices(self, vocab_size: int) -> Iterator[slice]:
        return slices(0, vocab_size, self.columns)


def even_part_size(number: int, most: int) -> int:
    """The size of parts of at most `most` that are about equal."""
    num_parts = max(1, -(-number // max(1, most)))
    return max(1, -(-number // num_parts))


def slices(begin: int, end: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, end)) for start in range(begin, end, step))
