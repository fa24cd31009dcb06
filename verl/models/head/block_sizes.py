"""Block sizes for the matrix of logits: which of its rows and columns exist at one time."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockSizes:
    """Rows and columns of one block of logits, and rows of one pass over the vocabulary.

    `rows_per_group` None: those of one block. The first `stored_rows` rows get blocks of their own.
    """

    rows: int
    columns: int
    rows_per_group: int | None = None
    stored_rows: int = 0

    def row_groups(self, num_rows: int) -> Iterator[list[slice]]:
        """The row blocks of each group; one empty block for no rows, so that a per-token loss names its metrics."""
        if not num_rows:
            yield [slice(0, 0)]
        max_rows, start, stored_rows = self.rows_per_group or self.rows, 0, self.stored_rows
        while start < num_rows:
            left = num_rows - start
            rows = left if left <= max_rows else min(max_rows, left - max_rows // 4)  # a short group costs the same
            middle, stop = start + min(stored_rows, rows), start + rows
            yield [*self._blocks(start, middle), *self._blocks(middle, stop)]
            start, stored_rows = stop, 0

    def _blocks(self, begin: int, end: int) -> Iterator[slice]:
        return slices(begin, end, even_part_size(end - begin, self.rows))

    def column_slices(self, vocab_size: int) -> Iterator[slice]:
        return slices(0, vocab_size, self.columns)


def even_part_size(number: int, most: int) -> int:
    """The part size that splits `number` into about equal parts of at most `most`."""
    num_parts = max(1, -(-number // max(1, most)))
    return max(1, -(-number // num_parts))


def slices(begin: int, end: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, end)) for start in range(begin, end, step))
