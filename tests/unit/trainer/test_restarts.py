"""A run that has lost a rank goes on from its newest checkpoint, or says why it does not."""

from collections.abc import Callable
from pathlib import Path

import pytest

from verl.config import RunConfig, load_config
from verl.trainer.restarts import Restarts, restart_line
from verl.utils.errors import ConfigError, WorkerError


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
    with pytest.raises(WorkerError, match="not restarted: nothing was saved since the run went on from step 6"):
        ended(named, lost())


@pytest.mark.parametrize(
    ("words", "attempts", "says"),
    [
        ([], [lost()], "killed\nnothing could be restarted: the run has saved no checkpoint"),
        ([], [lost(2), lost()], "killed\nnot restarted: nothing was saved since the run went on from step 2"),
        (["trainer.max_restarts=1"], [lost(2), lost(4)], r"killed\nnot restarted: that was done 1 times already"),
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
    [line] = restart_line(config(tmp_path, *words), 2)
    assert says in line
    assert restart_line(config(tmp_path, *words), 1) == []
