"""A run that was stopped, or killed, and went on is the run that never stopped."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e import jobs
from verl.observe.ledger import read_ledger

EVERY_STEP = "trainer.save_freq=1"
CRITIC = [
    "algorithm.adv_estimator=gae",
    "critic.fsdp.dtype=float32",
    "critic.optim.lr=1e-2",
    "critic.model.enable_gradient_checkpointing=False",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.shuffle=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    return tmp_path


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor below a checkpoint folder: weights, optimiser state, random state."""
    return {
        f"{path.relative_to(folder)}:{name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_same_run(folder: Path, first: str, second: str, step: int) -> None:
    ours, theirs = (checkpoint_tensors(folder / run / f"global_step_{step}") for run in (first, second))
    assert ours.keys() == theirs.keys() and len(ours) > 20
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert different == []
    assert jobs.without_timings(jobs.metrics(folder, first)) == jobs.without_timings(jobs.metrics(folder, second))
    for at in range(1, step + 1):
        one, two = (read_ledger(folder / run / "ledger", at).batch for run in (first, second))
        assert all(torch.equal(one[name], two[name]) for name in one.token_columns)


@pytest.mark.parametrize("stop", [2, 3, 4])  # 3 steps are one epoch
@pytest.mark.parametrize("extra", [[], CRITIC], ids=["grpo", "ppo"])
def test_a_resumed_run_continues_bit_for_bit(folder: Path, stop: int, extra: list[str]):
    jobs.train(folder, "whole", EVERY_STEP, "trainer.test_freq=1", *extra)
    jobs.train(folder, "parts", EVERY_STEP, "trainer.test_freq=1", *extra, *stopping(folder, stop))
    jobs.train(folder, "parts", EVERY_STEP, "trainer.test_freq=1", *extra)
    assert_same_run(folder, "whole", "parts", step=6)


def stopping(folder: Path, step: int) -> list[str]:
    """Overrides that end a run early without changing its schedule."""
    return [
        f"trainer.total_training_steps={step}",
        "actor_rollout_ref.actor.optim.total_training_steps=6",
        "critic.optim.total_training_steps=6",
    ]


def test_a_run_that_is_done_says_so_and_trains_nothing(folder: Path, capsys: pytest.CaptureFixture[str]):
    jobs.train(folder, "run", EVERY_STEP)
    before = checkpoint_tensors(folder / "run" / "global_step_6")
    jobs.train(folder, "run", EVERY_STEP)
    assert "nothing is left to train" in capsys.readouterr().out
    after = checkpoint_tensors(folder / "run" / "global_step_6")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_retention_keeps_the_newest(folder: Path):
    jobs.train(folder, "run", EVERY_STEP, "trainer.max_actor_ckpt_to_keep=2")
    kept = sorted(p.name for p in (folder / "run").glob("global_step_*"))
    assert kept == ["global_step_5", "global_step_6"]
    assert (folder / "run" / "latest_checkpointed_iteration.txt").read_text() == "6"


def test_changed_rows_are_refused_on_resume(folder: Path):
    from verl.utils.errors import DataError

    jobs.train(folder, "run", EVERY_STEP, "trainer.total_training_steps=2")
    rows = (folder / "data" / "train.jsonl").read_text().splitlines()
    (folder / "data" / "train.jsonl").write_text("\n".join(rows[::-1]) + "\n")
    with pytest.raises(DataError, match="train_files"):
        jobs.train(folder, "run", EVERY_STEP)


def test_a_damaged_checkpoint_is_refused_by_name(folder: Path):
    from verl.utils.errors import CheckpointError

    jobs.train(folder, "run", EVERY_STEP, "trainer.total_training_steps=2")
    victim = next((folder / "run" / "global_step_2" / "actor").glob("model*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=victim.name):
        jobs.train(folder, "run", EVERY_STEP)


def test_the_ledger_is_on_the_disk_before_the_checkpoint_that_follows_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    synced, original = [], os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    jobs.train(folder, "run", "trainer.save_freq=2", "trainer.total_training_steps=2")
    first = next(place for place, name in enumerate(synced) if "latest_checkpointed_iteration" in name)
    assert {"step_000001.parquet", "step_000002.parquet", "ledger"} <= set(synced[:first])


NUM_KILLS = 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_run_killed_inside_its_saves_ends_like_one_that_never_was(folder: Path):
    """Every child is killed at a random moment of a random save; the last one finishes."""
    steps = "trainer.total_training_steps=12"
    schedule = "actor_rollout_ref.actor.optim.total_training_steps=12"
    jobs.train(folder, "whole", EVERY_STEP, steps, schedule, "trainer.max_actor_ckpt_to_keep=2")
    rng, kills = random.Random(0), 0
    while kills < NUM_KILLS:
        kills += killed_in_a_save(folder, rng, [EVERY_STEP, steps, schedule, "trainer.max_actor_ckpt_to_keep=2"])
    jobs.train(folder, "killed", EVERY_STEP, steps, schedule, "trainer.max_actor_ckpt_to_keep=2")
    assert_same_run(folder, "whole", "killed", step=12)
    assert [p.name for p in (folder / "killed").iterdir() if p.name.endswith(".tmp")] == []


def killed_in_a_save(folder: Path, rng: random.Random, extra: list[str]) -> bool:
    """Fork a run, SIGKILL it in its first or second save; False when it got away and finished."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            run_and_tell(folder, writer, extra)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        for _ in range(rng.choice([1, 1, 2])):
            if not pipe.read(1):
                break
        time.sleep(rng.uniform(0, 0.08))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    latest = folder / "killed" / "latest_checkpointed_iteration.txt"
    if latest.exists() and int(latest.read_text()) >= 11:  # too near the end for more kills: start over
        shutil.rmtree(folder / "killed")
        (folder / "metrics" / "e2e" / "killed.jsonl").unlink()
    return os.WIFSIGNALED(status)


def run_and_tell(folder: Path, writer: int, extra: list[str]) -> None:
    """Write a byte whenever a save begins."""
    from verl.trainer.ppo import loop

    original = loop.save_checkpoint

    def telling(*args: object) -> Path:
        os.write(writer, b"s")
        return original(*args)  # type: ignore[arg-type]

    loop.save_checkpoint = telling  # type: ignore[assignment]
    jobs.train(folder, "killed", *extra)
