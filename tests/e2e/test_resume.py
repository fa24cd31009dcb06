"""A run that was stopped, or killed, and went on is the run that never stopped."""

import errno
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e import jobs
from verl.config.trainer import TrainerConfig
from verl.models.tensor_file import file_digest, write_tensors
from verl.observe.ledger import read_ledger
from verl.observe.trackers import FileBackend
from verl.observe.tracking import TrackingError
from verl.trainer import main_ppo
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.run.checkpoints import Checkpoints, complete_steps
from verl.trainer.run.resume import find_resume
from verl.utils.checksummed import write_checksummed
from verl.utils.errors import CheckpointError

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
def test_a_resumed_run_continues_bit_for_bit(
    folder: Path, stop: int, extra: list[str], capsys: pytest.CaptureFixture[str]
):
    jobs.train(folder, "whole", EVERY_STEP, "trainer.test_freq=1", *extra)
    whole = jobs.scores_said(capsys)
    jobs.train(folder, "parts", EVERY_STEP, "trainer.test_freq=1", *extra, *stopping(folder, stop))
    capsys.readouterr()
    jobs.train(folder, "parts", EVERY_STEP, "trainer.test_freq=1", *extra)
    assert_same_run(folder, "whole", "parts", step=6)
    assert jobs.scores_said(capsys) == whole and len(whole) > 1 and all("first" in line for line in whole)


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


def damage(folder: Path, pattern: str, how: str) -> str:
    """Flip a bit of, shorten, or delete a file; its name."""
    victim = next(folder.glob(pattern))
    data = bytearray(victim.read_bytes())
    data[-2] ^= 1
    if how == "deleted":
        victim.unlink()
    else:
        victim.write_bytes(bytes(data if how == "flipped" else data[:-3]))
    return victim.name


@pytest.mark.parametrize("how", ["flipped", "cut", "deleted"])
@pytest.mark.parametrize("pattern", ["actor/optim*", "actor/extra*.json", "actor/manifest.json", "trainer.json"])
def test_a_damaged_checkpoint_is_skipped_by_name_for_the_newest_good_one(
    folder: Path, caplog: pytest.LogCaptureFixture, how: str, pattern: str
):
    save(folder / "run", 1, 2, 3)
    names = [damage(folder / "run" / f"global_step_{step}", pattern, how) for step in (2, 3)]
    found = find_resume(TrainerConfig(default_local_dir=str(folder / "run")), ["actor"])
    assert found == folder / "run" / "global_step_1"
    if pattern != "trainer.json" or how != "deleted":  # then it is no checkpoint at all
        assert all(f"global_step_{s}" in caplog.text for s in (2, 3)) and names[0] in caplog.text
    damage(folder / "run" / "global_step_1", "actor/model*", "flipped")
    with pytest.raises(CheckpointError, match="no checkpoint that is whole"):
        find_resume(TrainerConfig(default_local_dir=str(folder / "run")), ["actor"])


class TinyRole:
    """Writes what an engine would, a few bytes of it."""

    def save(self, folder: Path) -> None:
        folder.mkdir()
        names = ["model_world_size_1_rank_0", "optim_world_size_1_rank_0"]
        files = {f"{n}.safetensors": write_tensors(folder / f"{n}.safetensors", {"a": torch.ones(3)}) for n in names}
        (folder / "extra_state_world_size_1_rank_0.json").write_text("{}")
        files["extra_state_world_size_1_rank_0.json"] = file_digest(folder / "extra_state_world_size_1_rank_0.json")
        write_checksummed(folder / "manifest.json", {"format": 2, "files": files})

    def finish_save(self, wait: bool = True) -> bool:
        return True


def save(root: Path, *steps: int, keep: int | None = None) -> None:
    checkpoints = Checkpoints(root, {"actor": keep})
    for step in steps:
        checkpoints.save(step, {"step": step}, {"actor": TinyRole()})
        checkpoints.finish_pending(wait=True)


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(folder: Path, caplog: pytest.LogCaptureFixture):
    jobs.train(folder, "whole", EVERY_STEP)
    jobs.train(folder, "run", EVERY_STEP, *stopping(folder, 3))
    name = damage(folder / "run" / "global_step_3", "actor/model*", "flipped")
    jobs.train(folder, "run", EVERY_STEP)
    assert f"{name} is damaged" in caplog.text
    assert_same_run(folder, "whole", "run", step=6)


