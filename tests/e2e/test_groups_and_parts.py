"""Dynamic sampling and rewards of several parts in real runs of three steps."""

import math
from pathlib import Path

import pytest

from tests.e2e import jobs
from tests.e2e.jobs import ARR
from verl.commands import report
from verl.observe.ledger import read_ledger

SHORT = ("trainer.val_before_train=False", "data.train_batch_size=2", f"{ARR}.actor.ppo_mini_batch_size=2")
FILTER = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc")
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    digits = sum(c.isdigit() for c in solution_str)
    taught = int(ground_truth) % 3 > 0  # the answers to the other prompts are all equal
    return {"score": digits / 8, "acc": float(taught and digits % 2), "length": len(solution_str) / 8}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def steps(count: int) -> tuple[str, ...]:
    return (*SHORT, f"trainer.total_training_steps={count}", "trainer.save_freq=1")


def rows_of(folder: Path, run: str, step: int) -> list[int]:
    rows = read_ledger(folder / run / "ledger", step).batch["rows"].tolist()
    assert len(rows) == 8 and len(set(rows)) == 2
    return rows


def test_a_run_of_dynamic_sampling_goes_on_where_it_was_stopped(folder: Path):
    jobs.train(folder, "whole", *steps(3), *FILTER)
    jobs.train(folder, "cut", *steps(2), *FILTER)
    jobs.train(folder, "cut", *steps(3), *FILTER)
    whole, cut = (jobs.without_timings(jobs.metrics(folder, run)) for run in ("whole", "cut"))
    assert whole == cut
    dropped = [whole[step]["training/filter_groups/filtered_reward_counts"] for step in (1, 2, 3)]
    assert sum(dropped) > 0 and all(row["training/rollout_failure/evicted_samples"] == 0 for row in whole.values())
    assert [whole[step]["training/filter_groups/evicted_samples"] for step in (1, 2, 3)] == [4 * n for n in dropped]
    for step in (1, 2, 3):
        assert whole[step]["reward/acc/min"] == 0 and whole[step]["reward/acc/max"] == 1
        assert rows_of(folder, "whole", step) == rows_of(folder, "cut", step)


def test_how_many_prompts_are_answered_at_once_changes_no_batch(folder: Path):
    jobs.train(folder, "rounds", *steps(1), *FILTER)
    jobs.train(folder, "stream", *steps(1), *FILTER, "data.gen_batch_size=1")
    jobs.train(folder, "wide", *steps(1), *FILTER, "algorithm.filter_groups.max_inflight_gen_batches=4")
    rows = [rows_of(folder, run, 1) for run in ("rounds", "stream", "wide")]
    assert rows[0] == rows[1] == rows[2]


def test_two_ranks_train_on_the_same_groups(folder: Path):
    inflight = "algorithm.filter_groups.max_inflight_gen_batches=4"  # so that each step aborts answers
    jobs.train(folder, "one", *steps(2), *FILTER)
    jobs.train(folder, "two", *steps(2), *FILTER, inflight, "trainer.device=cpu", "trainer.n_gpus_per_node=2")
    for step in (1, 2):
        assert rows_of(folder, "one", step) == rows_of(folder, "two", step)
    assert all(row["training/filter_groups/discarded_surplus_samples"] for row in jobs.metrics(folder, "two").values())


def test_the_parts_of_a_reward_are_trained_by_weight_logged_and_drawn(folder: Path):
    jobs.train(folder, "parts", *steps(3), "reward.weights.acc=1", "reward.weights.length=-0.5")
    for row in jobs.metrics(folder, "parts").values():
        parts = row["reward/acc/mean"] - 0.5 * row["reward/length/mean"]
        assert math.isclose(row["critic/score/mean"], parts, abs_tol=1e-6)
        assert row["critic/score/mean"] != row["reward/score/mean"]
    assert report.main([str(folder / "parts")]) == 0
    page = (folder / "parts" / "report.html").read_text()
    assert all(f"reward/{part}/mean" in page for part in ("acc", "length", "score"))
