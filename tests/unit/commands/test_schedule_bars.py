"""The arithmetic of benchmarks/schedule.py: medians over pairs, and which bars hold."""

from dataclasses import replace

import pytest

from benchmarks.support.schedule_bars import Pair, rate, summarise
from benchmarks.support.schedule_runs import SETTINGS

# Predicted 1.5x, measured 1.4x: sync 2 steps a second instead of 2.2, async 2.8 instead of 3.3
PAIR = Pair(1, 2.2, 3.3, 1.5, 2.0, 2.8, 0.90, 0.92, "it helps: one_step_off 1.50x of sync; set ...", 60.0)


def pairs(count: int = 3, **changed: object) -> list[Pair]:
    """Of one kind, but for the seed, the end, and a reward of the synchronous run that has a spread of 0.02 a pair."""
    return [
        replace(PAIR, seed=i, ended=60.0 * i, reward_sync=0.9 + 0.02 * i, **changed)  # type: ignore[arg-type]
        for i in range(count)
    ]


def test_the_figures_are_medians_over_the_pairs():
    odd = replace(PAIR, predicted_async=99.0, measured_async=0.1, predicted_speedup=9.0)
    found = summarise([*pairs(), odd], helps=True)
    assert found.predicted_over_measured == {"sync": pytest.approx(1.1), "async": pytest.approx(3.3 / 2.8)}
    assert (found.predicted_speedup, found.measured_speedup) == (1.5, pytest.approx(1.4))
    assert summarise(pairs(), helps=True).minutes == 2.0


def test_each_bar_holds_on_its_own_side_only():
    def bars(helps: bool = True, **changed: object) -> dict[str, bool | None]:
        return summarise(pairs(**changed), helps).bars  # type: ignore[arg-type]

    assert bars(predicted_async=2.8 * 1.14) == {"prediction": True, "speedup": True, "reward": True, "verdict": True}
    assert bars(predicted_async=2.8 * 1.16)["prediction"] is False
    assert bars(predicted_async=2.8, predicted_sync=2.0 * 0.84)["prediction"] is False
    assert bars(measured_async=2.0 * 1.5 * 0.91)["speedup"] is True
    assert bars(measured_async=2.0 * 1.5 * 0.89)["speedup"] is False
    assert bars(predicted_speedup=1.19, measured_async=0.1)["speedup"] is None  # nothing was promised
    assert bars(reward_async=0.90)["reward"] is True and bars(reward_async=0.89)["reward"] is False
    assert bars(helps=False)["verdict"] is False
    assert bars(helps=False, verdict="it will not help: 90% of a step is training")["verdict"] is True
    assert bars(verdict="it may help, up to 1.3x")["verdict"] is False


def test_one_pair_says_nothing_about_the_spread_of_seeds():
    assert summarise(pairs(1), helps=True).bars["reward"] is None


def test_a_rate_counts_the_steps_after_the_first_ones():
    assert rate([1.0, 2.0, 4.0, 6.0, 8.0], first=2) == pytest.approx(0.5)


def test_every_length_fits_and_two_settings_do_not_help():
    assert len(SETTINGS) == 6 and sum(not setting.helps for setting in SETTINGS) == 2
    for setting in SETTINGS:
        rows = setting.lengths()
        assert all(1 <= length <= setting.most for row in rows for length in row)
        assert rows == setting.lengths() and {len(row) for row in rows} == {setting.n}
