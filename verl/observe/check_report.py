"""The result of a check before a run: a table in the terminal, and one HTML file in the look of `verl report`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl.observe.html_report import page_environment
from verl.utils.paths import atomic_write_text

GOOD, WARNING, WRONG, SKIPPED = "good", "warning", "wrong", "not checked"
STYLES = {GOOD: "green", WARNING: "yellow", WRONG: "bold red", SKIPPED: "dim"}


@dataclass(frozen=True)
class CheckResult:
    """The result of one check; `examples` are (where, what)."""

    check: str
    level: str  # GOOD, WARNING, WRONG (a run on this cannot be right) or SKIPPED
    text: str
    examples: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""  # figures that matter also where nothing was found

    @property
    def is_shown(self) -> bool:
        """Whether it found something or has figures."""
        return self.level != GOOD or bool(self.note)

    @property
    def full_text(self) -> str:
        return f"{self.text}; {self.note}" if self.note else self.text


def print_results(results: Sequence[CheckResult], examples: int) -> None:
    """Print the table of what found something or has figures, and so many examples of each of them."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    table = Table("check", "result", "what was found")
    shown = [result for result in results if result.is_shown]
    for result in shown:
        table.add_row(result.check, Text(result.level, style=STYLES[result.level]), Text(result.full_text))
    console.print(table, soft_wrap=False)
    console.print(f"{len(results) - len(shown)} other checks found nothing; the page lists them")
    for result in results:
        for where, what in result.examples[:examples] if result.level in (WARNING, WRONG) else ():
            console.print(Text.assemble((f"{result.check}: ", STYLES[result.level]), f"{where}: {what}"))


def write_checks_page(path: Path, title: str, facts: Mapping[str, str], results: Sequence[CheckResult]) -> None:
    """Write the page; everything is escaped."""
    template = page_environment().get_template("checks.html.j2")
    atomic_write_text(path, template.render(title=title, facts=facts, results=results))
