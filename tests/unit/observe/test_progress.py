"""Live progress: plain lines for files and dumb terminals, one redrawn line on a real terminal."""

import contextlib
import fcntl
import io
import os
import pty
import struct
import termios
import time

import pytest
from rich.console import Console
from rich.progress import Progress as RichProgress

from verl.observe.progress import PlainLines, Progress, RichLine, format_duration, live_columns
from verl.observe.timers import StageTimer


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def run(stream, clock, steps=6, seconds=4.0):
    with Progress(steps, stream=stream, interval_s=10.0, clock=clock) as progress:
        for step in range(1, steps + 1):
            progress.stage("gen")
            clock.now += seconds
            progress.step(step, {"critic/score/mean": step / 10, "perf/throughput": 1234.0})
    return progress


def read_all(descriptor):
    parts = []
    with contextlib.suppress(OSError):  # a terminal whose other end is closed ends with an I/O error
        while part := os.read(descriptor, 65536):
            parts.append(part)
    return b"".join(parts)


def test_a_pipe_gets_a_line_per_interval_and_one_for_the_last_step():
    stream = io.StringIO()
    run(stream, Clock())
    lines = stream.getvalue().splitlines()
    assert lines == [
        "step 3/6 | generating | reward 0.300 | 1,234 tokens/s | 12s so far | 12s left",
        "step 6/6 | generating | reward 0.600 | 1,234 tokens/s | 24s so far | 0s left",
    ]


@pytest.mark.parametrize(("width", "has_bar", "has_speed"), [(160, True, True), (108, False, True), (80, False, False)])
def test_time_left_stays_whole_and_the_bar_goes_before_tokens_per_second(width, has_bar, has_speed):
    clock, stream = Clock(), io.StringIO()
    progress = Progress(40, stream=io.StringIO(), clock=clock)
    clock.now = 65.0
    progress.step(1, {"perf/throughput": 12345.0, "critic/score/mean": 0.5})
    progress.stage("update_actor")
    progress.count("3 of 16 sequences")
    console = Console(file=stream, width=width)
    bar = RichProgress(*live_columns(console), console=console)
    bar.add_task("", total=40, completed=20, line=progress.describe)
    console.print(bar.get_renderable())
    line = stream.getvalue()
    assert "step 2/40 | updating 3 of 16 sequences" in line and "reward 0.500" in line
    assert "42m15s left" in line and len(line.splitlines()) == 1
    assert ("━" in line, "tokens/s" in line) == (has_bar, has_speed)


def test_a_terminal_without_room_cuts_the_stage_and_keeps_step_and_time_left():
    clock = Clock()
    progress = Progress(40, stream=io.StringIO(), clock=clock)
    clock.now = 65.0
    progress.step(1, {"perf/throughput": 12345.0, "critic/score/mean": 0.5})
    progress.stage("ref")
    assert progress.describe(36) == "step 2/40 | evaluatin… | 42m15s left"


def test_the_step_in_progress_is_counted_and_keeps_its_number_when_it_ends():
    progress = Progress(stream=io.StringIO(), clock=Clock())
    progress.begin(total_steps=2, start_step=0)
    for step in (1, 2):
        progress.stage("gen")
        assert progress.describe().startswith(f"step {step}/2 |")
        progress.step(step, {})
        assert progress.describe().startswith(f"step {step}/2 |")
    progress.stage("save_checkpoint")
    assert progress.describe().startswith("step 2/2 |")


def test_a_step_that_takes_longer_than_estimated_does_not_eat_the_time_of_later_steps():
    clock = Clock()
    progress = Progress(4, stream=io.StringIO(), clock=clock)
    clock.now = 10.0
    progress.step(1, {})
    clock.now = 14.0
    assert progress.describe().endswith("| 26s left")
    clock.now = 40.0  # a mean of at least 20 s over the two steps: two steps of that remain
    assert progress.describe().endswith("| over 40s left")
    progress.step(3, {})
    clock.now = 100.0
    assert "left" not in progress.describe()
    progress.step(4, {})
    assert progress.describe().endswith("| 0s left")


def test_nothing_but_plain_text_reaches_a_pipe():
    stream = io.StringIO()
    run(stream, Clock())
    assert stream.getvalue().isascii() and "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


@pytest.mark.parametrize(("term", "display"), [("dumb", PlainLines), ("", PlainLines), ("xterm-256color", RichLine)])
def test_the_terminal_decides_how_it_is_shown(monkeypatch, term, display):
    if term:
        monkeypatch.setenv("TERM", term)
    else:
        monkeypatch.delenv("TERM", raising=False)
    leader, follower = pty.openpty()
    try:
        with os.fdopen(follower, "w") as stream:
            progress = run(stream, Clock(), seconds=11.0)
            assert type(progress.display) is display
        written = read_all(leader)
        assert (b"\x1b" in written) == (display is RichLine)
        assert b"6/6" in written
    finally:
        os.close(leader)


def test_a_long_path_printed_beside_the_live_line_stays_whole(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    path = "/".join(["", *(f"folder_{n}" for n in range(12)), "global_step_3"])
    try:
        with os.fdopen(follower, "w") as stream:
            monkeypatch.setattr("sys.stdout", stream)
            with Progress(6, stream=stream, clock=Clock()) as progress:
                progress.stage("gen")
                print(f"saved {path}")
        written = read_all(leader).decode()
    finally:
        os.close(leader)
    assert f"saved {path}\r\n" in written and "step 1/6" in written


def test_time_left_follows_the_recent_steps_not_the_slow_start():
    clock = Clock()
    progress = Progress(100, stream=io.StringIO(), clock=clock)
    assert progress.seconds_left is None
    clock.now += 500
    progress.step(1, {})
    for step in range(2, 51):
        clock.now += 2.0
        progress.step(step, {})
    assert progress.seconds_left == pytest.approx(100.0)


def test_a_resumed_run_counts_only_its_own_steps():
    clock = Clock()
    progress = Progress(20, start_step=10, stream=io.StringIO(), clock=clock)
    clock.now += 3.0
    progress.step(11, {})
    assert progress.seconds_left == pytest.approx(27.0)


def test_the_stage_comes_from_the_timer():
    progress = Progress(5, stream=io.StringIO())
    with StageTimer(on_enter=progress.stage)("update_actor"):
        assert "| updating |" in progress.describe()


def test_a_stage_says_how_far_it_is_and_the_steps_begin_when_their_number_is_known():
    progress = Progress(stream=io.StringIO(), clock=Clock())
    progress.stage("loading the model")
    assert progress.describe() == "loading the model | 0s so far"
    progress.begin(total_steps=9, start_step=4)
    progress.stage("gen")
    progress.count("1,000 of 4,096 answers")
    assert progress.describe() == "step 5/9 | generating 1,000 of 4,096 answers | 0s so far"
    progress.stage("update_actor")
    assert "answers" not in progress.describe()


def test_a_pipe_gets_lines_inside_a_long_stage(monkeypatch):
    monkeypatch.setattr("verl.observe.progress.HEARTBEAT_S", 0.01)
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, interval_s=5.0, clock=clock) as progress:
        progress.stage("loading the model")
        assert stream.getvalue() == ""
        clock.now = 6.0
        for _ in range(1000):
            if stream.getvalue():
                break
            time.sleep(0.01)
    assert stream.getvalue() == "loading the model | 6s so far\n"


@pytest.mark.parametrize(("seconds", "text"), [(5, "5s"), (75, "1m15s"), (3725, "1h02m")])
def test_durations_read_like_people_say_them(seconds, text):
    assert format_duration(seconds) == text
