"""Hostile and fuzzed programs in the sandbox: no escape, no forged pass, no later score changed, nothing left behind.

    make soak PART=sandbox                       # the hostile set in every mode, and 100,000 programs
    python -m scripts.soak.sandbox --programs 1000 --folder /tmp/soak --mode namespaces

Goes on where the last run of this commit stopped.
"""

import argparse
import contextlib
import os
import random
import signal
import socket
import tempfile
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scripts.soak.progress import RESULTS, ROOT, Progress
from verl.rewards.sandbox import Limits, ProgramResult, Sandbox
from verl.rewards.sandbox.pool import MODES
from verl.rewards.scorers.code_tests import read_tests

PROGRAMS = ROOT / "tests" / "data" / "sandbox" / "hostile_programs.txt"
EXPECTED = "7919"
LIMITS = Limits(cpu_s=1, wall_s=1.5, memory_mb=256, output_bytes=1 << 20, scratch_mb=4)
PATIENT = Limits(cpu_s=5, wall_s=60.0)
WRITTEN = {"hostile", "note", "big", "f0", "link", "link0", "device", "x.so", "os.py", "p"}  # by programs
CHUNK = 1000
MARKER = "earlier-marker"
HONEST = f"x = '{MARKER}'\nprint(int(input()) * 2)"
SYNTAX = (
    "(", ")", "[", "]", ":", "\n", "    ", "def f(x):", "return x", "import os", "print(", "input()", "x", "=",
    "lambda:", "while True:", "break", "try:", "except:", "pass", "os.fork()", "exit(", "raise", "1", "'", "#", "\\",
    '"""', "\x00", "\u202e", "class A:", "yield", "await", "async", "*", "**", "9" * 50, "\t", "del", "global",
)  # fmt: skip


@dataclass(frozen=True)
class Hostile:
    """One program of the set; `endings` that are allowed, all where it is empty."""

    name: str
    source: str
    is_call: bool
    endings: tuple[str, ...]
    modes: tuple[str, ...]


def read_programs() -> list[Hostile]:
    """The programs of tests/data/sandbox/hostile_programs.txt."""
    programs = []
    for block in PROGRAMS.read_text(encoding="utf-8").split("\n=== ")[1:]:
        head, _, source = block.partition("\n")
        name, *options = [part.strip() for part in head.split(" | ")]
        named = dict(option.partition("=")[::2] for option in options)
        endings = tuple(named["ends"].split(",")) if "ends" in named else ()
        modes = tuple(named["only"].split(",")) if "only" in named else MODES
        programs.append(Hostile(name, source, "call" in named, endings, modes))
    return programs


class Surroundings:
    """What a program must not reach or change: files, a port, processes, descriptors, signals of this process."""

    def __init__(self, folder: Path):
        self.folder, self.file = folder, folder / "canary"
        self.file.write_text(EXPECTED)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.mailboxes = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) for _ in range(2)]
        for mailbox, address in zip(self.mailboxes, (f"{folder}.socket", f"\0{folder}"), strict=True):
            mailbox.bind(address)
        os.chmod(f"{folder}.socket", 0o777)
        self.signals: list[int] = []
        self.old = {number: signal.signal(number, lambda n, _: self.signals.append(n)) for number in (1, 15, 12, 29)}
        os.environ["VERL_CANARY"] = EXPECTED

    def fill(self, source: str) -> str:
        """The program with the names of these things."""
        names = {
            "PID": os.getpid(), "PORT": self.listener.getsockname()[1], "FILE": self.file, "TEMPORARY": self.folder,
            "NUL": "\x00", "DEEP": "(" * 100_000,
        }  # fmt: skip
        for name, value in names.items():
            source = source.replace(f"@{name}@", str(value))
        return source

    def check(self) -> None:
        """AssertionError where something was reached or changed."""
        assert [path.name for path in self.folder.iterdir()] == ["canary"], list(self.folder.iterdir())
        assert self.file.read_text() == EXPECTED
        assert not self.signals, self.signals
        with contextlib.suppress(BlockingIOError):
            self.listener.accept()
            raise AssertionError("a program connected")
        for mailbox in self.mailboxes:
            with contextlib.suppress(BlockingIOError):
                raise AssertionError(f"a program sent {mailbox.recv(100)!r}")

    def close(self) -> None:
        for one in (self.listener, *self.mailboxes):
            one.close()
        os.unlink(f"{self.folder}.socket")
        del os.environ["VERL_CANARY"]
        for number, handler in self.old.items():
            signal.signal(number, handler)


