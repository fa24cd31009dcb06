"""Read the answers that a run has dumped (trainer.rollout_data_dir, validation_data_dir) in the terminal.

    python scripts/rollout_viewer.py FOLDER                    opens the last step: keys and what they do are shown
    python scripts/rollout_viewer.py FOLDER --step 20 --sort score --print 5      the five lowest scores, and ends

FOLDER holds <step>.jsonl; a single file does, too. The ledger has every token: `verl show RUN`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from verl.utils.errors import DataError, VerlError

KEYS = "enter next · b back · NUMBER an answer · + - step · s KEY sort · / TEXT search · a all · q quit"
BODY = ("input", "output", "gts")  # shown as texts of their own; every other field in one line
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """0: shown; 2: a mistake the message explains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--step", type=int, help="the step (default: the last one)")
    parser.add_argument("--sort", metavar="KEY", help="lowest first: score, or any field that a line has")
    parser.add_argument("--search", metavar="TEXT", default="", help="only answers with TEXT in a field")
    parser.add_argument("--print", type=int, metavar="N", dest="count", help="print N answers and end")
    options = parser.parse_args(argv)
    try:
        files = step_files(options.folder)
        step = max(files) if options.step is None else options.step
        if step not in files:
            raise DataError(f"{options.folder} has no step {step}; it has {', '.join(map(str, sorted(files)))}")
        viewer = Viewer(files, step, options.sort, options.search)
        viewer.open(step)
        if options.count is None:
            viewer.ask()
        else:
            for number in range(min(options.count, len(viewer.rows))):
                viewer.show(number)
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def step_files(path: Path) -> dict[int, Path]:
    """The dumps by step: those of a folder, or one file. DataError where there are none."""
    found = [path] if path.is_file() else sorted(path.glob("*.jsonl"))
    files = {int(file.stem): file for file in found if file.stem.isdecimal()}
    if not files:
        raise DataError(f"{path} holds no <step>.jsonl; a run writes them with trainer.rollout_data_dir=FOLDER")
    return files


def read_rows(file: Path) -> list[Row]:
    """The answers of one step; DataError for a line that is none."""
    rows = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file}: line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{file}: line {number} is no object: {line[:80]}")
        rows.append(row)
    return rows


def chosen(rows: list[Row], sort: str | None, search: str) -> list[Row]:
    """The rows with `search` in a field, those with the lowest `sort` first; DataError for a field no row has."""
    if sort is not None and rows and all(sort not in row for row in rows):
        raise DataError(f"no answer has a field {sort!r}; there are {', '.join(rows[0])}")
    matching = [row for row in rows if any(search.lower() in str(value).lower() for value in row.values())]
    return matching if sort is None else sorted(matching, key=lambda row: order(row.get(sort)))


def order(value: Any) -> tuple[int, float, str]:
    """Numbers before texts before what is missing."""
    if isinstance(value, int | float):
        return 0, value, ""
    return (2, 0.0, "") if value is None else (1, 0.0, str(value))


@dataclass
class Viewer:
    """One open step. `ask` shows answers until the reader quits."""

    files: dict[int, Path]
    step: int
    sort: str | None = None
    search: str = ""
    rows: list[Row] = field(default_factory=list)
    console: Console = field(default_factory=lambda: Console(highlight=False))

    def open(self, step: int) -> None:
        """Read the answers of `step`, as they are sorted and searched now."""
        self.rows = chosen(read_rows(self.files[step]), self.sort, self.search)
        self.step = step

    def show(self, number: int) -> None:
        """Print one answer; its texts are never taken for markup."""
        row = self.rows[number]
        self.console.print(Rule(f"step {self.step}, answer {number + 1} of {len(self.rows)}"))
        for name in BODY:
            self.console.print(Text(f"{name}: ", style="bold").append(str(row.get(name)), style="not bold"))
        rest = "  ".join(f"{name}={value}" for name, value in row.items() if name not in (*BODY, "step"))
        self.console.print(Text(rest, style="cyan"))

    def ask(self) -> None:
        """Show an answer, read a key and an enter, and so on until `q` or the end of the input."""
        number = 0
        while True:
            if self.rows:
                number = min(max(number, 0), len(self.rows) - 1)
                self.show(number)
            else:
                self.console.print(Text(f"step {self.step}: no answer has {self.search!r}"))
            self.console.print(Text(KEYS, style="dim"))
            try:
                key = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                return
            if key == "q":
                return
            try:
                number = self.answer(key, number)
            except DataError as error:
                self.console.print(Text(str(error), style="red"))

    def answer(self, key: str, number: int) -> int:
        """Do what a key says; the number of the answer to show next."""
        if key in ("", "b"):
            return number + (1 if key == "" else -1)
        if key.isdecimal():
            return int(key) - 1
        steps = sorted(self.files)
        if key in ("+", "-"):
            place = steps.index(self.step) + (1 if key == "+" else -1)
            self.open(steps[min(max(place, 0), len(steps) - 1)])
        elif key == "a" or key[0] in "s/":
            before = self.sort, self.search
            if key == "a":
                self.sort, self.search = None, ""
            elif key[0] == "/":
                self.search = key[1:].strip()
            else:
                self.sort = key[1:].strip() or None
            try:
                self.open(self.step)
            except DataError:
                self.sort, self.search = before
                raise
        else:
            raise DataError(f"there is no key {key!r}")
        return 0


if __name__ == "__main__":
    sys.exit(main())
