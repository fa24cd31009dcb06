"""Who is to blame for a stall, by what the ranks say; what counts as a move; and which error came first."""

import faulthandler
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl.runtime import rank_observation
from verl.runtime.device_collectives import DeviceWait
from verl.runtime.rank_observation import Counters, RankProcess, RanksOfMachine, family
from verl.runtime.rank_reports import RankReports, RecordedError, ask_for_stacks, blame_earliest, read_errors
from verl.runtime.ray_processes import RanksOnRay
from verl.runtime.stacks import Stack
from verl.runtime.stall_watch import Progress, StallWatch
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
    there = RanksOfMachine(dict.fromkeys(range(ranks), RankProcess(1)), Path(), ())
    watch = StallWatch(there, ranks, dict, lambda _: None, 0)
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
        (3, {0: at(1, "all_gather"), 1: at(1, "all_gather"), 2: at(2, "all_reduce")}, (), 2, "in another collective"),
        (2, {0: at(1, "all_reduce"), 1: at(1, "all_reduce")}, (), 0, "the same collective"),
        (2, {0: "", 1: ""}, (), 0, "none says where it is: is there room for"),
        (1, {0: at(1)}, (), 0, "does not move"),
    ],
)
def test_the_culprit_is_the_rank_for_which_the_others_wait(ranks, stacks, stopped, culprit, words):
    error = blamed(ranks, stacks, stopped)
    assert error.rank == culprit and words in str(error) and error.is_stall
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
        (Counters("S", 1.0, 500, 1, 4096), True),
    ],
)
def test_cpu_time_and_bytes_are_moves(later: Counters, moves: bool):
    progress = Progress(Counters("S", 1.0, 500, 1))
    progress.update(later, 10.0)
    assert progress.quiet_s == (0.0 if moves else 10.0)
    assert progress.stopped_s == (10.0 if later.state == "T" else 0.0)


ENTERED = DeviceWait("0 (default_pg)", 7, "nccl:all_reduce", (0, 1))


@pytest.mark.parametrize(
    ("waits", "culprit"),
    [
        ({0: (ENTERED,)}, 1),
        ({0: (ENTERED,), 1: (replace(ENTERED, number=8),)}, 0),
        ({0: (ENTERED,), 1: (replace(ENTERED, name="nccl:all_gather"),)}, 0),  # as many collectives, but others
        ({0: (ENTERED,), 1: (ENTERED,)}, None),  # a transfer, of which nobody counts the bytes
        ({0: (replace(ENTERED, members=()),)}, None),  # not of this job
    ],
)
def test_ranks_that_poll_in_a_collective_that_all_have_entered_are_left_to_the_limit_of_collectives(
    machine: "Machine", monkeypatch: pytest.MonkeyPatch, waits: dict, culprit: int | None
):
    monkeypatch.setattr(rank_observation, "read_device_waits", lambda folder, rank: waits.get(rank, ()))
    machine.stacks = {0: at(2), 1: at(2)}
    watch = machine.watch()
    assert culprit_after(watch, 31.0) == culprit
    assert culprit is not None or culprit_after(watch, 1770.0) is not None


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


class Machine:
    """A made-up /proc in which ranks 0 and 1 are processes 10 and 11, inside one call."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.stacks, self.while_asked = folder, {0: at(1, "all_reduce"), 1: at(2)}, lambda: None
        monkeypatch.setattr(rank_observation, "_PROC", folder)
        monkeypatch.setattr(rank_observation, "ask_for_stacks", self.ask)
        self.num_asked = 0
        for process in (10, 11):
            self.write(process)

    def write(self, process: int, states: str = "SS", ticks: int = 0, **io: int) -> None:
        names = ("rchar", "wchar", "syscr", "syscw", "read_bytes", "write_bytes", "cancelled_write_bytes")
        folder = self.folder / str(process)
        for thread, state in enumerate(states):
            task = folder / "task" / str(process + 100 * thread)
            task.mkdir(parents=True, exist_ok=True)
            (task / "stat").write_text(f"{process} (a) D name) {state} 1 {'0 ' * 9}{ticks} 0 0")
        (folder / "stat").write_text((folder / "task" / str(process) / "stat").read_text())
        (folder / "io").write_text("".join(f"{name}: {io.get(name, 0)}\n" for name in names))

    def ask(self, folder: Path, processes: dict[int, int]) -> dict[int, str]:
        self.num_asked += 1
        for rank, process in processes.items():
            self.write(process, wchar=len(self.stacks[rank]), write_bytes=4096)  # a rank writes its stack to a file
        self.while_asked()
        return {rank: self.stacks[rank] for rank in processes}

    def watch(self, method: str = "actor.update") -> StallWatch:
        ranks = RanksOfMachine({0: RankProcess(10), 1: RankProcess(11)}, Path(), [os.getpid()])
        watch = StallWatch(ranks, 2, lambda: {0: {5: method}, 1: {5: method}}, lambda _: None, 30.0)
        watch._look(0.0)
        return watch


def test_reports_that_are_deleted_while_they_are_read_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "glob", lambda *_: iter([tmp_path / "rank_0.json"]))
    assert read_errors(tmp_path) == []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def culprit_after(watch: StallWatch, seconds: float) -> int | None:
    watch._look(seconds)
    error = watch._find_culprit()
    return None if error is None else error.rank


def test_bytes_that_the_disk_wrote_are_counted(machine: Machine):
    machine.write(10, rchar=1, wchar=2, read_bytes=4, write_bytes=8)
    assert Counters.read(10) == Counters("S", 0.0, 3, 1, 12)


def fsync_at(folder: Path) -> str:
    """The stack of a rank of which another thread is inside os.fsync."""
    source = folder / "disk.py"
    source.write_text("def write():\n    os.fsync(fd)\n")
    return f'{THREAD}  File "{source}", line 2 in write\n\n{at(3)}'


def tracking() -> str:
    """The stack of a rank that waits for a tracker's server."""
    return (
        f'{MAIN}  File "/lib/ssl.py", line 9 in read\n  File "/lib/verl/observe/tracking.py", line 2 in log\n{SERVER}'
    )


