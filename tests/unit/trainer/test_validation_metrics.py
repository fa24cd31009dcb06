"""Validation metrics: names of the headline figures, and values against naive loops and closed forms."""

import dataclasses
import itertools
import json
import math
import random
import time
from collections import Counter

import numpy as np
import pytest
import torch

from verl.data.prompts import PromptRow
from verl.data.trajectory import Trajectory
from verl.trainer.ppo.batch_metrics import reward_part_metrics
from verl.trainer.ppo.sources.trajectory_source import RolloutBatch
from verl.trainer.ppo.training_run import dump_rollout_batch, left_out_lines, validation_metrics
from verl.trainer.ppo.validation_metrics import process_validation_metrics, subset_sizes


def metrics(values, uids=None, sources=None, **infos):
    uids = uids or ["u"] * len(values)
    return process_validation_metrics(sources or ["toy"] * len(values), uids, {"reward": values, **infos})


VALUES = [0.1, 0.9, 0.4, 0.4, 0.0, 1.0, 0.3]
PREDS = ["a", "b", "a", "c", "b", "c", "d"]


def elect(subset, values=VALUES, preds=PREDS):
    """The value of the first answer with the most frequent pred; most_common keeps the order of first appearance."""
    winner = Counter(preds[i] for i in subset).most_common(1)[0][0]
    return next(values[i] for i in subset if preds[i] == winner)


REDUCTIONS = {
    "best": lambda subset: max(VALUES[i] for i in subset),
    "worst": lambda subset: min(VALUES[i] for i in subset),
    "maj": elect,
}


@pytest.mark.parametrize("size", [2, 4, 7])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_best_worst_and_majority_are_those_of_all_subsets(size, name):
    results = [REDUCTIONS[name](subset) for subset in itertools.combinations(range(len(VALUES)), size)]
    expected = [np.mean(results), np.std(results)][: 1 if size == len(VALUES) else 2]  # one subset has no deviation
    out = metrics(VALUES, pred=PREDS)
    assert [v for k, v in out.items() if f"/{name}@{size}/" in k] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_majorities_of_random_answers_are_those_of_all_subsets(seed):
    generator = random.Random(seed)
    count = generator.randint(3, 9)
    values = [generator.choice([0.0, 1.0, generator.random()]) for _ in range(count)]
    preds = [generator.choice("abc") for _ in range(count)]
    out = metrics(values, pred=preds)
    for size in subset_sizes(count):
        results = [elect(subset, values, preds) for subset in itertools.combinations(range(count), size)]
        found = next(v for k, v in out.items() if k.endswith(f"reward/maj@{size}/mean"))
        assert found == pytest.approx(np.mean(results), abs=1e-12)


@pytest.mark.parametrize("size", [2, 8, 16])
def test_best_of_n_is_the_chance_that_one_of_n_is_right(size):
    values = [float(i in (3, 7)) for i in range(16)]
    expected = 1 - math.comb(14, size) / math.comb(16, size)
    found = next(v for k, v in metrics(values).items() if k.endswith(f"best@{size}/mean"))
    assert found == pytest.approx(expected, abs=1e-12)


def test_of_very_many_answers_only_all_vote():
    out = metrics([1.0, 0.0, 0.0] + [1.0] * 254, pred=["x", "y", "y"] + [str(i) for i in range(254)])
    assert [(k, v) for k, v in out.items() if "/maj@" in k] == [("val-core/toy/reward/maj@257/mean", 0.0)]


def test_names_of_the_surface_with_several_answers():
    out = metrics([0.0, 1.0, 1.0, 1.0], acc=[False, True, True, True], pred=["1", "2", "2", "2"])
    core = {"val-core/toy/acc/" + name for name in ("mean@4", "best@4/mean", "maj@4/mean")}
    assert {name for name in out if name.startswith("val-core")} == core
    both = [f"{kind}@{part}" for kind in ("best", "worst", "maj") for part in ("2/mean", "2/std", "4/mean")]
    expected = {f"{variable}/{name}" for variable in ("reward", "acc") for name in [*both, "mean@4", "std@4"]}
    assert {name.split("/toy/")[1] for name in out} == expected
    assert out["val-core/toy/acc/mean@4"] == 0.75
    assert out["val-aux/toy/reward/std@4"] == pytest.approx(math.sqrt(3) / 4)


def test_one_answer_per_prompt_has_a_mean_only():
    assert metrics([1.0, 0.0], uids=["a", "b"]) == {"val-core/toy/reward/mean@1": 0.5}


def test_mean_at_1_is_no_headline_beside_mean_at_16():
    out = metrics([1.0] * 17, uids=["a"] * 16 + ["b"])
    assert "val-core/toy/reward/mean@16" in out and "val-aux/toy/reward/mean@1" in out


def test_prompts_count_the_same_and_data_sources_stay_apart():
    out = metrics([1, 1, 0, 0, 5, 7], ["a", "a", "b", "b", "a", "a"], ["x"] * 4 + ["y"] * 2)
    assert out["val-core/x/reward/mean@2"] == 0.5 and out["val-core/y/reward/mean@2"] == 6.0


def test_the_order_of_answers_between_prompts_does_not_matter():
    values, uids = [1.0, 0.0, 0.5, 0.2, 0.3, 0.9], ["a", "b", "a", "b", "a", "b"]
    grouped = [values[i] for i in (0, 2, 4, 1, 3, 5)], ["a"] * 3 + ["b"] * 3
    assert metrics(values, uids) == pytest.approx(metrics(*grouped))


