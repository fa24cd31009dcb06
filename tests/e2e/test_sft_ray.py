"""Fine-tuning whose ranks are Ray's actors is fine-tuning on ranks of torch.distributed."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.e2e import jobs, test_sft
from tests.e2e.test_sft_ranks import EXACT, assert_close, rank_run
from tests.ranks import run_ranks
from tests.small_ray import small_ray
from verl.trainer import sft_trainer_ray
from verl.trainer.run.checkpoints import complete_steps

pytestmark = pytest.mark.ray
TWO_RANKS = ["trainer.device=cpu", "trainer.n_gpus_per_node=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("sft")
    jobs.prepare(folder)
    test_sft.write_conversations(folder, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_FILE_LOGGER_ROOT", str(folder / "metrics"))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(ROOT))  # of the ranks
        with small_ray():
            yield folder


def test_two_ranks_of_ray_give_the_losses_of_two_processes(folder: Path, capfd: pytest.CaptureFixture[str]):
    extra = [*EXACT, "data.train_batch_size=3", "data.max_token_len_per_gpu=64", "trainer.total_training_steps=3"]
    words = [word.replace(f"{folder}/ray", "ray") for word in test_sft.overrides(folder, "ray", *extra, *TWO_RANKS)]
    with pytest.MonkeyPatch.context() as patch:
        (folder / "started_here").mkdir()
        patch.chdir(folder / "started_here")  # the ranks write there too
        assert sft_trainer_ray.main([*words, "trainer.logger=[console,file]"]) == 0
    (folder / "started_here" / "ray").rename(folder / "ray")
    said = capfd.readouterr().out
    assert "1 node, 4 CPU, asked for 2" in said and "device       cpu, 2 ranks\n" in said
    assert [said.count(f"\nstep:{step} ") for step in (1, 2, 3)] == [1, 1, 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", "1")  # the ranks have met already
        run_ranks(2, rank_run, folder, "processes", *extra)
    assert_close(folder, "processes", "ray", 3)


def test_a_signal_reaches_the_ranks_which_finish_the_step_and_save(folder: Path, capfd: pytest.CaptureFixture[str]):
    def stop_after_first_step() -> None:
        metrics = folder / "metrics" / "e2e" / "stopped.jsonl"
        while not (metrics.exists() and "train/loss" in metrics.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_after_first_step, daemon=True).start()
    words = test_sft.overrides(folder, "stopped", "trainer.total_training_steps=100000")
    assert sft_trainer_ray.main([*words, *TWO_RANKS]) == 128 + signal.SIGTERM
    [step] = complete_steps(folder / "stopped")
    out, err = capfd.readouterr()
    assert "SIGTERM: stopping after this step\n" in out
    assert f"error: stopped by SIGTERM after step {step} of 100000, which is saved in" in err


def test_a_rank_that_fails_is_named(folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    (folder / "here").mkdir()
    (folder / "here" / "only_here.py").write_text("")
    monkeypatch.syspath_prepend(folder / "here")  # the ranks do not look there
    words = test_sft.overrides(folder, "failed", "model.external_lib=only_here", "trainer.total_training_steps=9")
    assert sft_trainer_ray.main([*words, *TWO_RANKS]) == 2
    out, err = capfd.readouterr()
    assert "asked for 2" in out
    assert re.search(r"error: rank [01] failed in __init__\(\): model.external_lib=only_here: there is no module", err)


def test_a_rank_that_does_not_move_is_named(folder: Path, capfd: pytest.CaptureFixture[str]):
    words = [
        "model.external_lib=tests.e2e.sleeping_rank",
        "trainer.total_training_steps=9",
        "trainer.stall_timeout_s=3",
    ]
    start = time.monotonic()
    assert sft_trainer_ray.main([*test_sft.overrides(folder, "stalled", *words), *TWO_RANKS]) == 2
    assert time.monotonic() - start < 120
    said = capfd.readouterr().err
    assert "rank 1 failed in trained.update():\nit has not entered the collective in which others wait" in said
    assert "sleeping_rank.py:16 in step_or_sleep" in said
