"""The certificate: one row per variant of the gradient computation, and the verdict."""

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

from verl.commands.certify.variants import WHOLE_MINI_BATCH

TOLERANCE = 1e-10  # relative, float64
MAX_REPEAT_ERROR = 1e-7  # between two computations of the definition; float64 rounding stays far below
MAX_RATIO = 2.0  # error against float64, divided by the error of the plain computation


@dataclass(frozen=True)
class CertificateRow:
    """One variant compared with the definition."""

    role: str
    dimension: str
    setting: str
    float64_error: float  # relative to the norm of the whole gradient
    tolerance: float
    own_error: float | None  # the same in the configured dtype; None if that is float64
    ratio: float | None  # own_error divided by the error of the plain computation in that dtype
    worst: str  # the parameter with the largest share of the error
    ok: bool


@dataclass(frozen=True)
class Certificate:
    """All rows for one configuration."""

    rows: list[CertificateRow]

    @property
    def holds(self) -> bool:
        return all(row.ok for row in self.rows)

    def failed_dimensions(self, role: str) -> list[str]:
        """The dimensions that change the gradient of `role`, in the order of the table."""
        return list(dict.fromkeys(row.dimension for row in self.rows if row.role == role and not row.ok))

    def verdict(self) -> str:
        """One line per model."""
        return "\n".join(self._verdict_of_role(role) for role in dict.fromkeys(row.role for row in self.rows))

    def _verdict_of_role(self, role: str) -> str:
        rows = [row for row in self.rows if row.role == role]
        dimensions = self.failed_dimensions(role)
        if not dimensions:
            worst = max(rows, key=lambda row: row.float64_error)
            return f"{role}: the same gradient in {len(rows)} ways; worst {worst.float64_error:.1e} ({worst.dimension})"
        failed = [row for row in rows if not row.ok]
        worst = max(failed, key=lambda row: row.float64_error)
        if WHOLE_MINI_BATCH in dimensions:
            others = [c for c in dimensions if c != WHOLE_MINI_BATCH]
            return (
                f"{role}: VIOLATION: even the whole mini-batch in one micro-batch differs from the definition: the "
                f"loss, its aggregation or its weights are wrong. Most of it is in {worst.worst}. "
                f"Also wrong: {', '.join(others) or 'nothing'}"
            )
        return (
            f"{role}: VIOLATION: the gradient changes with {', '.join(dimensions)}; worst {worst.float64_error:.1e} "
            f"({worst.dimension}: {worst.setting}), most of it in {worst.worst}"
        )

    def as_json(self) -> dict[str, Any]:
        return {"holds": self.holds, "verdict": self.verdict(), "rows": [dataclasses.asdict(row) for row in self.rows]}


def print_table(certificate: Certificate) -> None:
    """Print the table and the verdict."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("model", "what", "how", "float64", "own type", "x plain", ""):
        table.add_column(title, justify="right" if title in ("float64", "own type", "x plain") else "left")
    for row in certificate.rows:
        own = "" if row.own_error is None else f"{row.own_error:.1e}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        mark = "ok" if row.ok else f"VIOLATION in {row.worst}"
        table.add_row(row.role, row.dimension, row.setting, f"{row.float64_error:.1e}", own, ratio, mark)
    console.print(table)
    console.print(certificate.verdict())
