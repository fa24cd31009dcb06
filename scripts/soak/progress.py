"""The record of a soak on disk: counts that a later run goes on from, with the commit and the date."""

import datetime
import json
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "soak"


class Progress:
    """Counts of one PART in benchmarks/results/soak/PART.json.

    Other code than that of the counts starts anew, unless `keep_older`: then each case says its commit and date.
    """

    def __init__(self, part: str, folder: Path = RESULTS, commit: str | None = None, keep_older: bool = False):
        self.path, self.commit, self.keep_older = folder / f"{part}.json", commit or current_commit(), keep_older
        kept = json.loads(self.path.read_text()) if self.path.is_file() else {}
        self.writing = threading.Lock()
        same = keep_older or kept.get("commit") == self.commit
        self.cases: dict[str, dict[str, Any]] = kept.get("cases", {}) if same else {}

    def done(self, case: str) -> int:
        """Rounds of `case` that were recorded."""
        return self.cases.get(case, {}).get("rounds", 0)

    def forget(self, cases: Sequence[str]) -> None:
        """Take these out; the next `record` writes it."""
        for case in cases:
            del self.cases[case]

    def record(self, case: str, rounds: int, /, **facts: Any) -> None:
        """Add `rounds` to a case and replace its facts; written at once, whole or not at all; threads may."""
        now = {"commit": self.commit, "date": datetime.date.today().isoformat()}
        with self.writing:
            self.cases[case] = {"rounds": self.done(case) + rounds, **(now if self.keep_older else {}), **facts}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(".tmp")
            new.write_text(json.dumps({**now, "cases": self.cases}, indent=1) + "\n")
            os.replace(new, self.path)


def current_commit(*folders: str) -> str:
    """The last commit that changed one of these folders; the package where none is named."""
    log = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", *(folders or ("verl",))]
    return subprocess.run(log, capture_output=True, text=True, check=True).stdout.strip()
