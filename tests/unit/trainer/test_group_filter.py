"""Dynamic sampling: which groups a step trains on follows from the data alone, not from which answers come first."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl.agent.single_turn import single_turn
from verl.commands.quickstart.small_model import make_tokenizer
from verl.config import DataConfig
from verl.data.prompt_sampler import PromptSampler
from verl.data.prompts import load_prompts
from verl.data.trajectory import Trajectory
from verl.rewards.base import Score
from verl.trainer.ppo.sources.group_filter import GroupFilter, GroupRules, verdict_on
from verl.trainer.ppo.sources.trajectory_source import RolloutBatch, RolloutCollector, SyncSource
from verl.utils.errors import RewardError, VerlError
from verl.workers.rollout.base import Completion, RolloutEngine, SamplingParams

N, ROWS, SAMPLES = 3, 24, SamplingParams(n=3, max_tokens=4)


class LateEngine(RolloutEngine):
    """Answers "0", "1" and "2" in an order that `seed` decides; remembers what it was asked and what was aborted."""

    version = 0

    def __init__(self, seed: int):
        self.random, self.asked, self.cancelled = random.Random(seed), [], []
        self.in_flight = self.most_in_flight = self.num_aborts = 0

    async def generate(self, request: Any) -> list[Completion]:
        self.asked.append(request.request_id)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            for _ in range(self.random.choice([1, 2, 6, 40])):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.in_flight -= 1
        return [Completion([number], [-1.0], "stop", (0, 0)) for number in range(request.sampling.n)]

    async def update_weights(self, weights: Any, version: int) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def abort(self, request_id: int | None = None) -> None:
        self.num_aborts += 1


class ByRow:
    """`acc` of the answers of a row, as the row's ground truth lists them; null abstains. The score adds noise."""

    async def score(self, inputs: Any) -> list[Score]:
        await asyncio.sleep(0)
        accs = [json.loads(item.ground_truth)[int(item.solution_str)] for item in inputs]
        return [
            Score(None if a is None else a + int(i.solution_str) / 8, {"acc": a})
            for a, i in zip(accs, inputs, strict=True)
        ]


