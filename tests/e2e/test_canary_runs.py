"""A reward that changes while a run trains, or between its parts, stops it; and watching changes nothing else."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e import jobs
from verl.utils.errors import RewardError

DIGITS = "sum(c.isdigit() for c in solution_str) / 8"
FUNCTION = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return {}\n"
COUNTING = "calls = []\n" + FUNCTION.format("calls.append(1) or {digits} + (len(calls) > {after})")
DRAWING = "import random\n" + FUNCTION.format(f"{DIGITS} + random.random()")
CHANGING = "import os\n" + FUNCTION.format(f"{DIGITS} + os.path.exists({{path!r}})")
ASYNC = ["trainer.v1.trainer_mode=colocate_async", "async_training.staleness_threshold=1"]
SHORT = ["trainer.total_training_steps=3", "trainer.val_before_train=False", "trainer.save_freq=1"]
WEIGHTS = "global_step_3/actor/huggingface/model.safetensors"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    return tmp_path


def write_reward(folder: Path, text: str) -> None:
    """Another function in the file, which the next run reads as a new process would."""
    (folder / "reward.py").write_text(text)
    for name in [name for name in sys.modules if name.startswith("verl_user_reward_")]:
        del sys.modules[name]


def test_a_reward_that_changes_in_the_second_step_stops_the_run(folder: Path):
    calls_of_step_1 = 4 * 4 + 2 * 8  # its answers, and the fixed ones twice
    write_reward(folder, COUNTING.format(digits=DIGITS, after=calls_of_step_1))
    with pytest.raises(RewardError, match="step 2: the reward gives other scores than at step 1 to 8 of 8 fixed"):
        jobs.train(folder, "run", *SHORT)
    assert sorted(jobs.metrics(folder, "run")) == [1]


def test_a_resume_with_another_function_in_the_file_stops_until_it_is_wanted(folder: Path):
    jobs.train(folder, "run", *SHORT, "trainer.total_training_steps=1")
    write_reward(folder, FUNCTION.format(f"-{DIGITS}"))
    with pytest.raises(RewardError, match=r"step 2: [\s\S]*was changed since the checkpoint"):
        jobs.train(folder, "run", *SHORT)
    jobs.train(folder, "run", *SHORT, "trainer.total_training_steps=2", "reward.canary_size=0")
    jobs.train(folder, "run", *SHORT)
    assert sorted(jobs.metrics(folder, "run")) == [1, 2, 3]


def test_a_reward_that_changes_stops_an_asynchronous_run_and_its_resume(folder: Path):
    write_reward(folder, CHANGING.format(path=str(folder / "run" / "global_step_1")))
    message = r"step 2: the reward gives other scores than at step 1 to 8 of 8 fixed[\s\S]*train.jsonl line \d+"
    with pytest.raises(RewardError, match=message):
        jobs.train(folder, "run", *SHORT, *ASYNC)
    assert sorted(jobs.metrics(folder, "run")) == [1]
    with pytest.raises(RewardError, match=r"step 2: [\s\S]*was changed since the checkpoint"):
        jobs.train(folder, "run", *SHORT, *ASYNC)
    write_reward(folder, FUNCTION.format(DIGITS))
    jobs.train(folder, "run", *SHORT, *ASYNC)
    assert jobs.metrics(folder, "run")[3]["reward/canary/change/max"] == 0


FIXED = FUNCTION.format(DIGITS)
CASES = [(FIXED, []), (DRAWING, []), (FIXED, ASYNC)]


@pytest.mark.parametrize(("function", "mode"), CASES, ids=["fixed", "draws random numbers", "fixed, asynchronous"])
def test_the_weights_are_the_same_with_and_without(folder: Path, function: str, mode: list[str]):
    write_reward(folder, function)
    how = [*SHORT, *mode, "reward.num_workers=1"]  # one thread, so that numbers are drawn in the same order
    jobs.train(folder, "with", *how)
    jobs.train(folder, "without", *how, "reward.canary_size=0")
    ours, theirs = (load_file(folder / run / WEIGHTS) for run in ("with", "without"))
    assert ours and all(torch.equal(ours[name], theirs[name]) for name in ours)
    seen, unseen = (jobs.without_timings(jobs.metrics(folder, run)) for run in ("with", "without"))
    canary = {name: seen[3].pop(name) for name in list(seen[3]) if name.startswith("reward/canary/")}
    assert seen[3] == unseen[3]
    assert (canary["reward/canary/change/max"] > 0) == (function == DRAWING) and canary["reward/canary/failed"] == 0
