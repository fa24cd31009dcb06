"""Stage times, throughput and memory."""

import mmap
import os
from pathlib import Path

import pytest

from verl.observe.memory_metrics import GIB, memory_metrics
from verl.observe.timers import StageTimer, throughput_metrics


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_stage_entered_twice_adds_up_and_nested_stages_are_independent():
    clock = Clock()
    timer = StageTimer(clock=clock)
    with timer("step"):
        for seconds in (1.0, 2.0):
            with timer("gen"):
                clock.now += seconds
        clock.now += 0.5
    assert timer.metrics() == {"timing_s/gen": 3.0, "timing_s/step": 3.5}
    timer.reset()
    assert timer.metrics() == {}


def test_a_stage_that_raises_is_timed():
    clock = Clock()
    timer = StageTimer(clock=clock)
    with pytest.raises(ValueError), timer("reward"):
        clock.now += 4.0
        raise ValueError
    assert timer.seconds == {"reward": 4.0}


def test_the_device_is_synchronised_before_every_reading():
    clock, calls = Clock(), []

    def synchronize():
        calls.append(clock.now)
        clock.now += 1.0  # queued work ends here and belongs to the stage that queued it

    timer = StageTimer(synchronize, clock=clock)
    with timer("gen"):
        pass
    assert len(calls) == 2 and timer.seconds["gen"] == 1.0


def test_throughput_counts_response_tokens_for_generation_and_all_tokens_elsewhere():
    timing = {"timing_s/step": 10.0, "timing_s/gen": 4.0, "timing_s/update_actor": 2.0, "timing_s/testing": 9.0}
    metrics = throughput_metrics(timing, num_tokens=2000, num_response_tokens=500, num_devices=2)
    assert metrics == {
        "perf/total_num_tokens": 2000.0,
        "perf/time_per_step": 10.0,
        "perf/throughput": 100.0,
        "timing_per_token_ms/gen": 8.0,
        "timing_per_token_ms/update_actor": 1.0,
    }


def test_the_share_of_publishing_is_that_of_the_step():
    assert throughput_metrics({"step": 10.0, "update_weights": 1.0}, 1, 1, 1)["perf/publish_share"] == 0.1


def test_throughput_without_a_step_time_says_so():
    with pytest.raises(KeyError, match="'step'"):
        throughput_metrics({"gen": 1.0}, 1, 1, 1)


def test_memory_follows_what_the_process_holds():
    before = memory_metrics()["perf/cpu_memory_used_gb"]
    block = mmap.mmap(-1, 128 << 20)  # malloc might hand out what it kept of an earlier test
    block[::4096] = bytes(len(block) // 4096)
    after = memory_metrics(2 * GIB, 3 * GIB, 5 * GIB)
    assert after["perf/cpu_memory_used_gb"] - before > 0.1  # the system may take back a little of what libraries hold
    assert after["perf/cpu_max_memory_used_gb"] >= after["perf/cpu_memory_used_gb"] - 0.01
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert after["perf/cpu_memory_used_gb"] * GIB == pytest.approx(pages * os.sysconf("SC_PAGE_SIZE"), rel=0.05)
    assert (after["perf/max_memory_allocated_gb"], after["perf/max_memory_reserved_gb"]) == (2.0, 3.0)
    assert after["perf/device_memory_used_gb"] == 5.0
    block.close()