STORING = ["thread in state D", "stack in fsync", "stack in a tracker", "actor.save", "finish_save", "critic.load"]


@pytest.mark.parametrize("storing", STORING)
def test_a_rank_that_waits_for_its_storage_may_rest_as_long_as_a_collective_waits(machine: Machine, storing: str):
    watch = machine.watch(storing if "." in storing or "_" in storing else "actor.update")
    if storing == "thread in state D":
        machine.write(11, "SD")
    if storing.startswith("stack"):
        machine.stacks[1] = fsync_at(machine.folder) if storing == "stack in fsync" else tracking()
    assert culprit_after(watch, 31.0) is None
    assert culprit_after(watch, 1700.0) is None
    assert machine.num_asked == storing.startswith("stack")  # once
    assert culprit_after(watch, 70.0) == 1


def test_a_rank_that_waits_for_others_inside_a_save_does_not_wait_for_its_storage(machine: Machine):
    waiting = f'{C10D.format("all_gather")}  File "/lib/verl/trainer/run/checkpoints.py", line 2 in save\n'
    machine.stacks[0] = f"{MAIN}{waiting}{SERVER}"
    assert culprit_after(machine.watch(), 31.0) == 1


@pytest.mark.parametrize("method", ["offload", "actor.presave", "save.update"])
def test_a_rank_that_neither_saves_nor_waits_for_its_storage_may_not(machine: Machine, method: str):
    assert culprit_after(machine.watch(method), 31.0) == 1


@pytest.mark.parametrize("moved", [{"ticks": 50}, {"rchar": 7}, {"states": "RS"}])
@pytest.mark.parametrize("process", [10, 11])
def test_a_rank_that_moves_while_it_is_asked_is_not_stalled(machine: Machine, process: int, moved: dict):
    watch = machine.watch()
    size = len(machine.stacks[process - 10])
    machine.while_asked = lambda: machine.write(process, **{"wchar": size, **moved})
    assert culprit_after(watch, 31.0) is None
    assert culprit_after(watch, 29.0) is None  # it began to rest again
    assert machine.num_asked == 1


def test_a_stopped_rank_that_goes_on_while_others_are_asked_is_not_named(machine: Machine):
    watch = machine.watch()
    machine.write(11, "TT")
    watch._look(31.0)
    machine.while_asked = lambda: machine.write(11)
    assert watch._find_culprit() is None
    machine.write(11, "TT")
    machine.while_asked = lambda: machine.write(10, ticks=500)  # another rank moves
    assert culprit_after(watch, 31.0) == 1


def test_threads_of_a_framework_are_not_counted_and_the_state_is_that_of_the_calls(machine: Machine):
    machine.write(10, "RSS", ticks=20)  # threads 10, 110 and 210 of 20 ticks each
    for thread in (10, 110, 210):
        (machine.folder / "10" / "task" / str(thread) / "io").write_text((machine.folder / "10" / "io").read_text())
    place = RankProcess(10, thread=110, others=frozenset({10}))
    assert place.counters() == Counters("S", pytest.approx(0.4), 0, 1)
    assert RankProcess(10, thread=310).counters() is None  # it has ended


