"""Result of a check of the machine: status, reason, and what to do next."""

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """How well something works on this machine; the value is its symbol in the table."""

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
    """One line of a vendor's support table: `expected_status` where every module in `requires` is installed.

    `install` is the command for a missing module; empty means that the package has the module's name.
    """

    backend: str
    expected_status: Status
    note: str
    requires: tuple[str, ...] = ()
    install: str = ""
