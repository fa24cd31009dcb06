"""A curve drawn with characters, for a terminal without a browser."""

import itertools
import math
import shutil
import sys
from collections.abc import Sequence

BRAILLE_BASE = 0x2800
DOT_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of a dot in a braille cell, by [row][column]
Points = Sequence[tuple[float, float]]


def draw_curve(
    points: Points, title: str = "", width: int | None = None, height: int = 12, unicode: bool | None = None
) -> str:
    """The points (x, y), joined by lines, as `height` lines of text with a y axis at the left and an x axis below.

    Points that are not finite are left out. `unicode`: braille characters, otherwise `*`; by default the
    encoding of standard output decides.
    """
    finite = sorted((float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y))
    if not finite:
        return f"{title}\n(no points)" if title else "(no points)"
    width = width or min(shutil.get_terminal_size((80, 24)).columns, 100)
    if unicode is None:
        unicode = "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()
    low, high = value_range([y for _, y in finite])
    labels = [axis_label(high - (high - low) * row / (height - 1)) for row in range(height)]
    shown = {0, height // 2, height - 1}
    margin = max(len(labels[row]) for row in shown)
    columns = max(width - margin - 2, 10)
    rows = (braille_lines if unicode else star_lines)(finite, (low, high), columns, height)
    bar, corner, dash = ("│", "└", "─") if unicode else ("|", "+", "-")
    lines = [title] if title else []
    lines += [f"{labels[i] if i in shown else '':>{margin}} {bar}{row}".rstrip() for i, row in enumerate(rows)]
    left, right = axis_label(finite[0][0]), axis_label(finite[-1][0])
    lines.append(" " * margin + f" {corner}" + dash * columns)
    lines.append(" " * (margin + 2) + left + right.rjust(columns - len(left)))
    return "\n".join(lines)


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """(low, high) of the values, widened a little if they are all equal."""
    low, high = min(values), max(values)
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        return low - pad, high + pad
    return low, high


def braille_lines(points: Points, y_range: tuple[float, float], columns: int, height: int) -> list[str]:
    """The curve as braille characters, each two by four dots."""
    cells = [[0] * columns for _ in range(height)]
    for x, y in line_pixels(points, y_range, columns * 2, height * 4):
        cells[y // 4][x // 2] |= DOT_BITS[y % 4][x % 2]
    return ["".join(chr(BRAILLE_BASE + cell) if cell else " " for cell in row) for row in cells]


def star_lines(points: Points, y_range: tuple[float, float], columns: int, height: int) -> list[str]:
    """The curve as `*` characters, each one dot."""
    cells = [[" "] * columns for _ in range(height)]
    for x, y in line_pixels(points, y_range, columns, height):
        cells[y][x] = "*"
    return ["".join(row) for row in cells]


def line_pixels(points: Points, y_range: tuple[float, float], width: int, height: int) -> set[tuple[int, int]]:
    """The (column, row from the top) pixels of the line through the points."""
    (x_low, x_high), (y_low, y_high) = (points[0][0], points[-1][0]), y_range
    x_span = (x_high - x_low) or 1.0
    pixels = [((x - x_low) / x_span * (width - 1), (y_high - y) / (y_high - y_low) * (height - 1)) for x, y in points]
    out = {(round(x), round(y)) for x, y in pixels}
    for (x0, y0), (x1, y1) in itertools.pairwise(pixels):
        steps = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0))))
        out |= {(round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps)) for i in range(steps + 1)}
    return out


def axis_label(value: float) -> str:
    """A short number for an axis."""
    return f"{value:.3g}" if abs(value) < 1e4 or value != int(value) else str(int(value))
