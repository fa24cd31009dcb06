"""Block sizes for the matrix of logits: which of its rows and columns exist at one time."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockSizes:
    """Rows and columns of one block of logits."""

    rows: int
    columns: int

    def row_slices(self, num_rows: int) -> Iterator[slice]:
        """The blocks of rows; one empty block for no rows, so that a per-token loss names its metrics."""
        return slices(0, num_rows, self.rows) if num_rows else iter([slice(0, 0)])

    def column_slices(self, vocab_size: int) -> Iterator[slice]:
        return slices(0, vocab_size, self.columns)


def even_part_size(number: int, most: int) -> int:
    """The part size that splits `number` into about equal parts of at most `most`."""
    num_parts = max(1, -(-number // max(1, most)))
    return max(1, -(-number // num_parts))


def slices(begin: int, end: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, end)) for start in range(begin, end, step))