def test_pruning_never_counts_steps_of_a_line_that_was_left(tmp_path: Path):
    save(tmp_path, 1, 2, 3)
    save(tmp_path, 2, keep=1)
    assert complete_steps(tmp_path) == [2, 3]  # 3 is the newer one that was skipped: no reason to drop 2
    save(tmp_path, 4, keep=1)
    assert complete_steps(tmp_path) == [4]


def test_the_ledger_is_on_the_disk_before_the_checkpoint_that_follows_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    synced, original = [], os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    jobs.train(folder, "run", "trainer.save_freq=2", "trainer.total_training_steps=2")
    first = next(place for place, name in enumerate(synced) if "latest_checkpointed_iteration" in name)
    assert {"step_000001.parquet", "step_000002.parquet", "ledger"} <= set(synced[:first])


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_a_step_is_logged_before_its_checkpoint_has_a_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, background: bool
):
    """Killed between the two, a run that goes on from the checkpoint would lack that step's line for good."""
    logged = jobs.watch_checkpoints(folder, "run", monkeypatch)
    jobs.train(folder, "run", EVERY_STEP, f"actor_rollout_ref.actor.checkpoint.async_save={background}")
    assert logged == [True] * 6


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_a_tracker_that_fails_takes_no_checkpoint_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, background: bool
):
    def slow(*args: Any) -> str:
        time.sleep(0.3)
        return write_tensors(*args)

    def log(self: FileBackend, data: dict[str, float], step: int) -> None:
        if step == 2:
            raise OSError("no space left")

    monkeypatch.setattr(FileBackend, "log", log)
    monkeypatch.setattr("verl.workers.engine.checkpoint.write_tensors", slow)
    with pytest.raises(TrackingError, match="no space left"):
        jobs.train(folder, "run", EVERY_STEP, f"actor_rollout_ref.actor.checkpoint.async_save={background}")
    assert complete_steps(folder / "run") == [1, 2]


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_a_full_disk_ends_the_run_with_what_to_do_and_gives_its_room_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, background: bool
):
    def write(path: Path, tensors: Any) -> str:
        if "global_step_2" in str(path):
            path.write_bytes(b"the first part")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_tensors(path, tensors)

    monkeypatch.setattr("verl.workers.engine.checkpoint.write_tensors", write)
    with pytest.raises(CheckpointError, match=r"(?s)step 2 could not .*No space left.* goes on from .*_step_1$"):
        jobs.train(folder, "run", EVERY_STEP, f"actor_rollout_ref.actor.checkpoint.async_save={background}")
    assert complete_steps(folder / "run") == [1] and not list((folder / "run").glob(".global_step_*"))


def test_a_run_that_starts_over_logs_its_first_validation_once(folder: Path):
    for _ in range(2):
        jobs.train(folder, "run", "trainer.save_freq=0", "trainer.total_training_steps=1")
    assert list(jobs.metrics(folder, "run")) == [0, 1]


def test_validation_alone_takes_nothing_of_a_run_away(folder: Path):
    dumps = [f"trainer.rollout_data_dir={folder / 'dumps'}", "trainer.save_freq=1"]
    jobs.train(folder, "run", *dumps, "trainer.total_training_steps=3")
    lines = jobs.metrics(folder, "run")
    records = sorted(path for place in ("run/ledger", "dumps") for path in (folder / place).rglob("*"))
    earlier = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder / 'run' / 'global_step_1'}"]
    for how in (earlier, ["trainer.resume_mode=disable"]):
        jobs.train(folder, "run", *dumps, "trainer.total_training_steps=3", "trainer.val_only=True", *how)
        now = jobs.metrics(folder, "run")  # no step twice
        assert list(now) == list(lines) and all(now[step].items() >= lines[step].items() for step in (2, 3))
        assert any(name.startswith("val-core/") for name in now[1])
        assert without_validation(now) == without_validation(lines)
        assert sorted(path for place in ("run/ledger", "dumps") for path in (folder / place).rglob("*")) == records