@pytest.mark.parametrize(("count", "sizes"), [(2, [2]), (3, [2, 3]), (4, [2, 4]), (5, [2, 4, 5]), (16, [2, 4, 8, 16])])
def test_subset_sizes_double_up_to_all(count, sizes):
    assert subset_sizes(count) == sizes


def test_columns_that_are_no_numbers_are_left_out():
    out = metrics([1.0, 0.0], note=["good", "bad"], parts=[{}, {}], pred=["1", "2"], length=[3, 5])
    assert {name.split("/")[2] for name in out} == {"reward", "length"}


def test_answers_without_a_value_are_left_out_and_counted():
    out = metrics([1.0, None, None, None], ["a", "a", "b", "b"])
    assert out == {"val-core/toy/reward/mean@1": 1.0, "val-aux/toy/reward/unscored": 3.0}


def test_columns_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="'acc' has 1 values for 2 answers"):
        metrics([1.0, 0.0], acc=[1.0])


def test_a_large_validation_takes_seconds():
    generator = random.Random(0)
    uids = [str(i // 16) for i in range(200 * 16)]
    values = [float(generator.random() < 0.4) for _ in uids]
    started = time.monotonic()
    metrics(values, uids, pred=[str(generator.randrange(5)) for _ in uids])
    assert time.monotonic() - started < 60  # about half a second on an idle core; a loop over draws takes minutes


def answer(group: int, reward: float | None, source: str = "toy", **extra) -> Trajectory:
    mask = torch.tensor([False, True])
    fields = {"group_id": group, "reward": reward, "data_source": source, "score_parts": extra}
    return Trajectory(torch.tensor([1, 2]), mask, torch.zeros(2), **fields)


def test_answers_without_a_score_are_counted_and_score_nothing():
    answers = [answer(0, 1.0, acc=1.0), answer(0, None), answer(1, 0.0, acc=0.0), answer(1, None, acc=1.0)]
    found = validation_metrics(RolloutBatch(answers, num_reward_errors=1))
    assert found["val-aux/toy/reward/mean@1"] == 0.5 and found["val-core/toy/acc/mean@1"] == 0.5
    assert found["val-aux/toy/reward/unscored"] == found["val-aux/toy/acc/unscored"] == 2.0
    assert found["val-aux/reward_errors"] == 1.0
    (line,) = left_out_lines(20, RolloutBatch(answers, num_reward_errors=1))
    assert f"step 20: 1 of {len(answers)} answers without a reward" in line and not left_out_lines(
        20, RolloutBatch(answers)
    )


def test_a_source_without_any_scored_answer_still_shows():
    found = validation_metrics(RolloutBatch([answer(0, 1.0), answer(1, None, "other"), answer(2, None, "other")]))
    assert found["val-aux/other/reward/unscored"] == 2.0 and "val-aux/toy/reward/unscored" not in found
    nothing = validation_metrics(RolloutBatch([answer(0, None)]))
    assert nothing["val-aux/toy/reward/unscored"] == 1.0


def test_a_dump_tells_what_scoring_and_the_agent_loop_left(tmp_path):
    said = {"response_text": "4", "num_turns": 4, "loop_fields": {"doubts": 1}, "loop_timings": {"tool_calls": 0.5}}
    answers = [
        dataclasses.replace(answer(0, 1.0, acc=True, why="right"), row=7, tool_rewards=[0.1], **said),
        dataclasses.replace(answer(0, None), row=7),
    ]
    row = PromptRow(7, "rows.jsonl line 8", [], "2+2", [1], False, "toy", "4")
    dump_rollout_batch(str(tmp_path), 3, RolloutBatch(answers, [row]))
    first, second = map(json.loads, (tmp_path / "3.jsonl").read_text().splitlines())
    scoring = {"input": "2+2", "output": "4", "gts": "4", "score": 1.0, "step": 3, "acc": True, "why": "right"}
    loop = {"agent_loop": {"tool_calls": 0.5}, "doubts": 1, "num_turns": 4, "tool_rewards": [0.1]}
    assert first == {**scoring, **loop, "data_source": "toy"}
    assert list(second) == list(first) and second["num_turns"] == 2 and second["acc"] is None


def test_numeric_parts_of_a_reward_are_metrics_of_training_over_the_answers_that_have_them():
    answers = [answer(0, 1.0, acc=True, form=0.5, why="x", pred=3), answer(0, 0.0, acc=False), answer(1, None, acc=9.0)]
    answers.append(dataclasses.replace(answer(1, 0.5), loop_fields={"doubts": 2}))
    found = reward_part_metrics(answers)
    assert {n: v for n, v in found.items() if "acc" in n} == {
        "reward/acc/mean": 0.5, "reward/acc/max": 1.0, "reward/acc/min": 0.0,
    }  # fmt: skip
    assert found["reward/form/mean"] == 0.5 and found["reward/doubts/min"] == 2.0 and len(found) == 9


def test_several_outputs_of_a_conversation_are_one_answer():
    def output(conversation: int, reward: float, pred: str) -> Trajectory:
        return dataclasses.replace(answer(0, reward, acc=reward > 0, pred=pred), conversation=conversation)

    answers = [output(0, 1.0, "a"), output(0, 1.0, "b"), output(0, 0.0, "c"), output(1, 0.0, "d"), output(2, 0.5, "d")]
    found = validation_metrics(RolloutBatch(answers))
    assert found["val-core/toy/acc/mean@3"] == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert found["val-aux/toy/reward/best@3/mean"] == pytest.approx(2 / 3)
    assert found["val-core/toy/acc/maj@3/mean"] == 0.0  # of outputs, the last pred votes
    parts = reward_part_metrics(answers)
    assert parts["reward/acc/mean"] == pytest.approx((2 / 3 + 0 + 1) / 3)
