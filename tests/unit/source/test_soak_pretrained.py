"""What the soak of the pretrained example calls a shortfall, and that it goes on where it stopped."""

import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.soak import pretrained


def result(gain: float = 0.3, interval: float = 0.1, seconds: int = 500) -> dict[str, Any]:
    return {
        "before": 0.1, "after": 0.1 + gain, "gain": gain, "gain_95_percent_half_width": interval, "seconds": seconds,
    }  # fmt: skip


def test_a_gain_within_its_interval_and_a_run_over_fifteen_minutes_fall_short():
    assert pretrained.shortfalls({"seed 1": result(), "seed 2": result(seconds=900)}) == []
    assert pretrained.shortfalls({"seed 1": result(gain=0.1)}) == ["seed 1 gains 10.0%, within its interval of 10.0%"]
    assert pretrained.shortfalls({"seed 2": result(seconds=901)}) == ["seed 2 took 901 s, over 900"]


def test_a_seed_that_is_recorded_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[int] = []
    monkeypatch.setattr(pretrained, "run", lambda seed: ran.append(seed) or result())
    for words in (["--seed", "2"], []):
        monkeypatch.setattr(sys, "argv", ["pretrained", "--folder", str(tmp_path), *words])
        assert pretrained.main() == 0
    assert ran == [2, 1, 3]
