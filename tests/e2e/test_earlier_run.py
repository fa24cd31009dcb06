"""Runs that an earlier version began go on as if nothing had changed, and its ledger opens."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e import jobs
from tests.e2e.test_resume import CRITIC
from verl.observe.ledger import ledger_steps, read_ledger
from verl.trainer import sft_trainer

EARLIER = Path(__file__).resolve().parents[1] / "data" / "earlier_run"
TO_STEP_4 = ["trainer.save_freq=2", "trainer.total_training_steps=4"]
PPO = [*TO_STEP_4, "trainer.test_freq=-1", "trainer.val_before_train=False"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the earlier runs, which is also where their relative paths point from."""
    shutil.copytree(EARLIER, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", "metrics")
    return Path(".")


def assert_same_weights(model: Path, expected: str) -> None:
    found = {name: value for file in model.glob("*.safetensors") for name, value in load_file(file).items()}
    wanted = load_file(EARLIER / "expected" / f"{expected}.safetensors")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_metrics(folder: Path, run: str) -> None:
    """Steps 3 and 4 as they were logged by the run that was not interrupted, under the same names."""
    lines = (EARLIER / "expected" / f"{run}.jsonl").read_text().splitlines()
    wanted = jobs.without_timings({row["step"]: row["data"] for row in map(json.loads, lines)})
    found = jobs.without_timings(jobs.metrics(folder, run))
    assert set(found) == {3, 4}
    for step, metrics in found.items():
        assert wanted[step].keys() <= metrics.keys()
        for name in wanted[step]:
            is_cost = "mfu" in name or "balanced" in name  # a prompt of several answers was computed for each of them
            assert is_cost or metrics[name] == pytest.approx(wanted[step][name], rel=1e-3, abs=1e-4), name


def test_a_run_with_a_critic_goes_on(folder: Path) -> None:
    jobs.train(folder, "critic", *CRITIC, *PPO)
    for role in ("actor", "critic"):
        assert_same_weights(folder / "critic" / "global_step_4" / role / "huggingface", f"critic_run_{role}")
    assert_same_metrics(folder, "critic")


def test_a_run_on_two_ranks_goes_on(folder: Path) -> None:
    jobs.train(folder, "ranks", *PPO, "trainer.runtime=processes", "trainer.n_gpus_per_node=2", "trainer.device=cpu")
    assert_same_weights(folder / "ranks" / "global_step_4" / "actor" / "huggingface", "ranks")
    assert_same_metrics(folder, "ranks")


def test_fine_tuning_goes_on(folder: Path) -> None:
    arguments = ["model.path=model", "data.train_files=data/worked.jsonl", "data.train_batch_size=2"]
    arguments += ["data.max_length=40", "optim.lr=1e-2", "engine.dtype=float32", "trainer.logger=[file]", *TO_STEP_4]
    arguments += ["trainer.project_name=e2e", "trainer.experiment_name=sft", "trainer.default_local_dir=sft"]
    assert sft_trainer.main(arguments) == 0
    assert_same_weights(folder / "sft" / "global_step_4" / "huggingface", "sft")
    assert_same_metrics(folder, "sft")


@pytest.mark.parametrize("run", ["critic", "ranks"])
def test_its_ledger_opens(run: str) -> None:
    assert ledger_steps(EARLIER / run / "ledger") == [1, 2, 3, 4]
    step = read_ledger(EARLIER / run / "ledger", 2)
    assert step.batch.num_sequences == 16 and len(step.stop_reasons) == 16
    assert step.batch.require("advantages", "the run").isfinite().all()
