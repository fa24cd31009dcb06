"""events.jsonl of an asynchronous run: what a timeline needs, one event a line, only ever appended."""

import json
import logging
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"


class EventLog:
    """Appends events; a file that cannot be written is named once and does not end the training.

    `resumed` says that what follows a checkpoint's step happens again: of the lines before it, those since that step's
    `publish` were lost with the process that wrote them.
    """

    def __init__(self, path: Path | None):
        self.path = path  # None: nothing is written
        self._lines: list[str] = []

    def add(self, event: str, **facts: Any) -> None:
        """Note an event of now; `write` appends it."""
        if self.path is not None:
            self._lines.append(json.dumps({"time": round(time.time(), 6), "event": event, **facts}) + "\n")

    def write(self) -> None:
        """Append what was noted, with one system call."""
        lines, self._lines = self._lines, []
        if self.path is None or not lines:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write("".join(lines))
        except OSError as error:
            logger.warning("%s cannot be written (%s): no more events are recorded", self.path, error)
            self.path = None


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a file, in order; a last line that a killed process left incomplete is left out."""
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