def test_processes_of_ray_that_the_driver_has_started_are_not_waited_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    def start(process: int, parent: int, command: str) -> None:
        machine.write(process)
        stat = machine.folder / str(process) / "stat"
        stat.write_text(stat.read_text().replace(" S 1 ", f" S {parent} "))
        (machine.folder / str(process) / "cmdline").write_text(command)

    driver = os.getpid()
    start(20, driver, "/envs/ray/lib/python3.12/site-packages/ray/core/src/ray/raylet/raylet")
    start(21, 20, "ray::IDLE")
    start(30, driver, "/envs/ray/bin/python vllm serve /data/ray/model")
    start(31, 30, "python")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__path__=["/envs/ray/lib/python3.12/site-packages/ray"]))
    ranks = object.__new__(RanksOnRay)
    ranks._by_node = {}  # no other node
    assert {process for _, process in ranks.look_at_helpers()} == {30, 31}
    assert family([driver]).keys() >= {20, 21, 30, 31}


def test_one_that_watches_later_than_others_names_no_one_earlier(machine: Machine):
    watch = machine.watch()
    watch.limit_s += 3.0
    assert culprit_after(watch, 31.0) is None
    assert culprit_after(watch, 3.0) == 1


def test_the_thread_that_watches_is_not_counted(machine: Machine):
    machine.write(10, "SS", ticks=50, rchar=700)
    for name, text in (
        ("stat", "10 (a) S 1 " + "0 " * 9 + "20 0 0"),
        ("io", "rchar: 500\nwchar: 0\nread_bytes: 0\nwrite_bytes: 0"),
    ):
        (machine.folder / "10" / "task" / "110" / name).write_text(text)
    assert RankProcess(10, others=frozenset({110, 999})).counters() == Counters("S", pytest.approx(0.3), 200, 1)


class SilentMachine(RanksOfMachine):
    def look(self, ranks):
        return None


def test_time_in_which_a_machine_does_not_answer_is_not_counted(machine: Machine):
    watch = machine.watch()
    ranks, watch.ranks = watch.ranks, SilentMachine(watch.ranks.processes, Path(), ())
    assert culprit_after(watch, 100.0) is None
    watch.ranks = ranks
    assert culprit_after(watch, 29.0) is None
    assert culprit_after(watch, 2.0) == 1


TAIL = "its process was killed by SIGKILL\nthe last lines of its stderr:\nTraceback (most recent call last):\n  ...\n"
LOST = "Traceback (most recent call last):\n  ...\nRuntimeError: Connection closed by peer"


def raised(what: str) -> str:
    return f"Traceback (most recent call last):\n  ...\n{what}"


@pytest.mark.parametrize(
    ("recorded", "first"),
    [
        ([(-0.1, 0, LOST)], "its process was killed"),
        ([(-0.5, 0, raised("RuntimeError: rank 1 does not answer"))], "its process was killed"),
        ([(-0.5, 1, LOST), (-0.6, 0, LOST)], "its process was killed"),
        ([(-0.1, 1, raised("KeyError: 'x'"))], "KeyError"),
        ([(-0.1, 1, raised("KeyError: 'x'")), (-0.05, 0, raised("ValueError: none"))], "KeyError"),
        ([(-0.1, 2, raised("SystemExit: 3")), (-0.05, 0, LOST)], "SystemExit"),
        ([(-0.1, 2, LOST + "\n\nDuring handling ...\n" + raised("SystemExit: 3"))], "its process was killed"),
        ([(-20.0, 0, raised("KeyError: 'x'")), (-0.1, 2, LOST)], "KeyError"),
    ],
)
def test_a_death_comes_before_what_others_raised_shortly_before_it_was_heard_of(recorded: list, first: str):
    now = time.time()
    found = [RecordedError(now + after, rank, "update", text) for after, rank, text in recorded]
    death = WorkerError(1, "update", TAIL + "ConnectionResetError: Connection reset by peer", is_death=True)
    error = blame_earliest(death, now - 60.0, sorted(found, key=lambda one: one.time))
    lines = str(error).splitlines()
    assert first in (lines[0] + lines[1] if "process" in first else lines[3])
    assert error.is_death == ("process" in first)  # what a user's code raised ends the run, and is not restarted
    (line,) = [line for line in lines if "its process was killed by SIGKILL" in line]
    assert "consequence" not in line


def test_a_death_is_summed_up_without_its_stderr_and_is_never_a_consequence():
    death = RecordedError(0.0, 1, "update", TAIL + "ConnectionResetError: Connection reset by peer", is_death=True)
    assert death.summary == "its process was killed by SIGKILL" and not death.is_of_a_lost_rank
    assert not RecordedError(0.0, 1, "update", "Connection reset by peer", is_death=True).is_of_a_lost_rank


def test_nobody_is_asked_for_stacks_where_there_is_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))
    assert ask_for_stacks(tmp_path, {}) == {}
