"""The two rules of asynchronous training, over many events whose durations have a heavy tail."""

import json
import random

import pytest

from benchmarks.support.admission_events import NoSecondRule, simulate
from verl.trainer.ppo.sources.admission import DROP, WAIT, AdmissionRules
from verl.utils.errors import ConfigError

B = 8


@pytest.mark.parametrize(("staleness", "max_lag"), [(0.0, 8), (0.1, 2), (0.5, 8), (1.0, 2), (1.0, 8), (3.0, 4)])
@pytest.mark.parametrize("strategy", [WAIT, DROP])
@pytest.mark.parametrize("sigma", [0.5, 2.5])
def test_no_group_is_older_than_the_largest_age(staleness, max_lag, strategy, sigma):
    found = simulate(AdmissionRules(B, staleness, max_lag, strategy), 4_000, sigma)
    assert max(found.lags) <= (max_lag if staleness else 0)
    assert found.trained_twice == 0
    assert found.trained | found.dropped | found.open == set(range(found.admitted))
    assert not found.trained & found.dropped


@pytest.mark.parametrize("staleness", [0.0, 0.5, 1.0, 2.0])
def test_the_mean_age_is_the_staleness(staleness):
    found = simulate(AdmissionRules(B, staleness, 8), 8_000, 2.0)
    assert sum(found.lags) / len(found.lags) == pytest.approx(staleness, abs=0.02)


def test_without_the_second_rule_slow_groups_become_older():
    found = simulate(NoSecondRule(B, 1.0, 8), 8_000, 2.5)
    assert max(found.lags) > 8
    assert simulate(AdmissionRules(B, 1.0, 8), 8_000, 2.5).late_waits > 0  # the same durations with the rule


def test_drop_refills_the_place_of_each_group_that_it_drops():
    found = simulate(AdmissionRules(B, 1.0, 2, DROP), 4_000, 2.5)
    assert found.dropped
    assert max(found.loads) == 2 * B


def test_a_prompt_is_admitted_only_while_fewer_than_the_bound_are_under_way():
    rules = AdmissionRules(B, 0.25)
    assert rules.room == 10
    numbers = [rules.admit() for _ in range(rules.room)]
    assert rules.room == 0
    for number in numbers[:B]:
        rules.finish(number)
    rules.take()
    assert rules.room == 0  # what is in training counts until its publish
    rules.publish(1)
    assert rules.room == B


def test_a_fraction_of_a_group_is_a_whole_one():
    assert AdmissionRules(4, 0.1).limit == 5
    assert AdmissionRules(10, 0.1).limit == 11  # not 12: 1.1 x 10 is above 11 in floating point


def test_the_oldest_finished_groups_are_taken_in_the_order_of_their_prompts():
    rules = AdmissionRules(2, 1.0)
    for _ in range(4):
        rules.admit()
    for number in (3, 1, 0):
        rules.finish(number)
    assert rules.take() == [0, 1]


def test_staleness_0_waits_for_all_that_it_admitted():
    rules = AdmissionRules(3, 0.0)
    numbers = [rules.admit() for _ in range(rules.room)]
    for number in reversed(numbers):
        assert not rules.ready
        rules.finish(number)
    assert rules.ready and rules.take() == numbers
    assert rules.room == 0


def test_a_group_that_would_be_late_is_waited_for():
    rules = AdmissionRules(1, 1.0, max_lag=2)
    slow = rules.admit()
    for version in (0, 1):
        fast = rules.admit()
        rules.finish(fast)
        assert rules.ready
        rules.take()
        rules.publish(version + 1)
    fast = rules.admit()
    rules.finish(fast)
    assert not rules.ready  # the slow one is 2 versions old
    rules.finish(slow)
    assert rules.ready and rules.take() == [slow]


def test_a_step_may_take_its_groups_in_parts_and_none_becomes_too_old():
    """Groups of heavy-tailed durations, two at a time; each part is waited for by the same rule."""
    draws, rules, lags, waits = random.Random(3), AdmissionRules(6, 1.0, 3), list[int](), 0
    ends: dict[int, float] = {}
    now = 0.0
    for version in range(1, 400):
        for _ in range(rules.room):
            ends[rules.admit()] = now + draws.lognormvariate(0, 2.5)
        admitted_at = dict(rules.versions)
        for _ in range(3):
            while not rules.is_ready(2):
                waits += rules.num_queued >= 2
                number = min(ends, key=lambda one: ends[one])
                now = max(now, ends.pop(number))
                rules.finish(number)
            lags += [rules.version - admitted_at[number] for number in rules.take(2)]
        assert len(rules.in_training) == 6 and rules.room == 12 - 6 - len(rules.versions)
        rules.publish(version)
        now += 1.0
    assert max(lags) == 3 and waits > 0


def test_an_evicted_group_leaves_and_makes_room():
    rules = AdmissionRules(2, 0.0)
    numbers = [rules.admit(), rules.admit()]
    for number in numbers:
        rules.finish(number)
    rules.evict(numbers[0])
    assert not rules.ready and rules.room == 1
    last = rules.admit()
    rules.finish(last)
    assert rules.take() == [numbers[1], last]


def test_the_rules_go_on_from_their_state_as_if_nothing_had_been():
    choices = random.Random(5)
    rules = AdmissionRules(3, 1.5, 4)
    for version in range(1, 30):
        for _ in range(rules.room):
            rules.admit()
        waiting = [number for number in rules.versions if number not in rules.queued]
        choices.shuffle(waiting)
        for number in waiting:
            if rules.ready:
                break
            rules.finish(number)
        rules.take()
        rules.publish(version)
        again = AdmissionRules(3, 1.5, 4)
        again.load_state_dict(json.loads(json.dumps(rules.state_dict())))
        assert (again.room, again.num_queued, again.ready) == (rules.room, rules.num_queued, rules.ready)
        rules = again


def test_a_largest_age_without_room_beside_the_mean_is_refused():
    with pytest.raises(ConfigError, match=r"max_off_policy_threshold=2 .* set it to 3"):
        AdmissionRules(B, 1.5, 2)
