"""Findings about a run before it starts: what is right, doubts, and all reasons against it in one message."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from verl.plugin.findings import Finding, Status
from verl.utils.errors import SeveralErrors, VerlError

T = TypeVar("T")
logger = logging.getLogger(__name__)

WHAT = "things keep this run from starting"


@dataclass
class Findings:
    """Findings in the order of the checks. A check has a name, and is not asked again once that name has refused."""

    what: str = WHAT
    rows: list[Finding] = field(default_factory=list)
    errors: list[VerlError] = field(default_factory=list)

    def run(self, name: str, check: Callable[[], T], say: Callable[[T], str] = str) -> T | None:
        """The result of `check`, which `say` puts into words; None where it, or one of its name, has refused.

        A good result takes the place of an earlier one of its name, which looked less closely.
        """
        if self.has_refused(name):
            return None
        try:
            result = check()
        except VerlError as error:
            self.refusal(name, error)
            return None
        self.rows = [row for row in self.rows if (row.name, row.status) != (name, Status.GOOD)]
        self.rows.append(Finding(name, Status.GOOD, say(result)))
        return result

    def has_refused(self, *names: str) -> bool:
        """Whether a check of one of these names has refused."""
        return any(row.name in names and row.status is Status.BAD for row in self.rows)

    def refusal(self, name: str, error: VerlError) -> None:
        """Keep a reason against the run; each of several."""
        self.errors += error.errors if isinstance(error, SeveralErrors) else [error]
        self.rows.append(Finding(name, Status.BAD, str(error)))

    def check(self, name: str, check: Callable[[], object], text: str = "") -> bool:
        """Whether `check` did not raise; `text` is what is then shown."""
        return self.run(name, lambda: (check(), True), lambda _: text) is not None

    def warn(self, name: str, text: str) -> None:
        """A doubt that does not keep the run from starting."""
        self.rows.append(Finding(name, Status.WARN, text))

    def tell_refusals(self, say: Callable[[str], None]) -> bool:
        """Whether there are refusals so far; `say` is told them, and that the search goes on."""
        try:
            self.raise_refusals()
        except VerlError as error:
            say(f"error: {error}\nlooking for what else keeps this run from starting")
        return bool(self.errors)

    def raise_refusals(self) -> None:
        """Raise the refusal, or all of them in one ConfigError."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise SeveralErrors(self.what, self.errors)

    def refuse(self, say: Callable[[str], None] = logger.warning) -> None:
        """Say the doubts, and raise the refusals."""
        for row in self.rows:
            if row.status is Status.WARN:
                say(row.detail)
        self.raise_refusals()
