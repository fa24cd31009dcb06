"""The record of a soak on disk: counts that a later run goes on from, with the commit and the date."""

import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "soak"


class Progress:
    """Counts of one PART in benchmarks/results/soak/PART.json; other code than that of the counts starts anew."""

    def __init__(self, part: str, folder: Path = RESULTS, commit: str | None = None):
        self.path, self.commit = folder / f"{part}.json", commit or current_commit()
        kept = json.loads(self.path.read_text()) if self.path.is_file() else {}
        self.cases: dict[str, dict[str, Any]] = kept["cases"] if kept.get("commit") == self.commit else {}

    def done(self, case: str) -> int:
        """Rounds of `case` that were recorded."""
        return self.cases.get(case, {}).get("rounds", 0)

    def record(self, case: str, rounds: int, **facts: Any) -> None:
        """Add `rounds` to a case and replace its facts; written at once, whole or not at all."""
        self.cases[case] = {"rounds": self.done(case) + rounds, **facts}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"commit": self.commit, "date": datetime.date.today().isoformat(), "cases": self.cases}
        new = self.path.with_suffix(".tmp")
        new.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(new, self.path)


def current_commit() -> str:
    """The last commit that changed the package."""
    log = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "verl"]
    return subprocess.run(log, capture_output=True, text=True, check=True).stdout.strip()
