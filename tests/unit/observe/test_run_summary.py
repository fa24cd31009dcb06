"""The summary of a run: best and last scores, and where the time went."""

import json
from pathlib import Path

from verl.observe.run_summary import RunSummary


def step(score: float, seconds: float) -> dict[str, float]:
    timings = {"timing_s/step": seconds, "timing_s/gen": seconds / 2, "timing_s/update_actor": seconds / 4}
    return {"critic/score/mean": score, "timing_s/agent_loop/generate": 9.0, **timings}


def test_the_best_score_is_the_highest_and_the_best_loss_the_lowest():
    summary = RunSummary()
    summary.add(0, {"val-core/math/reward/mean@1": 0.1})
    for number, score in enumerate((0.2, 0.75, 0.5), start=1):
        summary.add(number, step(score, 2.0))
    lines = summary.lines(complete=True)
    assert lines[0].startswith("done         3 steps in ") and lines[0].endswith("the last is step 3")
    assert lines[1] == "validation   score 0.1 before training (val-core/math/reward/mean@1)"
    assert lines[2] == "training     reward 0.5 at step 3, best 0.75 at step 2, first 0.2 at step 1 (critic/score/mean)"
    assert lines[3] == "time         generating 50%, updating 25%, the rest 25%"
    summary.add(4, step(0.5, 2.0) | {"timing_s/stop_profile": 30.0})  # beside the step, not inside
    assert summary.lines(complete=True)[3] == "time         generating 50%, updating 25%, the rest 25%"
    tuned = RunSummary()
    tuned.add(1, {"train/loss": 2.0, "timing_s/step": 1.0})
    tuned.add(2, {"train/loss": 3.0, "timing_s/step": 1.0})
    lines = tuned.lines(complete=False)
    assert lines[0].startswith("stopped      2 steps in ")
    assert lines[1].startswith("training     loss 3 at step 2, best 2 at step 1, first 2 at step 1")


def test_a_resumed_run_knows_the_scores_of_before_and_counts_its_own_steps(tmp_path: Path):
    lines = [{"step": 0, "data": {"val-core/a": 0.1}}, {"step": 1, "data": step(0.9, 2.0)}]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 2, "da')
    summary = RunSummary()
    summary.add_earlier(tmp_path / "run.jsonl")
    summary.add(2, step(0.5, 4.0))
    lines = summary.lines(complete=True)
    assert lines[0].startswith("done         1 steps in ") and lines[0].endswith("the last is step 2")
    assert lines[1] == "validation   score 0.1 before training (val-core/a)"
    assert lines[2] == "training     reward 0.5 at step 2, best 0.9 at step 1, first 0.9 at step 1 (critic/score/mean)"


def test_a_run_that_did_nothing_has_no_summary(tmp_path: Path):
    (tmp_path / "run.jsonl").write_text(json.dumps({"step": 1, "data": step(0.9, 2.0)}) + "\n")
    summary = RunSummary()
    assert summary.lines(complete=True) == []
    for metrics in (None, tmp_path / "none.jsonl", tmp_path / "run.jsonl"):
        summary.add_earlier(metrics)
    assert summary.lines(complete=True) == []
