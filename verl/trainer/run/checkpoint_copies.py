"""Copies of complete checkpoints in a second place: `trainer.default_hdfs_dir`."""

import queue
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from verl.trainer.run.files import LATEST_STEP_FILE, complete_steps
from verl.utils import hadoop
from verl.utils.errors import ConfigError

KEY = "trainer.default_hdfs_dir"
SAID_AFTER_S = 2.0  # of waiting


class CheckpointCopies:
    """Copies checkpoints of `root`, one after the other, to `target` in HDFS or on this machine; training goes on.

    A folder there has its name once it is complete. A copy that fails is reported, and nothing else happens.
    """

    def __init__(self, root: Path, target: str, note: Callable[[str], None] = print):
        self.root, self.target, self.note = root, target.rstrip("/"), note
        self.pending: list[Path] = []  # checkpoints that are not copied yet
        self.longest_s = 0.0  # from the save to the end of its copy
        self._queue: queue.Queue[tuple[Path, float]] = queue.Queue()
        self._thread: threading.Thread | None = None

    def check_target(self) -> None:
        """ConfigError where copies would go into `root` or over those of another run; DataError without `hdfs`."""
        is_local = not hadoop.is_hdfs(self.target)
        if is_local and self.root.resolve() in (Path(self.target).resolve(), *Path(self.target).resolve().parents):
            raise ConfigError(
                f"{KEY}: copies would go to {self.target}, which is the run's own folder {self.root} or in it; name a "
                "folder elsewhere"
            )
        if hadoop.exists(f"{self.target}/{LATEST_STEP_FILE}") and not complete_steps(self.root):
            raise ConfigError(
                f"{KEY}: {self.target} holds checkpoints of a run of this name, and {self.root} none; copy them there "
                "to go on from the newest, or choose another trainer.experiment_name"
            )

    def start(self, folder: Path) -> None:
        """Copy `folder` once those before it are copied."""
        if self._thread is None:  # one that does not keep an ended program alive
            self._thread = threading.Thread(target=self._serve, name="checkpoint copies", daemon=True)
            self._thread.start()
        self.pending.append(folder)
        self._queue.put((folder, time.monotonic()))

    def wait(self) -> None:
        """Wait until nothing is left to copy; a wait that is noticed is said."""
        timer = threading.Timer(SAID_AFTER_S, self._say_wait)
        timer.daemon = True
        timer.start()
        self._queue.join()
        timer.cancel()

    def _say_wait(self) -> None:
        if names := ", ".join(folder.name for folder in self.pending):
            self.note(f"waiting until copied to {self.target} ({KEY}): {names}")

    def _serve(self) -> None:
        while True:
            folder, began = self._queue.get()
            try:
                self._copy(folder)
            except Exception as error:  # whatever the other place does, the run goes on
                self.note(f"warning: {folder} could not be copied to {self.target}: {error}")
            else:
                self.note(f"copied {folder.name} to {self.target}")
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.pending.remove(folder)
            self._queue.task_done()

    def _copy(self, folder: Path) -> None:
        copied = f"{self.target}/{folder.name}"
        unfinished, replaced = (f"{self.target}/.{folder.name}.{end}.tmp" for end in ("new", "old"))
        hadoop.makedirs(self.target, exist_ok=True)
        for left_behind in (unfinished, replaced):
            hadoop.remove(left_behind)
        hadoop.copy(str(folder), unfinished)
        if hadoop.exists(copied):  # of a step that was run again
            hadoop.rename(copied, replaced)
        hadoop.rename(unfinished, copied)
        hadoop.remove(replaced)
        with tempfile.TemporaryDirectory() as here:
            newest = Path(here) / LATEST_STEP_FILE
            newest.write_text(folder.name.rpartition("_")[2])
            hadoop.copy(str(newest), f"{self.target}/{LATEST_STEP_FILE}")