def source(
    tmp_path: Path, truths: list[list[float | None]], rules: GroupRules, seed: int = 0, **more: Any
) -> SyncSource:
    lines = [
        json.dumps({"prompt": f"{i}=", "data_source": "x", "reward_model": {"ground_truth": json.dumps(truth)}}) + "\n"
        for i, truth in enumerate(truths)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    tokenizer = make_tokenizer("0123456789=")
    rows = load_prompts(str(tmp_path / "rows.jsonl"), DataConfig(max_prompt_length=64), tokenizer)
    digits = SimpleNamespace(decode=lambda ids, **_: str(ids[0]))
    runner = SimpleNamespace(answer=lambda *of_row: single_turn(*of_row[:4]))  # without traces
    collector = RolloutCollector(LateEngine(seed), ByRow(), digits, runner)  # type: ignore[arg-type]
    return SyncSource(PromptSampler(rows, seed=3), collector, SAMPLES, rules=rules, **more)


EQUAL, SPREAD, FAILED = [1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [None, None, None]


def mixed(num_rows: int = ROWS) -> list[list[float | None]]:
    return [SPREAD if i % 3 == 0 else FAILED if i % 6 == 5 else [float(i % 2)] * 3 for i in range(num_rows)]


def take(found: SyncSource, count: int = 4) -> RolloutBatch:
    return asyncio.run(found.take(count))


def rows_of(batch: RolloutBatch) -> list[int]:
    return [row.index for row in batch.rows]


def in_order(found: SyncSource) -> list[int]:
    """Rows of two epochs in the order of the data."""
    sampler = PromptSampler(found.prompts._dataset, seed=3)
    return [sampler.take(1)[0].index for _ in range(2 * len(sampler))]


SIZES = [(None, 1), (1, 1), (2, 1), (4, 3), (1, 2), (12, 1)]


@pytest.mark.parametrize(("gen_batch_size", "inflight"), SIZES)
def test_the_first_groups_with_spread_are_trained_however_they_come(tmp_path: Path, gen_batch_size, inflight):
    truths = mixed()
    for seed in range(5):
        found = source(tmp_path, truths, GroupRules("acc", False, gen_batch_size, 0, inflight), seed)
        order, batches = in_order(found), [take(found, 2) for _ in range(6)]
        expected = [row for row in order if truths[row] == SPREAD]
        assert [row for batch in batches for row in rows_of(batch)] == expected[:12]
        ends = [order.index(rows_of(b)[-1], 0) for b in batches[:4]]
        assert found.prompts.position[1] == (order.index(expected[11], ROWS) + 1) % ROWS
        assert ends == sorted(ends) and found.epoch == 1
        for batch in batches:
            groups = [t.group_id for t in batch.trajectories]
            assert Counter(groups) == dict.fromkeys(groups, N) and len(set(groups)) == 2
            for group in set(groups):
                assert len({t.score_parts["acc"] for t in batch.trajectories if t.group_id == group}) > 1


def test_each_prompt_that_is_used_has_one_request_id_of_its_own(tmp_path: Path):
    found = source(tmp_path, mixed(), GroupRules("acc", False, None, 0, 3))
    pairs = {(t.row, t.group_id) for _ in range(3) for t in take(found, 2).trajectories}
    assert len({row for row, _ in pairs}) == len({group for _, group in pairs}) == len(pairs) == 6
    order = in_order(found)
    assert all(order[group] == row for row, group in pairs)


@pytest.mark.parametrize(("gen_batch_size", "inflight", "most"), [(None, 1, 4), (1, 1, 4), (None, 2, 8), (8, 1, 8)])
def test_no_more_prompts_are_in_flight_than_allowed(tmp_path: Path, gen_batch_size, inflight, most):
    found = source(tmp_path, mixed(48), GroupRules("acc", False, gen_batch_size, 0, inflight))
    take(found)
    assert found.collector.engine.most_in_flight == most
    if gen_batch_size == 1 and inflight == 1:  # exactly one refill per group that is dropped
        assert len(found.collector.engine.asked) == found._next_request and not found.collector.engine.num_aborts


def test_answers_that_are_no_longer_needed_are_aborted(tmp_path: Path):
    aborted = 0
    for seed in range(10):
        found = source(tmp_path, [SPREAD] * ROWS, GroupRules("acc", False, 1, 0, 4), seed)
        batch, engine = take(found, 2), found.collector.engine
        assert not engine.in_flight and rows_of(batch) == in_order(found)[:2] and found._next_request == 2
        assert bool(engine.cancelled) <= bool(engine.num_aborts) <= 1
        assert batch.metrics["training/filter_groups/discarded_surplus_samples"] == N * (len(engine.asked) - 2)
        aborted += len(engine.cancelled)
    assert aborted


def test_a_resumed_run_goes_on_with_the_same_groups(tmp_path: Path):
    rules = GroupRules("acc", False, None, 0, 2)
    whole = source(tmp_path, mixed(), rules)
    batches = [take(whole, 3) for _ in range(6)]
    for cut in range(1, 6):
        first = source(tmp_path, mixed(), rules, seed=1)
        for _ in range(cut):
            take(first, 3)
        resumed = source(tmp_path, mixed(), rules, seed=2)
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for expected in batches[cut:]:
            batch = take(resumed, 3)
            assert [(t.row, t.group_id, t.reward) for t in batch.trajectories] == [
                (t.row, t.group_id, t.reward) for t in expected.trajectories
            ]
        assert resumed.state_dict() == whole.state_dict()


def test_what_was_dropped_is_counted_by_reason(tmp_path: Path):
    truths = [[0.0] * 3, [1.0] * 3, [0.5] * 3, FAILED, [1.0, None, None], SPREAD] * 4
    found = source(tmp_path, truths, GroupRules("acc", False, 1))
    batch = take(found, 2)
    used = [truths[row] for row in in_order(found)[: found._next_request]]
    counts = Counter(json.dumps(truth) for truth in used)
    equal = [truth for truth in used if truth not in (SPREAD, FAILED)]
    assert {name.rpartition("/")[2]: value for name, value in batch.metrics.items() if "filter" in name} == {
        "evicted_samples": N * len(equal),
        "filtered_reward_counts": len(equal),
        "filtered_lowest": counts["[0.0, 0.0, 0.0]"],
        "filtered_highest": counts["[1.0, 1.0, 1.0]"] + counts["[1.0, null, null]"],
        "discarded_surplus_samples": 0,
        "gen_batches": len(used),
    }
    assert batch.metrics["training/rollout_failure/evicted_samples"] == N * used.count(FAILED)
    assert batch.num_abstained == N * used.count(FAILED) + 2 * counts["[1.0, null, null]"] > 0


@pytest.mark.parametrize("metric", ["score", "seq_reward", "seq_final_reward"])
def test_the_score_is_a_metric_under_three_names(tmp_path: Path, metric):
    found = source(tmp_path, mixed(), GroupRules(metric))  # the score differs where acc does not
    order = in_order(found)
    assert rows_of(take(found)) == [row for row in order if mixed()[row] != FAILED][:4]


def test_without_a_metric_only_failed_groups_are_replaced(tmp_path: Path):
    truths = mixed()
    found = source(tmp_path, truths, GroupRules(replace_failed=True))
    order, batch = in_order(found), take(found, 8)
    assert rows_of(batch) == [row for row in order if truths[row] != FAILED][:8]
    assert set(batch.metrics) == {"training/rollout_failure/evicted_samples"}


def test_a_metric_that_no_answer_has_is_named(tmp_path: Path):
    with pytest.raises(RewardError, match=r"has no finite number 'accuracy'.*it has score, acc"):
        take(source(tmp_path, mixed(), GroupRules("accuracy")))


def test_the_cap_says_what_was_seen_and_what_to_change(tmp_path: Path):
    truths = [[0.0] * 3, [1.0] * 3, FAILED] * 7 + [SPREAD] * 3
    found = source(tmp_path, truths, GroupRules("acc", False, 2, 3))
    used = [truths[row] for row in in_order(found)[:6]]
    low, high, spread = (used.count(truth) for truth in ([0.0] * 3, [1.0] * 3, SPREAD))
    assert spread < 4
    with pytest.raises(
        VerlError,
        match=f"6 prompts gave {spread} of the 4 groups .*metric=acc.*: in {low + high} groups all answers were equal, "
        f"in {low} of them the lowest value and in {high} the highest; in {used.count(FAILED)} no answer.*"
        r"max_num_gen_batches=3 allows no more: raise it \(0 is no limit\)",
    ):
        take(found)


def test_without_a_cap_a_step_takes_no_more_prompts_than_the_data_has(tmp_path: Path):
    found = source(tmp_path, [EQUAL] * 9, GroupRules("acc", False, 2))
    with pytest.raises(VerlError, match=r"9 prompts gave 0 of the 4 groups"):
        take(found)
    assert len(found.collector.engine.asked) == 9


def test_prompts_are_read_in_smaller_parts_without_a_filter_too(tmp_path: Path):
    rules = GroupRules(gen_batch_size=2)
    parts, whole = (source(tmp_path, [SPREAD] * 10, rules) for rules in (rules, GroupRules()))
    assert [rows_of(take(parts)) for _ in range(2)] == [rows_of(take(whole)) for _ in range(2)]
    third = rows_of(take(parts))
    order = in_order(parts)
    assert third == order[8:12] and rows_of(take(whole)) == order[10:14]


def test_greedy_baselines_are_drawn_for_the_groups_that_are_kept(tmp_path: Path):
    found = source(tmp_path, mixed(), GroupRules("acc"), with_baselines=True)
    batch = take(found, 2)
    assert all(t.reward_baseline == json.loads(r.ground_truth)[0] for r in batch.rows for t in batch.trajectories)


class Unread(dict):
    """A dictionary whose values are not gone through as a whole."""

    def values(self) -> Any:
        raise AssertionError("every group is looked at")


def test_a_group_is_counted_once_and_the_others_are_not_looked_at():
    trajectory = Trajectory.from_completion([1], [2], [-1.0], group_id=0)
    groups = [[(replace(trajectory, reward=float(i % 3 * j)), Score(1.0)) for j in range(2)] for i in range(30)]
    numbers = iter(range(100))
    plan = GroupFilter(20, GroupRules("seq_reward", gen_batch_size=1), lambda count: [(None, next(numbers))])
    plan.verdicts = Unread()
    assert len(plan.next_prompts()) == 20
    for number, group in enumerate(groups):
        plan.add(number, group)
        if not plan.complete:
            assert len(plan.next_prompts()) == (number % 3 == 0)
    assert plan.complete and plan.num_sent == 30


@pytest.mark.parametrize(("metric", "part"), [("seq_reward", {}), ("acc", {"acc": 1.0})])
def test_several_outputs_of_a_conversation_are_one_answer_of_its_group(metric: str, part: dict[str, float]):
    def answer(conversation: int, reward: float) -> tuple[Trajectory, Score]:
        fields = {"score_parts": {name: reward for name in part}, "conversation": conversation, "group_id": 0}
        return Trajectory.from_completion([1], [2], [-1.0], reward=reward, **fields), Score(reward, {})

    rules = GroupRules(metric=metric)
    assert verdict_on([answer(0, 1.0), answer(0, 0.0), answer(1, 0.5)], rules).reason == "equal"
    kept = verdict_on([answer(0, 1.0), answer(0, 1.0), answer(1, 0.0)], rules)
    assert (kept.reason, kept.values, kept.num_answers) == ("", (1.0, 0.0), 2)
