"""Who is to blame for a stall, by what the ranks say; what counts as a move; and which error came first."""

import faulthandler
import os
import threading
from pathlib import Path

import pytest

from verl.runtime.rank_reports import RankReports, RecordedError, blame_earliest, read_errors
from verl.runtime.stacks import Stack
from verl.runtime.stall_watch import Counters, Progress, StallWatch
from verl.utils.errors import ConfigError, WorkerError

SERVER = '  File "/lib/verl/runtime/rank_server.py", line 9 in serve\n'
C10D = '  File "/lib/torch/distributed/distributed_c10d.py", line 7 in {}\n'
THREAD, MAIN = "Thread 0x1 (most recent call first):\n", "Current thread 0x2 (most recent call first):\n"


def at(line: int, collective: str = "") -> str:
    inner = C10D.format(collective) if collective else ""
    return f'{THREAD}  File "/x.py", line 1 in read\n\n{MAIN}{inner}  File "/loss.py", line {line} in loss\n{SERVER}'


IDLE = (
    f'{MAIN}  File "/lib/selectors.py", line 1 in select\n  File "/lib/asyncio/base_events.py", line 2 in run\n{SERVER}'
)


def blamed(ranks: int, stacks: dict[int, str], stopped: tuple[int, ...] = ()) -> WorkerError:
    watch = StallWatch(dict.fromkeys(range(ranks), 1), dict, lambda _: None, Path(), 0)
    watch._calls = {rank: {5: "actor.update"} for rank in stacks}
    return watch._name_culprit(stopped, {rank: Stack.parse(text) for rank, text in stacks.items()})


@pytest.mark.parametrize(
    ("ranks", "stacks", "stopped", "culprit", "words"),
    [
        (3, {0: at(1, "all_reduce"), 1: at(2), 2: at(1, "all_reduce")}, (), 1, "has not entered the collective"),
        (2, {0: at(1, "all_reduce"), 1: IDLE}, (), 1, "has not entered the collective"),
        (2, {0: at(1, "all_reduce")}, (), 1, "has left the call without entering"),
        (3, {0: at(1), 1: at(2), 2: ""}, (2,), 2, "is stopped"),
        (2, {0: at(1), 1: at(2)}, (), 0, "does not move"),
        (2, {0: at(1, "broadcast"), 1: at(2, "all_reduce")}, (), 0, "in another collective"),
        (2, {0: at(1, "all_reduce"), 1: at(1, "all_reduce")}, (), 0, "the same collective"),
        (1, {0: ""}, (), 0, "does not move"),
    ],
)
def test_the_culprit_is_the_rank_for_which_the_others_wait(ranks, stacks, stopped, culprit, words):
    error = blamed(ranks, stacks, stopped)
    assert error.rank == culprit and words in str(error)
    assert f"rank {culprit} failed in actor.update():" in str(error) and "role actor, node " in str(error)
    for other in set(stacks) - {culprit}:
        assert f"rank {other} " in str(error)


def test_a_stack_of_this_interpreter_is_read_whatever_its_other_threads_do(tmp_path: Path):
    release, stacks = threading.Event(), []

    def read() -> None:
        with open(tmp_path / "stack", "w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks.append(Stack.parse(file.read()))

    threading.Thread(target=release.wait).start()  # faulthandler writes the newest thread first
    reader = threading.Thread(target=read)
    reader.start()
    reader.join()
    release.set()
    [stack] = stacks
    assert stack.frames[0].function == "read"
    assert str(stack.frames[0]).endswith("faulthandler.dump_traceback(file, all_threads=True)")
    assert stack.where == str(stack.frames[0]) and stack.collective is None and not stack.is_idle


def test_a_rank_waits_in_a_collective_also_where_another_thread_does():
    stack = Stack.parse(f'{THREAD}{C10D.format("all_gather")}\n{MAIN}  File "/x.py", line 3 in backward\n{SERVER}')
    assert stack.collective == "all_gather" and [frame.function for frame in stack.frames] == ["backward"]


@pytest.mark.parametrize(
    ("later", "moves"),
    [
        (Counters("S", 1.0, 500, 1), False),
        (Counters("S", 1.5, 500, 1), True),
        (Counters("S", 1.05, 500, 1), False),  # idle threads that poll
        (Counters("S", 1.0, 501, 1), True),
        (Counters("R", 1.0, 500, 1), True),  # it waits for a core
        (Counters("t", 1.0, 500, 1), True),  # it is being debugged
        (Counters("T", 1.0, 500, 1), False),
        (Counters("D", 1.0, 500, 1), False),
    ],
)
def test_cpu_time_and_bytes_are_moves(later: Counters, moves: bool):
    progress = Progress(Counters("S", 1.0, 500, 1))
    progress.update(later, 10.0)
    assert progress.quiet_s == (0.0 if moves else 10.0)
    assert progress.stopped_s == (10.0 if later.state == "T" else 0.0)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_the_counters_of_a_process_are_those_that_it_knows_itself(tmp_path: Path):
    before = Counters.read(os.getpid())
    (tmp_path / "file").write_bytes(b"x" * 12_345)
    after = Counters.read(os.getpid())
    assert before is not None and after is not None and after.parent == os.getppid()
    assert after.num_bytes - before.num_bytes >= 12_345
    assert abs(after.cpu_s - sum(os.times()[:2])) < 0.5


def test_the_earliest_error_is_the_cause_and_later_ones_get_a_line(tmp_path: Path):
    reports = RankReports(tmp_path, 1)
    reports.record("old", ConfigError("handled long ago"))
    (old,) = read_errors(tmp_path)
    lost = "Traceback (most recent call last):\n  ...\nRuntimeError: Connection closed by peer"
    found = [
        old,
        RecordedError(old.time + 1.0, 0, "update", lost),  # its message came first
        RecordedError(old.time + 2.0, 1, "update", "Traceback (most recent call last):\n  ...\nKeyError: 'x'"),
        RecordedError(old.time + 3.0, 2, "update", "Traceback (most recent call last):\n  ...\nKeyError: 'x'"),
        RecordedError(old.time + 3.5, 3, "update", "Traceback (most recent call last):\n  ...\nKeyError: 'y'"),
    ]
    error = blame_earliest(WorkerError(0, "update", lost), old.time + 0.5, found, ["rank 4 is at x.py:3"])
    assert (error.rank, error.method) == (1, "update")
    assert str(error).splitlines() == [
        "rank 1 failed in update():",
        "Traceback (most recent call last):",
        "  ...",
        "KeyError: 'x'",
        "1.0 s earlier, as a consequence: rank 0 in update(): RuntimeError: Connection closed by peer",
        "1.5 s later: rank 3 in update(): KeyError: 'y'",
        "rank 4 is at x.py:3",
    ]


def test_an_error_that_is_alone_stays_as_it_is(tmp_path: Path):
    RankReports(tmp_path, 0).record("update", ConfigError("the key is wrong"))
    [recorded] = read_errors(tmp_path)
    error = WorkerError(0, "update", "the key is wrong")
    assert blame_earliest(error, recorded.time - 1.0, [recorded]) is error
