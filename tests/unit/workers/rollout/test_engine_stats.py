"""Counts of rollout engines: several readers, several replicas, engines that start anew."""

import asyncio

import pytest

from tests.engine_work import work_of
from tests.unit.workers.rollout.test_native_engine import CONFIG, ask, complete, model  # noqa: F401
from verl.workers.rollout.engine_stats import DecodeTimes, EngineStats, metrics_between
from verl.workers.rollout.native.engine import NativeEngine


def replica(tokens: int, steps: int, used: float) -> EngineStats:
    return EngineStats(
        {"tokens": tokens}, {"steps": steps}, ratios={"cache_use": (used, steps)}, gauges={"bytes": 8 * tokens}
    )


def test_two_readers_each_see_all_that_happened_between_their_own_readings(model):  # noqa: F811
    engine = NativeEngine(CONFIG, model)
    start = asyncio.run(engine.stats())
    complete(engine, ask(0, max_tokens=3))
    middle = asyncio.run(engine.stats())  # another reader
    complete(engine, ask(1, max_tokens=5))
    assert [work_of(engine, before)["generated_tokens"] for before in (start, middle)] == [8, 5]
    assert [work_of(engine, before)["requests"] for before in (start, middle)] == [2, 1]
    assert work_of(engine)["generated_tokens"] == 8


def test_a_ratio_is_that_of_the_time_between_two_readings(model):  # noqa: F811
    engine = NativeEngine(CONFIG, model)
    complete(engine, *(ask(number, prompt=(5, 6, number)) for number in range(CONFIG.max_num_seqs)))
    assert work_of(engine)["occupancy"] == 1
    middle = asyncio.run(engine.stats())
    complete(engine, ask(0))
    assert work_of(engine, middle)["occupancy"] == pytest.approx(1 / CONFIG.max_num_seqs)
    assert work_of(engine, asyncio.run(engine.stats()))["occupancy"] == 0  # nothing ran


def test_counts_are_summed_over_replicas_and_ratios_averaged():
    before = [replica(1, 1, 0.5), replica(7, 2, 1.0)]
    now = [replica(5, 3, 1.5), replica(10, 6, 4.0)]  # since then 4 and 3 tokens, cache use 1 / 2 and 3 / 4
    assert metrics_between(before, now) == {"tokens": 7, "bytes": 8 * 15, "steps": 3, "cache_use": 0.625}


def test_a_replica_that_made_no_step_has_no_part_in_the_means():
    before, busy, idle = [replica(1, 1, 0.5)] * 2, replica(5, 3, 1.5), replica(1, 1, 0.5)
    expected = {"tokens": 4, "bytes": 48, "steps": 2, "cache_use": 0.5}
    assert metrics_between(before, [busy, idle]) == metrics_between(before, [idle, busy]) == expected


def test_an_engine_that_started_anew_counts_from_zero_and_a_new_replica_as_well():
    metrics = metrics_between([replica(9, 5, 2.0)], [replica(2, 1, 0.25), replica(3, 1, 0.75)])
    assert metrics == {"tokens": 5, "bytes": 40, "steps": 1, "cache_use": 0.5}
    fewer_steps_alone = replica(20, 4, 2.0)
    assert metrics_between([replica(9, 5, 2.0)], [fewer_steps_alone])["tokens"] == 20


def test_an_engine_in_the_place_of_an_ended_one_goes_on_counting():
    second = replica(2, 1, 0.25).continuing(replica(9, 5, 2.0))
    assert second == EngineStats({"tokens": 11}, {"steps": 6}, ratios={"cache_use": (2.25, 6)}, gauges={"bytes": 16})


def test_the_native_engine_sums_its_decode_steps_but_those_with_a_prompt(model):  # noqa: F811
    """Two answers of four tokens after prompts of three: the prompts are computed in the step of the second token."""
    engine = NativeEngine(CONFIG, model)
    complete(engine, *(ask(number, max_tokens=4, prompt=(5, 6, 9 + number)) for number in range(2)))
    [stats] = asyncio.run(engine.stats())
    sums = {name.removeprefix("2:"): value for name, value in stats.sums.items()}  # both answers ran in each
    assert (sums["steps"], sums["answers"], sums["cached"], sums["cached*cached"]) == (2, 4, 10 + 12, 10**2 + 12**2)
    assert 0 < sums["seconds"] <= sum(stats.totals[f"{part}_s"] for part in ("model", "sampling", "scheduling"))
    assert 10 * sums["seconds"] < sums["cached*seconds"] < 12 * sums["seconds"]


@pytest.mark.parametrize(("answers", "size"), [(1, 1), (2, 2), (3, 3), (5, 4), (6, 6), (11, 8), (12, 12), (100, 96)])
def test_decode_steps_are_told_apart_by_the_answers_that_ran(answers: int, size: int):
    times = DecodeTimes()
    times.record(answers, 5, 0.1)
    assert times.sums[f"{size}:answers"] == answers


def test_the_steps_after_new_weights_are_left_out():
    times = DecodeTimes()
    times.new_weights()
    for step in range(DecodeTimes.COLD + 2):
        times.record(1, 5 + step, 0.1)
    assert (times.sums["1:steps"], times.sums["1:cached"]) == (2, 2 * 5 + 2 * DecodeTimes.COLD + 1)


def test_sums_go_on_in_a_new_engine_and_are_no_metric():
    first, second = EngineStats(sums={"8:steps": 5.0}), EngineStats(sums={"8:steps": 2.0})
    assert second.continuing(first).sums == {"8:steps": 7.0}
    assert first.since(second).sums == {"8:steps": 3.0} and second.since(first).sums == {"8:steps": 2.0}
    assert metrics_between([second], [first]) == {}
