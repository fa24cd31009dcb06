"""A run whose rank or node is lost goes on from its newest checkpoint, a limited number of times."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from verl.config import RunConfig
from verl.config.run_name import with_trainer_values
from verl.trainer.run_files import complete_steps
from verl.utils.errors import VerlError, WorkerError

T = TypeVar("T")


class Restarts:
    """Runs a training again, from the newest checkpoint, after a rank has died or stalled (`trainer.max_restarts`).

    Not twice from the same checkpoint: what ends a rank again before the next one is no accident.
    """

    def __init__(self, config: RunConfig, announce: Callable[[str], None]):
        self.config, self.announce, self.left = config, announce, config.trainer.max_restarts
        self.lost: WorkerError | None = None  # why it was restarted last
        may_resume = config.trainer.resume_mode == "auto"
        self.used_step = None if may_resume else self._newest_step()  # the checkpoint from which nothing restarts

    def run(self, train: Callable[[RunConfig], T]) -> T:
        """The result of `train(config)`. WorkerError for a lost rank says why the run does not go on."""
        while True:
            try:
                return train(self.config)
            except WorkerError as error:
                if not (error.is_death or error.is_stall):
                    raise
                self._prepare(error)
            except VerlError as error:
                if self.lost is None:
                    raise
                raise _with(self.lost, f"the restart from step {self.used_step} failed: {error}") from error

    def _prepare(self, error: WorkerError) -> None:
        step, total = self._newest_step(), self.config.trainer.max_restarts
        if total == 0:
            raise error
        if step is None:
            raise _with(error, "nothing could be restarted: the run has saved no checkpoint (trainer.save_freq)")
        if step == self.used_step:
            raise _with(error, f"not restarted: nothing was saved since the run went on from step {step}")
        if self.left == 0:
            raise _with(error, f"not restarted: that was done {total} times already (trainer.max_restarts)")
        self.left, self.used_step, self.lost = self.left - 1, step, error.with_traceback(None)
        self.announce(f"error: {error}\nrestart {total - self.left} of {total}: all ranks, from step {step}")
        self.config = with_trainer_values(self.config, {"resume_mode": "auto"})

    def _newest_step(self) -> int | None:
        return max(complete_steps(Path(self.config.trainer.default_local_dir)), default=None)


def restart_line(config: RunConfig, num_ranks: int) -> list[str]:
    """What becomes of a lost rank, for a run's header; nothing for a single one, which is this process."""
    settings = config.trainer
    if num_ranks == 1:
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
