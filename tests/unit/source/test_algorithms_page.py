"""docs/train/algorithms.md is that of the code and of the last soak, and its figures are what their names say."""

import re
import statistics

import pytest

from scripts import algorithms_page
from scripts.algorithms_page import (
    KEYS,
    PAGE,
    built_in,
    cpu,
    interval,
    one_line,
    page,
    picture,
    read_record,
    result_row,
)
from scripts.soak.algorithms import CURVES, VALIDATION, WINDOW, facts, read_points, write_points
from verl.algorithms.advantages import ADVANTAGES
from verl.algorithms.losses import POLICY_LOSSES
from verl.config import RunConfig, schema


def case(name: str, seed: int, final: float) -> dict:
    curves = {metric: write_points([[1, 0.2], [2, 0.5 + 0.1 * seed]]) for metric in CURVES}
    return {"recipe": name, "seed": seed, "start": 0.2, "final": final, "steps_to_60": None, "curves": curves}


def test_the_committed_page_is_that_of_the_code_and_the_record():
    expected = page(read_record("algorithms"), read_record("ppo"))
    assert PAGE.read_text(encoding="utf-8") == expected, "the code has changed; run: make docs"


def test_every_estimator_and_loss_says_what_it_is_for():
    items = {**built_in(ADVANTAGES), **built_in(POLICY_LOSSES)}
    missing = [name for name, item in items.items() if not re.search(r"(^|[.)] )For ", one_line(item.function))]
    assert not missing, "a sentence of the docstring must begin with 'For'"


def test_every_estimator_and_loss_has_a_source_and_keys_that_exist():
    items = {**built_in(ADVANTAGES), **built_in(POLICY_LOSSES)}
    assert len(items) >= 24 and KEYS.keys() <= items.keys()
    for name, item in items.items():
        assert "arXiv" in one_line(item.function) or "Same source" in one_line(item.function), name
    known = schema.keys(RunConfig)
    full = [key.replace("actor.", "actor_rollout_ref.actor.", 1) for keys in KEYS.values() for key in keys]
    assert [key for key in full if key not in known and not key.endswith(".*")] == []


def test_the_facts_of_a_run_are_those_of_its_metrics():
    def record(step: int) -> dict:
        data = {metric: step / 100 for metric in CURVES.values()}
        return {"step": step, "data": data | ({VALIDATION: step / 50} if step in (1, 50) else {})}

    found = facts([{"step": 0, "data": {VALIDATION: 0.25}}, *map(record, range(1, 101))])
    assert (found["start"], found["final"], found["steps"]) == (0.25, 1.0, 100)
    assert found["steps_to_60"] == 60 + WINDOW // 2  # the mean of its window is 0.6
    length = read_points(found["curves"]["length"])
    assert length[0] == (5, pytest.approx(0.03)) and length[-1][0] == 100
    assert facts([{"step": 0, "data": {VALIDATION: 0.25}}, *map(record, range(1, 41))])["steps_to_60"] is None


def test_an_interval_is_students():
    values = [0.9, 0.95, 0.97]
    half = 4.303 * statistics.stdev(values) / 3**0.5
    assert interval(values) == f"{statistics.mean(values):.1%} ± {half:.1%}"
    assert interval([0.5]) == "50.0% (one seed)"


def test_a_recipe_that_gains_little_is_marked_and_one_that_is_missing_is_named():
    assert "below 30%" in result_row("grpo", [case("grpo", seed, 0.4) for seed in (1, 2)])
    assert "gains" not in result_row("grpo", [case("grpo", seed, 0.9) for seed in (1, 2)])
    assert "(one seed gains 20.0%)" in result_row("grpo", [case("grpo", 1, 0.9), case("grpo", 2, 0.4)])
    record = {"commit": "abc", "date": "2000-01-01", "cases": {"grpo, seed 1": case("grpo", 1, 0.9)}}
    text = page(record, {})
    assert "| `grpo` | 1 | 20.0% (one seed) | 90.0% (one seed) |" in text
    missing = text[text.index("Not measured yet") :]
    assert "`grpo`" not in missing and all(f"`{name}`" in missing for name in cpu.RECIPES if name != "grpo")


def test_the_page_compares_ppo_with_grpo():
    cases = {f"{name} {seed}": case(name, seed, final) for name, seed, final in (("ppo", 1, 0.8), ("ppo", 3, 0.9))}
    cases["grpo 1"] = case("grpo", 1, 0.95)
    text = " ".join(page({}, {"cases": cases}).split())
    assert "ppo ends at 85.0% in the mean of 2 seeds, grpo at 95.0%." in text
    assert "explains 20% of the variance of the returns in the first steps and 70% in the last" in text


def test_the_picture_has_a_line_a_seed_in_each_cell():
    record = {"cases": {f"grpo, seed {seed}": case("grpo", seed, 0.9) for seed in (1, 2, 3)}}
    drawn = picture(record)
    assert drawn.count('class="values"') == 3 * len(algorithms_page.METRICS) and "grpo: entropy" in drawn
