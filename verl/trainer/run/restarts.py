"""A run whose rank or node is lost goes on from its newest checkpoint, a limited number of times."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from verl.config import RunConfig
from verl.config.run_name import with_trainer_values
from verl.trainer.run.files import TRAINER_STATE_FILE, complete_steps, read_marker, step_folder
from verl.trainer.run.interrupt import stop_is_said
from verl.utils.errors import CheckpointError, Interrupted, VerlError, WorkerError

T = TypeVar("T")


class Restarts:
    """Runs a training again, from the newest checkpoint, after a rank has died or stalled (`trainer.max_restarts`).

    Not twice from the same checkpoint: what ends a rank again before the next one is no accident.
    """

    def __init__(self, config: RunConfig, announce: Callable[[str], None]):
        self.config, self.announce, self.total = config, announce, config.trainer.max_restarts
        self.count = self.first_step = 0
        self.lost: WorkerError | None = None  # why it was restarted last, until it trains again
        may_resume = config.trainer.resume_mode == "auto"
        self.used = None if may_resume else self._newest()  # the checkpoint from which nothing restarts

    def run(self, train: Callable[[RunConfig], T]) -> T:
        """The result of `train(config)`, which calls `began`. WorkerError for a lost rank says why the run ends."""
        while True:
            try:
                return train(self.config)
            except Interrupted:
                raise
            except VerlError as error:
                if isinstance(error, WorkerError) and is_lost(error):
                    self._prepare(error)
                elif self.lost is None:
                    raise
                else:
                    line = f"the restart from step {self.first_step} failed: {error}"
                    raise _with(self.lost, line) from error

    def began(self, step: int) -> None:
        """The run goes on from the checkpoint of `step` (0: none) and trains: no later error is a failed restart."""
        self.lost, self.first_step = None, step

    def follows(self, error: BaseException | None) -> bool:
        """Whether the run is restarted after `error`."""
        return is_lost(error) and self.total > 0 and not self._reason_against()

    def newest_step(self) -> int | None:
        """The step that the same command goes on from."""
        newest = self._newest()
        return newest and newest[0]

    def _prepare(self, error: WorkerError) -> None:
        if self.total == 0:
            raise error
        if reason := self._reason_against():
            raise _with(error, reason)
        self.used = self._newest()
        assert self.used is not None
        self.count, self.first_step, self.lost = self.count + 1, self.used[0], error.with_traceback(None)
        stop_is_said(f"during restart {self.count}; step {self.first_step} is saved")
        self.announce(f"error: {error}\nrestart {self.count} of {self.total}: all ranks, from step {self.first_step}")
        self.config = with_trainer_values(self.config, {"resume_mode": "auto"})

    def _reason_against(self) -> str:
        newest = self._newest()
        if newest is None or (newest == self.used and not self.first_step):
            return "nothing could be restarted: the run has saved no checkpoint (trainer.save_freq)"
        if newest == self.used:
            return f"not restarted: nothing was saved since the run went on from step {self.first_step}"
        used_up = f"not restarted: trainer.max_restarts={self.total} is used up"
        return used_up if self.count == self.total else ""

    def _newest(self) -> tuple[int, int] | None:
        """The newest checkpoint that a run may resume from: its step, and the time at which it was written in ns."""
        root = Path(self.config.trainer.default_local_dir)
        marked = None
        with contextlib.suppress(CheckpointError):  # the restart itself says what is wrong with the marker
            marked = read_marker(root)
        steps = [step for step in complete_steps(root) if marked is None or step <= marked]
        return (steps[-1], (step_folder(root, steps[-1]) / TRAINER_STATE_FILE).stat().st_mtime_ns) if steps else None


def is_lost(error: BaseException | None) -> bool:
    """Whether `error` says that a rank has died or stalled."""
    return isinstance(error, WorkerError) and (error.is_death or error.is_stall)


def restart_line(config: RunConfig, is_inline: bool) -> list[str]:
    """The header's line about lost ranks; nothing where the only rank is this process."""
    settings = config.trainer
    if is_inline:
        return []
    if settings.save_freq is None or settings.save_freq <= 0:
        return [
            "restarts     none: nothing is saved before the last step (trainer.save_freq); a lost rank ends the run"
        ]
    if settings.max_restarts == 0:
        return ["restarts     none (trainer.max_restarts=0): a lost rank or node ends the run"]
    return [f"restarts     after a lost rank or node from the newest checkpoint, {settings.max_restarts} times at most"]


def _with(error: WorkerError, line: str) -> WorkerError:
    return WorkerError(error.rank, error.method, f"{error.remote_traceback}\n{line}", error.is_death, error.is_stall)
