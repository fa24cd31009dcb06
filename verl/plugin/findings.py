"""What a check of the machine says: a status, the reason, and the next move."""

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """How well something works here; the value is the sign in the table."""

    GOOD = "✅"
    WARN = "⚠"
    BAD = "✖"
    NOTE = "·"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    name: str
    status: Status
    detail: str
    next_move: str = ""


@dataclass(frozen=True)
class BackendSupport:
    """One line of a vendor's support table: `expected_status` on the chip, if every module in `requires` is there.

    `install` is what to type when one is not; empty means the package of the module's name.
    """

    backend: str
    expected_status: Status
    note: str
    requires: tuple[str, ...] = ()
    install: str = ""
