"""A run that has lost a rank goes on from its newest checkpoint, or says why it does not."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl.config import RunConfig, load_config
from verl.observe.tracking import Tracking
from verl.trainer import main_ppo
from verl.trainer.ppo import run_setup
from verl.trainer.run.interrupt import BeforeFirstStep
from verl.trainer.run.restarts import Restarts, restart_line
from verl.utils.errors import ConfigError, Interrupted, RewardError, VerlError, WorkerError


def config(root: Path, *words: str) -> RunConfig:
    given = ["actor_rollout_ref.model.path=m", "data.train_files=r.jsonl", f"trainer.default_local_dir={root}"]
    return load_config([*given, *words])


def save(root: Path, step: int) -> None:
    folder = root / f"global_step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer.json").write_text("{}")


def lost(step: int | None = None, **kinds: bool) -> Callable[[RunConfig], str]:
    """Trains to the checkpoint `step`, and then loses rank 1."""

    def train(config: RunConfig) -> str:
        if step is not None:
            save(Path(config.trainer.default_local_dir), step)
        raise WorkerError(1, "actor.update", "its process was killed", **(kinds or {"is_death": True}))

    return train


def ended(restarts: Restarts, *attempts: Callable[[RunConfig], str]) -> str:
    """The end of a run whose attempts go like that, one after the other."""
    left = iter(attempts)
    return restarts.run(lambda config: next(left)(config))


@pytest.mark.parametrize("kind", ["is_death", "is_stall"])
def test_a_lost_rank_restarts_the_run_from_the_newest_checkpoint(tmp_path: Path, kind: str):
    said: list[str] = []
    restarts = Restarts(config(tmp_path, "trainer.resume_mode=disable"), said.append)
    assert ended(restarts, lost(2, **{kind: True}), lost(4), lambda config: config.trainer.resume_mode) == "auto"
    assert "rank 1 failed in actor.update(): its process was killed\nrestart 1 of 3: all ranks, from step 2" in said[0]
    assert "restart 2 of 3: all ranks, from step 4" in said[1]


def test_a_run_that_had_checkpoints_restarts_before_its_first_new_one(tmp_path: Path):
    save(tmp_path, 6)
    assert ended(Restarts(config(tmp_path), print), lost(), lambda config: "done") == "done"
    named = Restarts(
        config(tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_6"), print
    )
    named.began(6)
    with pytest.raises(WorkerError, match="not restarted: nothing was saved since the run went on from step 6"):
        ended(named, lost())


@pytest.mark.parametrize(
    ("words", "attempts", "says"),
    [
        ([], [lost()], "killed\nnothing could be restarted: the run has saved no checkpoint"),
        ([], [lost(2), lost()], "killed\nnot restarted: nothing was saved since the run went on from step 2"),
        (["trainer.max_restarts=1"], [lost(2), lost(4)], r"killed\nnot restarted: trainer.max_restarts=1 is used up"),
        (["trainer.max_restarts=0"], [lost(2)], r"killed$"),
        ([], [lost(2, is_death=False)], r"killed$"),
    ],
)
def test_a_run_that_cannot_be_restarted_ends_with_the_culprit(tmp_path: Path, words: list[str], attempts, says: str):
    with pytest.raises(WorkerError, match=says) as caught:
        ended(Restarts(config(tmp_path, *words), print), *attempts)
    assert (caught.value.rank, caught.value.method) == (1, "actor.update")


def test_a_restart_that_fails_still_names_what_was_lost(tmp_path: Path):
    def refuse(config: RunConfig) -> str:
        raise ConfigError("1 of 2 nodes is there")

    with pytest.raises(WorkerError, match=r"rank 1 .*\nits .* killed\nthe restart from step 2 failed: 1 of 2 nodes"):
        ended(Restarts(config(tmp_path), print), lost(2), refuse)
    with pytest.raises(ConfigError):
        ended(Restarts(config(tmp_path), print), refuse)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trainer.save_freq=5"], "from the newest checkpoint, 3 times"),
        ([], "none: nothing is saved before the last step"),
        (["trainer.save_freq=-1"], "none: nothing is saved before the last step"),
        (["trainer.save_freq=5", "trainer.max_restarts=0"], "none (trainer.max_restarts=0)"),
    ],
)
def test_the_header_of_several_ranks_says_what_becomes_of_a_lost_one(tmp_path: Path, words: list[str], says: str):
    [line] = restart_line(config(tmp_path, *words), is_inline=False)
    assert says in line
    assert restart_line(config(tmp_path, *words), is_inline=True) == []


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("error", [RewardError("no such column"), Interrupted("stopped by SIGTERM", 143)])
def test_after_a_restart_has_begun_to_train_its_errors_are_those_of_any_run(
    tmp_path: Path, error: VerlError, has_begun: bool
):
    def train(config: RunConfig) -> str:
        if has_begun:
            restarts.began(2)
        raise error

    restarts = Restarts(config(tmp_path), print)
    is_same = has_begun or isinstance(error, Interrupted)
    with pytest.raises(type(error) if is_same else WorkerError) as caught:
        ended(restarts, lost(2), train)
    assert (caught.value is error) == is_same


def mark(root: Path, step: int) -> None:
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))


def test_a_run_goes_on_from_what_a_resume_would_take(tmp_path: Path):
    for step in (5, 10, 15):
        save(tmp_path, step)
    mark(tmp_path, 10)  # step 15 is left over from a run that somebody took back to 10
    said: list[str] = []
    assert ended(Restarts(config(tmp_path), said.append), lost(), lambda config: "done") == "done"
    assert "restart 1 of 3: all ranks, from step 10" in said[0]
    named = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_5"]
    restarts = Restarts(config(tmp_path, *named), said.append)
    restarts.began(5)
    with pytest.raises(WorkerError, match="nothing was saved since the run went on from step 5"):
        ended(restarts, lost())
    mark(tmp_path, 10)
    os.utime(tmp_path / "global_step_10" / "trainer.json", ns=(0, 0))  # written by this run, once more
    assert ended(restarts, lost(), lambda config: "done") == "done" and "from step 10" in said[1]


class Run:
    """As much of a training run as its command sees; `fit` goes on from the newest checkpoint, and does `train`."""

    def __init__(self, root: Path, train: Callable[[], None], calls: list[str], stop: int = 0):
        def call(name: str) -> Callable[[], None]:
            return partial(calls.append, name)

        self.train, self.stop_requested, self.complete, self.tracking = train, stop, False, Tracking("toy", "run", [])
        self.header_lines, self.summary = list, SimpleNamespace(lines=lambda complete: ["reached"])
        self.trainer, self.checkpoints = SimpleNamespace(close=call("close")), SimpleNamespace()
        self.observers = SimpleNamespace(close_traces=lambda: None)
        self.checkpoints.wait_for_copies = call("copies")
        calls.append("build")

    def fit(self, on_begin: Callable[[int], object]) -> dict[str, float]:
        on_begin(0)
        self.train()
        return {}


def commanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *runs: Run, build: Callable[..., Run] | None = None):
    """The lines of a command whose attempts are `runs`."""
    left, lines = iter(runs), []
    monkeypatch.setattr(run_setup, "build_run", build or (lambda *given: next(left)))
    restarts = Restarts(config(tmp_path), lines.append)
    restarts.run(lambda config: main_ppo._train(config, lines.append, restarts, lambda run: None, None))
    return lines


def saves_and_loses(root: Path, step: int) -> Callable[[], None]:
    def train() -> None:
        save(root, step)
        raise WorkerError(1, "actor.update", "its process was killed", is_death=True)

    return train


def test_a_stop_holds_where_a_rank_is_lost_before_the_step_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    run = Run(tmp_path, saves_and_loses(tmp_path, 2), calls, signal.SIGTERM)
    with pytest.raises(Interrupted, match=r"stopped by SIGTERM.*was killed\n.*global_step_2 is the newest") as caught:
        commanded(tmp_path, monkeypatch, run)
    assert caught.value.exit_code == 143 and calls == ["build", "close"]


def test_a_restart_waits_for_copies_and_the_end_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []

    def build(*given: object) -> Run:
        return Run(tmp_path, saves_and_loses(tmp_path, 2) if not calls else lambda: None, calls)

    lines = commanded(tmp_path, monkeypatch, build=build)
    assert calls == ["build", "close", "copies", "build", "close"]
    assert lines.count("reached") == 1 and "restart 1 of 3" in lines[0]


def test_what_fails_while_a_lost_run_closes_does_not_hide_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def close() -> None:
        raise ConnectionError("the tracker is gone")

    calls: list[str] = []
    first = Run(tmp_path, saves_and_loses(tmp_path, 2), calls)
    first.trainer.close = close
    lines = commanded(tmp_path, monkeypatch, first, Run(tmp_path, lambda: None, calls))
    assert lines[0] == "warning: the tracker is gone" and "restart 1 of 3" in lines[1]
    alone = Run(tmp_path, lambda: None, calls)
    alone.trainer.close = close
    with pytest.raises(ConnectionError):
        commanded(tmp_path, monkeypatch, alone)


def test_a_signal_while_a_restart_loads_says_what_is_saved(tmp_path: Path):
    def load(config: RunConfig) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "not reached"

    with (
        pytest.raises(Interrupted, match="stopped by SIGTERM during restart 1; step 2 is saved") as caught,
        BeforeFirstStep(),
    ):
        ended(Restarts(config(tmp_path), print), lost(2), load)
    assert caught.value.exit_code == 143
