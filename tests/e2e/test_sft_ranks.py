"""Fine-tuning over two ranks: the same program under torchrun, the same result as one rank."""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.run import main as torchrun

from tests.conftest import ROOT
from tests.e2e import jobs, test_sft
from tests.e2e.test_sft import config, train
from tests.ranks import RankError, run_ranks
from tests.tiers import slow
from verl.commands.quickstart.addition_task import CHARACTERS
from verl.commands.quickstart.small_model import make_model
from verl.config import ConfigError
from verl.trainer import sft_trainer
from verl.trainer.run.checkpoints import complete_steps
from verl.trainer.sft import ranks as sft_ranks
from verl.trainer.sft_trainer import run_sft
from verl.utils.errors import DataError
from verl.workers.engine_worker import EngineWorker

EXACT = ["engine.model_dtype=fp64", "engine.dtype=float64", "optim.lr_scheduler_type=cosine", "trainer.test_freq=2"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    monkeypatch.setenv("MASTER_PORT", "1")  # the ranks have met already
    jobs.prepare(tmp_path)
    test_sft.write_conversations(tmp_path, 8)
    return tmp_path


def rank_run(folder: Path, run: str, *extra: str) -> dict[str, float]:
    return run_sft(config(folder, run, *extra))


def rank_that_needs_more(folder: Path) -> float | None:
    with pytest.MonkeyPatch.context() as patch:
        needs = {"perf/cpu_memory_used_gb": 1000.0 * (dist.get_rank() + 1)}
        patch.setattr("verl.workers.engine_worker.memory_metrics", lambda *_: needs)
        return rank_run(folder, "run", "trainer.total_training_steps=1").get("train/perf/cpu_memory_used_gb")


def weights(folder: Path, run: str, step: int) -> dict[str, torch.Tensor]:
    files = (folder / run / f"global_step_{step}" / "huggingface").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_close(folder: Path, expected: str, found: str, step: int) -> None:
    ours, theirs = weights(folder, expected, step), weights(folder, found, step)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-10, atol=1e-12)
    first, second = (jobs.metrics(folder, run) for run in (expected, found))
    assert first.keys() == second.keys()
    for number, row in first.items():
        of_the_machine = ("train/perf/", "train/mfu")
        names = [name for name in row if name.startswith(("train/", "val/")) and not name.startswith(of_the_machine)]
        assert {"train/loss", "train/grad_norm", "train/lr", "train/global_tokens"} <= set(names)
        for name in names:
            assert second[number][name] == pytest.approx(row[name], rel=1e-10), (number, name)


WAYS = {
    "by tokens": ["data.train_batch_size=5", "data.max_token_len_per_gpu=64"],
    "by number, in order": [
        "data.train_batch_size=3",
        "data.use_dynamic_bsz=False",
        "data.micro_batch_size_per_gpu=1",
        "trainer.balance_batch=False",
    ],
    "fewer rows than ranks": ["data.train_batch_size=1"],
}


@pytest.mark.parametrize("how", ["by tokens", *slow(list(WAYS)[1:])])
def test_two_ranks_give_the_result_of_one(folder: Path, how: str):
    extra = [*EXACT, *WAYS[how], "trainer.total_training_steps=3"]
    train(folder, "one", *extra)
    run_ranks(2, rank_run, folder, "two", *extra)
    assert_close(folder, "one", "two", 3)
    for run, ranks in (("one", 1), ("two", 2)):
        for row in jobs.metrics(folder, run).values():
            tokens = row["train/perf/throughput"] * row["timing_s/update"] * ranks  # per second and device
            assert tokens == pytest.approx(row["train/global_tokens"])


@pytest.mark.slow
def test_two_ranks_that_share_every_sequence_give_the_result_of_one(folder: Path):
    extra = [*EXACT, "data.train_batch_size=3", "data.max_token_len_per_gpu=64", "trainer.total_training_steps=3"]
    train(folder, "one", *extra)
    run_ranks(2, rank_run, folder, "two", *extra, "engine.ulysses_sequence_parallel_size=2")
    assert_close(folder, "one", "two", 3)