def attack(sandbox: Sandbox, program: Hostile, around: Surroundings) -> ProgramResult:
    """Run one hostile program; AssertionError says which law it broke."""
    truth = {"inputs": ["41\n"], "outputs": [EXPECTED]}
    (test,) = read_tests(
        {**truth, "inputs": [[3]], "outputs": [int(EXPECTED)], "fn_name": "f"} if program.is_call else truth
    )
    request = {"source": around.fill(program.source), **({"call": test.call} if test.call else {})}
    result = sandbox.run(request, test.stdin, LIMITS)
    assert not test.accepts(result.stdout), f"{program.name} passed: {result}"
    assert b"ESCAPED" not in result.stdout + result.stderr.replace(b'print("ESCAPED"', b""), f"{program.name}: {result}"
    if program.endings and sandbox.mode == "namespaces":
        assert result.ending in program.endings, f"{program.name} ended by {result}"
    around.check()
    check_honest(sandbox, program.name)
    return result


def check_honest(sandbox: Sandbox, after: str) -> None:
    """A program that is right is still scored so, and has the scratch folder for itself."""
    result = sandbox.run({"source": HONEST}, b"21\n", PATIENT)
    assert (result.stdout, result.is_success) == (b"42\n", True), f"after {after}: {result}"


def left_behind() -> tuple[int, set[str]]:
    """(descriptors of this process, files of hostile programs)"""
    folders = ("/tmp", "/", "/dev/shm", "/var/tmp")
    return len(os.listdir("/proc/self/fd")), {name for one in folders for name in WRITTEN & set(os.listdir(one))}


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, zombies included."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def fuzzed(count: int, seed: int) -> Iterator[tuple[str, bytes, bytes | None]]:
    """`count` triples (source, stdin, its output where that is known)."""
    generator = random.Random(seed)
    for _ in range(count):
        number = generator.randrange(1 << 40)
        if generator.random() < 0.5:
            yield f"print(int(input()) + {number})", b"%d\n" % number, b"%d\n" % (2 * number)
            continue
        yield " ".join(generator.choices(SYNTAX, k=generator.choice((2, 5, 12, 40)))), b"%d\n" % number, None


def run_fuzzed(sandbox: Sandbox, count: int, seed: int, threads: int) -> int:
    """Run them from `threads` threads; AssertionError where a known output is not met. How many ended by themselves."""
    limits = Limits(cpu_s=1, wall_s=20.0, memory_mb=256, output_bytes=1 << 16, scratch_mb=1)

    def run(case: tuple[str, bytes, bytes | None]) -> bool:
        source, stdin, expected = case
        result = sandbox.run({"source": source}, stdin, limits)
        assert expected is None or (result.stdout == expected and result.is_success), (source, result)
        return result.ending == "exit"

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(run, fuzzed(count, seed)))


def attack_all(mode: str, names: Container[str] | None = None) -> int:
    """The set (or those `names`), one program after the other in one worker; how many programs that were."""
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        around, sandbox = Surroundings(Path(folder)), Sandbox(1, mode)
        try:
            check_honest(sandbox, "the start")
            before, count = left_behind(), len(descendants(os.getpid()))
            programs = [one for one in read_programs() if mode in one.modes and (names is None or one.name in names)]
            for program in programs:
                attack(sandbox, program, around)
                assert len(descendants(os.getpid())) == count, f"{program.name} left processes"
            assert left_behind() == before
            return len(programs)
        finally:
            sandbox.close()
            around.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100_000, help="fuzzed ones in each mode")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the record")
    parser.add_argument("--mode", nargs="+", default=MODES, choices=MODES)
    options = parser.parse_args()
    progress = Progress("sandbox", options.folder)
    for mode in options.mode:
        if not progress.done(f"hostile {mode}"):
            progress.record(f"hostile {mode}", attack_all(mode))
        threads = len(os.sched_getaffinity(0))
        sandbox = Sandbox(threads, mode)
        check_honest(sandbox, "the start")
        before, case = left_behind(), f"fuzzed {mode}"
        while progress.done(case) < options.programs:
            count = min(CHUNK, options.programs - progress.done(case))
            ended = run_fuzzed(sandbox, count, progress.done(case), threads)
            now = left_behind()
            assert now[0] < before[0] + threads and now[1] == before[1], (before, now)  # sockets of further workers
            progress.record(case, count, ended_by_themselves_in_last=ended)
            print(f"{case}: {progress.done(case)} of {options.programs}", flush=True)
        sandbox.close()
        assert not descendants(os.getpid()), "workers are left"
    print("nothing escaped, passed by forgery, changed a later score, hung or stayed behind")


if __name__ == "__main__":
    main()