def without_validation(rows: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {step: {k: v for k, v in row.items() if not k.startswith("val-")} for step, row in rows.items()}


@pytest.mark.parametrize(("number", "late"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_signal_saves_what_nothing_else_would_and_its_status_says_so(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    late: bool,
    capsys: pytest.CaptureFixture[str],
):
    where = (FileBackend, "log") if late else (PPOTrainer, "step")
    original = getattr(*where)

    def interrupted(*args: Any) -> Any:
        signal.raise_signal(number)
        if number == signal.SIGTERM:
            signal.raise_signal(number)  # schedulers send it more than once
        return original(*args)

    monkeypatch.setattr(*where, interrupted)
    quiet = ["trainer.save_freq=-1", "trainer.val_before_train=False"]
    assert main_ppo.main(jobs.overrides(folder, "run", *quiet)) == 128 + number
    assert complete_steps(folder / "run") == [1]
    assert "after step 1 of 6, which is saved in" in capsys.readouterr().err


def test_ctrl_c_twice_ends_with_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(PPOTrainer, "step", interrupted)
    assert main_ppo.main(jobs.overrides(folder, "run", "trainer.val_before_train=False")) == 130
    assert "error: stopped at once by Ctrl-C" in capsys.readouterr().err
    assert complete_steps(folder / "run") == []


def test_pythons_and_numpys_generators_are_seeded_and_go_on_where_they_were(folder: Path):
    imports = "import random, numpy, torch\n"
    signature = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    body = "    return random.random() + numpy.random.rand() + torch.rand(()).item()\n"
    (folder / "reward.py").write_text(imports + signature + body)
    ranks = ["trainer.runtime=processes", "trainer.val_before_train=False", EVERY_STEP]
    jobs.train(folder, "whole", *ranks, "trainer.total_training_steps=2")
    random.seed(5)
    jobs.train(folder, "parts", *ranks, *stopping(folder, 1))
    random.seed(6)
    jobs.train(folder, "parts", *ranks, "trainer.total_training_steps=2")
    whole, parts = (jobs.metrics(folder, run) for run in ("whole", "parts"))
    for step in (1, 2):  # rewards come in any order, so the sum is rounded in another
        assert whole[step]["critic/score/mean"] == pytest.approx(parts[step]["critic/score/mean"], abs=1e-6)


NUM_KILLS = 20


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_a_run_killed_inside_its_saves_ends_like_one_that_never_was(folder: Path, background: bool):
    """Every child is killed at a random moment of a random save; the last one finishes."""
    how = [EVERY_STEP, "trainer.total_training_steps=12", "trainer.max_actor_ckpt_to_keep=2"]
    how.append("actor_rollout_ref.actor.optim.total_training_steps=12")
    jobs.train(folder, "whole", *how)
    how.append(f"actor_rollout_ref.actor.checkpoint.async_save={background}")
    rng, kills = random.Random(0), 0
    while kills < NUM_KILLS:
        kills += killed_in_a_save(folder, rng, how)
    jobs.train(folder, "killed", *how)
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
    original = Checkpoints.save

    def telling(*args: object) -> None:
        os.write(writer, b"s")
        original(*args)  # type: ignore[arg-type]

    Checkpoints.save = telling  # type: ignore[method-assign,assignment]
    jobs.train(folder, "killed", *extra)


def test_a_run_saves_before_its_machines_go_copies_what_it_saves_and_deletes_what_it_went_on_from(folder, monkeypatch):
    far, own = folder / "far" / "e2e", ["trainer.save_freq=-1", "trainer.del_local_ckpt_after_load=True"]
    own.append(f"trainer.default_hdfs_dir={folder / 'far'}")
    with monkeypatch.context() as renting:
        renting.setenv("SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", str(time.time() + 500))
        jobs.train(folder, "run", *own, "trainer.total_training_steps=1")
        assert not complete_steps(folder / "run")  # there is time enough
        jobs.train(folder, "run2", *own, "trainer.total_training_steps=2", "trainer.esi_redundant_time=600")
    assert complete_steps(folder / "run2") == complete_steps(far / "run2") == [1, 2]
    copied = checkpoint_tensors(far / "run2/global_step_2")
    assert copied.keys() == checkpoint_tensors(folder / "run2/global_step_2").keys()
    jobs.train(folder, "run2", *own, EVERY_STEP, "trainer.total_training_steps=3")
    assert complete_steps(folder / "run2") == [1, 3] and complete_steps(far / "run2") == [1, 2, 3]