OPTIONS = {
    "the original FSDP": ["engine.strategy=fsdp"],
    "parameters kept gathered, layers recomputed, saved in the background": [
        "engine.reshard_after_forward=False",
        "model.enable_gradient_checkpointing=True",
        "checkpoint.async_save=True",
    ],
    "adapters": ["model.lora_rank=4"],
    "parameters and optimiser on the host": ["engine.offload_policy=True", "engine.optimizer_offload=True"],
}


@pytest.mark.parametrize("option", ["adapters", *slow(name for name in OPTIONS if name != "adapters")])
def test_the_performance_options_of_the_engine_leave_the_result_alone(folder: Path, option: str):
    extra = [*EXACT, "data.train_batch_size=4", "data.max_token_len_per_gpu=64", "trainer.total_training_steps=2"]
    train(folder, "one", *extra, *[key for key in OPTIONS[option] if "lora" in key])
    run_ranks(2, rank_run, folder, "two", *extra, *OPTIONS[option])
    assert_close(folder, "one", "two", 2)


def test_a_run_over_ranks_resumes_with_another_number_of_them(folder: Path):
    extra = [*EXACT, "data.train_batch_size=3", "optim.total_training_steps=4"]
    train(folder, "one", *extra, "trainer.total_training_steps=4")
    run_ranks(2, rank_run, folder, "two", *extra, "trainer.total_training_steps=2")
    make_model(folder / "other", CHARACTERS, seed=9, hidden=32, layers=1)
    # nothing of it is left where the checkpoint is loaded
    extra += [f"model.path={folder / 'other'}", "trainer.on_existing=resume"]
    train(folder, "two", *extra, "trainer.total_training_steps=3")
    run_ranks(2, rank_run, folder, "two", *extra, "trainer.total_training_steps=4")
    assert_close(folder, "one", "two", 4)


def run_that_is_killed(folder: Path, number: int, *extra: str) -> None:
    """One of the ranks is killed at a random moment of its first, second or third save."""
    rng, original, saves = random.Random(number), EngineWorker.save, itertools.count(1)
    victim, last, delay_s = rng.randrange(2), rng.choice([1, 2, 3]), rng.uniform(0, 0.06)

    def save(*args: Any) -> None:
        if dist.get_rank() == victim and next(saves) == last:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        original(*args)

    EngineWorker.save = save  # type: ignore[method-assign]
    rank_run(folder, "killed", *extra)


@pytest.mark.slow
def test_ranks_killed_inside_saves_in_the_background_go_on_from_the_newest_whole_checkpoint(folder: Path):
    extra = ["data.train_batch_size=3", "trainer.save_freq=1", "optim.total_training_steps=90"]
    steps = [0]
    for number in range(6):
        background = [*extra, "checkpoint.async_save=True", "trainer.total_training_steps=90"]
        with pytest.raises(RankError, match=r"died \(SIGKILL\)|Connection (closed|reset)|Broken pipe"):
            run_ranks(2, run_that_is_killed, folder, number, *background)
        steps.append(max(complete_steps(folder / "killed"), default=0))
    assert steps == sorted(steps) and 1 < steps[-1] < 80
    extra.append(f"trainer.total_training_steps={steps[-1] + 2}")
    for run in ("whole", "killed"):
        run_ranks(2, rank_run, folder, run, *extra)
    assert_close(folder, "whole", "killed", steps[-1] + 2)
    assert [path for path in (folder / "killed").iterdir() if path.name.endswith(".tmp")] == []


