"""Copies of complete checkpoints in a second place: `trainer.default_hdfs_dir`."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from verl.trainer.run_files import LATEST_STEP_FILE
from verl.utils import hadoop
from verl.utils.errors import VerlError


class CheckpointCopies:
    """Copies one checkpoint at a time to `target`, a path in HDFS or of this machine, while training goes on.

    A folder there has its name once it is complete. A copy that fails is reported, and training goes on.
    """

    def __init__(self, target: str, note: Callable[[str], None] = print):
        self.target, self.note = target.rstrip("/"), note
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint copy")
        self._copy: Future[None] | None = None

    def start(self, folder: Path) -> None:
        """Start to copy `folder`, once the copy before it has ended."""
        self.wait()
        self._copy = self._pool.submit(self._run, folder)

    def wait(self) -> None:
        """Wait for the copy in progress, if there is one."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.result()

    def _run(self, folder: Path) -> None:
        unfinished, copied = f"{self.target}/.{folder.name}.tmp", f"{self.target}/{folder.name}"
        try:
            hadoop.makedirs(self.target, exist_ok=True)
            hadoop.remove(unfinished)
            hadoop.copy(str(folder), unfinished)
            hadoop.remove(copied)  # of a run that was resumed from before this step
            hadoop.rename(unfinished, copied)
            hadoop.copy(str(folder.parent / LATEST_STEP_FILE), f"{self.target}/{LATEST_STEP_FILE}")
        except (OSError, VerlError) as error:
            self.note(f"warning: {folder} could not be copied to {self.target}: {error}")
        else:
            self.note(f"copied {folder.name} to {self.target}")