def test_the_command_starts_the_ranks_it_is_asked_for_and_only_the_first_speaks(folder: Path):
    extra = [*EXACT, "trainer.total_training_steps=2", "trainer.logger=[console,file]"]
    train(folder, "one", *extra)
    command = [sys.executable, "-m", "verl.trainer.sft_trainer", *test_sft.overrides(folder, "two", *extra)]
    command += ["trainer.n_gpus_per_node=2", "trainer.device=cpu"]
    (folder / "tmp").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")}
    environment.pop("MASTER_PORT")
    done = subprocess.run(
        [*command, "trainer.n_gpus_per_node=2", "trainer.device=cpu"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list((folder / "tmp").iterdir())
    assert done.stdout.count("step:1 ") == done.stdout.count("saved ") == 1
    assert_close(folder, "one", "two", 2)
    wrong = [*command, "trainer.resume_mode=resume_path"]
    done = subprocess.run(wrong, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode and done.stderr.count("error: trainer.resume_mode=resume_path needs") == 1


KILLER = """
import os, signal, time
from verl.workers.engine_worker import EngineWorker

update, calls = EngineWorker.update, []

def disturb_one(*args):
    calls.append(args)
    if len(calls) == 2 and os.environ["RANK"] == "{rank}":
        {what}
    return update(*args)

EngineWorker.update = disturb_one
"""
KILLED, STOPPED = (f"os.kill(os.getpid(), signal.{name})" for name in ("SIGKILL", "SIGSTOP"))


def run_that_loses_a_rank(
    folder: Path, *launcher: str, extra: tuple[str, ...] = (), rank: int = 1, what: str = KILLED
) -> tuple[int, str]:
    (folder / "killer.py").write_text(KILLER.format(rank=rank, what=what))
    words = test_sft.overrides(folder, "run", "trainer.total_training_steps=9", "model.external_lib=killer", *extra)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    environment.pop("MASTER_PORT")
    command = [sys.executable, "-m", *launcher, "verl.trainer.sft_trainer", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_a_lost_rank_is_named_with_its_signal_and_call(folder: Path):
    code, stderr = run_that_loses_a_rank(folder, extra=("trainer.n_gpus_per_node=2", "trainer.device=cpu"))
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and "Traceback" not in stderr, stderr
    assert errors[0].startswith("error: rank 1 failed in trained.update(): its process was killed by SIGKILL")


def test_a_signal_for_one_rank_of_a_users_torchrun_ends_all_after_the_step_which_is_saved(folder: Path):
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    code, stderr = run_that_loses_a_rank(folder, *launcher, what="os.kill(os.getpid(), signal.SIGTERM)")
    assert code and "error: stopped by SIGTERM after step 2 of 9, which is saved in" in stderr, stderr
    assert complete_steps(folder / "run") == [2] and "lost another rank" not in stderr


STALLS = [
    (0, STOPPED, (), "it is stopped: somebody sent it SIGSTOP"),
    (1, "time.sleep(600)", ("trainer.n_gpus_per_node=2",), "it has not entered the collective in which others wait"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "what", "own_ranks", "says"), STALLS)
def test_ranks_that_stall_end_and_the_culprit_is_named_once(
    folder: Path, rank: int, what: str, own_ranks: tuple[str, ...], says: str
):
    launcher = () if own_ranks else ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    extra = (*own_ranks, "trainer.device=cpu", "trainer.stall_timeout_s=8")  # rank 0 prints a line every 5 s
    code, stderr = run_that_loses_a_rank(folder, *launcher, extra=extra, rank=rank, what=what)
    assert code == (2 if own_ranks else 1) and stderr.count("error: rank ") == (1 if own_ranks else 2), stderr
    method = "trained.update" if own_ranks else "fit"
    assert f"error: rank {rank} failed in {method}():\n{says}" in stderr and "(trainer.stall_timeout_s=8)" in stderr
    assert f"\nrank {1 - rank} waits in " in stderr
    if own_ranks:
        assert "in disturb_one(): time.sleep(600)\n" in stderr and "SIGKILL" not in stderr
    else:
        assert f"error: rank {1 - rank} lost another rank in update()" in stderr


@pytest.mark.slow
def test_ranks_of_a_users_torchrun_name_the_call_in_which_they_lost_one(folder: Path):
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    code, stderr = run_that_loses_a_rank(folder, *launcher)
    [line] = [line for line in stderr.splitlines() if line.startswith("error: rank 0")]
    report = folder / "run" / "rank_0_lost_rank.txt"
    assert line == f"error: rank 0 lost another rank in update(): {report}"
    assert code == 1 and "[rank0]" not in stderr and "Traceback" in report.read_text()
    assert "Root Cause" in stderr, stderr
    root_cause = stderr[stderr.index("Root Cause") :]
    assert "Signal 9 (SIGKILL)" in root_cause and "rank      : 1" in root_cause
    if "rank      : 0" in stderr:  # it had ended, too, when torchrun looked
        assert f"traceback : {line.removeprefix('error: ')}" in stderr


def test_a_mistake_that_only_one_rank_meets_is_not_swallowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def run(config: Any, found: Any) -> None:
        assert found.rows == []  # the first rank looks
        raise DataError("rows.jsonl does not exist on this machine")

    waited: list[float] = []
    monkeypatch.setattr("verl.trainer.sft_trainer.run_sft", run)
    monkeypatch.setattr("verl.trainer.sft_trainer.time.sleep", waited.append)
    monkeypatch.setattr("verl.runtime.rank.end_with_parent", lambda parent: None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert sft_trainer.main([]) == 2 and len(waited) == 1
    assert capsys.readouterr().err == "error: rows.jsonl does not exist on this machine\n"


def test_memory_is_that_of_the_rank_that_needs_most(folder: Path):
    assert run_ranks(2, rank_that_needs_more, folder) == [2000.0, None]


def test_ranks_are_started_only_where_they_are_missing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)

    def missing(*extra: str) -> int:
        return sft_ranks.num_ranks_to_start(config(folder, "run", "trainer.device=cpu", *extra))

    assert missing() == 0 and missing("trainer.n_gpus_per_node=3") == 3 and missing("trainer.runtime=processes") == 1
    with pytest.raises(ConfigError, match=r"needs trainer.runtime=ray .* torchrun --nnodes=2 --nproc-per-node"):
        missing("trainer.nnodes=2", "trainer.runtime=processes")
    monkeypatch.setattr(sft_ranks.ray_cluster, "is_installed", lambda: True)
    assert missing("trainer.runtime=ray") == 1 and missing("trainer.nnodes=2", "trainer.n_gpus_per_node=3") == 6
    monkeypatch.setattr(sft_ranks.ray_cluster, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match="torchrun --nnodes=2"):
        missing("trainer.nnodes=2")
    with pytest.raises(ConfigError, match="needs Ray, which is not installed"):
        missing("trainer.runtime=ray")
    with pytest.raises(ConfigError, match=r"runtime=inline is one process, but trainer.n_gpus_per_node=2"):
        missing("trainer.runtime=inline", "trainer.n_gpus_per_node=2")
    for name, value in {"WORLD_SIZE": 4, "RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, str(value))
    assert missing() == 0 and missing("trainer.nnodes=2", "trainer.n_gpus_per_node=2") == 0
    with pytest.raises(ConfigError, match="n_gpus_per_node=4, but torchrun started 2"):
        missing("trainer.n_gpus_per_node=4")


def test_threads_of_ranks_started_by_torchrun_sleep_while_they_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program, shown = tmp_path / "rank.py", tmp_path / "shown"
    program.write_text(f"import os, verl; open({str(shown)!r}, 'a').write(os.environ['OMP_WAIT_POLICY'] + ' ')")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    torchrun(["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", f"--log-dir={tmp_path}", str(program)])
    assert shown.read_text() == "PASSIVE PASSIVE "
