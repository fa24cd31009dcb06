"""Programs run with their input and limits, from threads, and nothing of them or of the workers stays."""

import contextlib
import dataclasses
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts.soak.sandbox import HONEST, PATIENT, descendants, left_behind
from tests.conftest import skip_or_fail
from verl.rewards.sandbox import Limits, Sandbox, SandboxError, pool, run_program, shared_sandbox
from verl.rewards.sandbox.inside import system_calls
from verl.rewards.sandbox.pool import MODES

ROOT = Path(__file__).resolve().parents[3]
TIGHT = Limits(cpu_s=1, wall_s=20.0, memory_mb=128, output_bytes=10_000, scratch_mb=1)


@pytest.fixture(scope="module", params=MODES)
def sandbox(request):
    made = Sandbox(1, request.param)
    yield made
    made.close()


def test_a_program_gets_its_input_and_its_output_comes_back(sandbox):
    source = "import sys\nprint(input()[::-1])\nprint(len(sys.stdin.read()), file=sys.stderr)\nsys.exit(7)"
    result = sandbox.run({"source": source}, "abü\nrest".encode(), PATIENT)
    assert (result.stdout.decode(), result.stderr) == ("üba\n", b"4\n")
    assert (result.ending, result.exit_code, result.is_success) == ("exit", 7, False)


def test_a_function_gets_its_arguments_and_its_value_comes_back_apart_from_what_it_prints(sandbox):
    source = "class Solution:\n  def f(self, a: List[int], b):\n    print('noise')\n    return (a[b], {1: {2}}, None)"
    result = sandbox.run({"source": source, "call": {"function": "f", "arguments": [[5, 6], 1]}}, b"", PATIENT)
    assert (result.stdout, result.stderr) == (b'[6, {"dict": [[1, {"set": [2]}]]}, null]', b"noise\n")
    result = sandbox.run({"source": "def f(x): return x + 1", "call": {"expression": "f(3) * 2"}}, b"", PATIENT)
    assert result.stdout == b"8"


def test_an_error_of_the_program_is_its_own(sandbox):
    result = sandbox.run({"source": "x = 1\nx / 0"}, b"", PATIENT)
    assert result.stderr.decode().splitlines() == [
        "Traceback (most recent call last):", '  File "main.py", line 2, in <module>',
        "ZeroDivisionError: division by zero",
    ]  # fmt: skip
    assert (result.ending, result.exit_code) == ("exit", 1)


@pytest.mark.parametrize(
    ("source", "changed", "endings"),
    [
        ("while True: pass", {}, {"cpu"}),
        ("import time\ntime.sleep(60)", {"wall_s": 0.3}, {"wall"}),
        ("while True: print('x' * 5000, flush=True)", {}, {"output"}),
        ("try:\n    bytearray(200 << 20)\nexcept MemoryError:\n    exit(3)", {}, {"exit"}),
        ("import ctypes\nctypes.string_at(8)", {}, {"signal"}),
    ],
)
def test_what_passes_a_limit_ends_and_says_which(sandbox, source, changed, endings):
    result = sandbox.run({"source": source}, b"", dataclasses.replace(TIGHT, **changed))
    assert result.ending in endings and not result.is_success and len(result.stdout) <= TIGHT.output_bytes
    assert result.exit_code == {"exit": 3, "signal": -11}.get(result.ending, -9)


def test_libraries_that_programs_use_are_there(sandbox):
    source = "import numpy, heapq, collections, re, asyncio, decimal, threading\nprint(numpy.arange(4).sum())"
    assert sandbox.run({"source": source}, b"", PATIENT).stdout == b"6\n"
    deep = "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
    deep += "f = lambda n: n and f(n - 1)\nt = threading.Thread(target=lambda: print(f(50_000)))\nt.start()"
    assert sandbox.run({"source": deep}, b"", PATIENT).stdout == b"0\n"


def test_files_are_its_own_and_gone_for_the_next():
    source = "import os\nprint([name for name in os.listdir('.') if os.path.isfile(name)])\n"
    source += "open('a', 'w').write('x')\nprint(open('/tmp/a').read())"
    for _ in range(2):
        assert run_program(source).stdout == b"[]\nx\n"


def test_an_environment_below_tmp_is_seen_and_not_written(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    file = tmp_path / "package" / "data.txt"
    file.write_text("seen")
    view = pool._view()
    view["paths"].append(str(tmp_path / "package"))
    monkeypatch.setattr(pool, "_view", lambda: view)
    sandbox = Sandbox(1, "namespaces")
    try:
        read = sandbox.run({"source": f"open('a', 'w').write('x')\nprint(open({str(file)!r}).read())"}, b"", PATIENT)
        wrote = sandbox.run({"source": f"open({str(file)!r}, 'w').write('x')"}, b"", PATIENT)
    finally:
        sandbox.close()
    assert read.stdout == b"seen\n" and not wrote.is_success and file.read_text() == "seen"


def test_threads_get_their_own_outputs_and_nothing_stays():
    others = set(descendants(os.getpid()))
    sandbox = Sandbox(2)
    run = lambda number: sandbox.run({"source": HONEST}, b"%d\n" % number, PATIENT).stdout  # noqa: E731
    assert run(1) == b"2\n"
    before = left_behind()[0]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(run, range(40))) == [b"%d\n" % (2 * number) for number in range(40)]
    assert left_behind()[0] <= before + 1  # the socket of the second worker
    workers = set(descendants(os.getpid())) - others
    sandbox.close()
    assert len(workers) >= 2 and not alive(workers) and left_behind()[0] < before


def alive(pids):
    def state(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"

    return [pid for pid in pids if state(pid) not in ("gone", "Z", "X")]


def test_a_lost_worker_is_replaced_and_a_program_that_loses_two_is_an_error():
    others = set(descendants(os.getpid()))
    sandbox = Sandbox(1)

    def workers():
        return [pid for pid in descendants(os.getpid()) if pid not in others]

    def kill(pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # the last of a namespace ended with its first
                os.kill(pid, signal.SIGKILL)

    try:
        for _ in range(2):
            assert sandbox.run({"source": HONEST}, b"1\n", PATIENT).stdout == b"2\n"
            kill(workers())
        with ThreadPoolExecutor(1) as threads:
            stuck = threads.submit(sandbox.run, {"source": "import time\ntime.sleep(100)"}, b"", Limits())
            while not stuck.done():
                if len(found := workers()) == 4:
                    kill(found)
                time.sleep(0.02)
            with pytest.raises(
                SandboxError, match=r"two workers of the sandbox were lost|worker of the sandbox did not start"
            ):
                stuck.result()
        assert sandbox.run({"source": HONEST}, b"1\n", PATIENT).stdout == b"2\n"
    finally:
        sandbox.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_program_that_crashes_leaves_no_core_to_the_machine(mode):
    """A core handler (`|...` in core_pattern) ignores RLIMIT_CORE; /proc shows root as owner of what it cannot dump."""
    sandbox = Sandbox(1, mode)
    sandbox.run({"source": ""}, b"", PATIENT)
    workers = set(descendants(os.getpid()))
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(sandbox.run, {"source": "import time\ntime.sleep(2)"}, b"", PATIENT)
        owner = None
        while not done.done():
            for pid in set(descendants(os.getpid())) - workers:
                with contextlib.suppress(OSError):
                    owner = owner if descendants(pid) else os.stat(f"/proc/{pid}/mem").st_uid
            time.sleep(0.1)
    sandbox.close()
    assert owner == 0


@pytest.mark.parametrize("mode", MODES)
def test_nothing_outlives_a_grader_that_is_killed(mode):
    script = (
        "import os, threading, time\nfrom scripts.soak.sandbox import *\n"
        f"sandbox = Sandbox(1, {mode!r})\n"
        "sleeper = {'source': 'import time\\ntime.sleep(100)'}\n"
        "run = threading.Thread(target=sandbox.run, args=(sleeper, b'', Limits(wall_s=90)))\n"
        "run.start()\n"
        f"while run.is_alive() and len(descendants(os.getpid())) < {4 if mode == 'namespaces' else 2}:\n"
        "    time.sleep(0.05)\n"
        "print(*descendants(os.getpid()), flush=True)\nrun.join()"
    )
    grader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    pids = [int(word) for word in grader.stdout.readline().split()]
    grader.kill()
    grader.wait()
    end = time.monotonic() + 30
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert pids and not alive(pids)


def test_a_kernel_without_namespaces_is_named_and_the_fallback_runs():
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode:
        skip_or_fail("no user namespace in which namespaces could be forbidden")
    script = (
        "from scripts.soak.sandbox import *\ns = Sandbox(1)\nfor _ in range(2): check_honest(s, 'it')\nprint(s.mode)"
    )
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", forbid, "sh", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stdout == "fallback\n", done.stderr
    assert done.stderr.count("programs run in the weaker sandbox") == 1 and "unshare: No space left" in done.stderr


def test_numpy_starts_no_thread_in_a_worker_for_then_user_namespaces_are_refused():
    command, script = [], "from scripts.soak.sandbox import *\ns = Sandbox(1)\ncheck_honest(s, 'it')"
    if os.geteuid() == 0:  # whose namespaces need no new user
        if not shutil.which("setpriv"):
            skip_or_fail("no setpriv, with which root gives up its rights")
        command = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all"]
    done = subprocess.run([*command, sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "Invalid argument" not in done.stderr, done.stderr


@pytest.mark.parametrize("mode", MODES)
def test_limits_of_the_user_that_are_lower_stay(mode):
    script = (
        "from scripts.soak.sandbox import *\nimport resource\n"
        "for name, value in ('STACK', 8 << 20), ('NOFILE', 50), ('NPROC', 60):\n"
        "    resource.setrlimit(getattr(resource, 'RLIMIT_' + name), (value, value))\n"
        f"s = Sandbox(1, {mode!r})\n"
        "source = 'import resource\\nprint(*resource.getrlimit(resource.RLIMIT_NOFILE))'\n"
        "print(s.run({'source': source}, b'', PATIENT).stdout)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "b'50 50\\n'\n", done.stderr


def test_closing_while_programs_run_loses_no_worker():
    sandbox, free = Sandbox(2), queue.LifoQueue.get_nowait
    race = iter([sandbox._slots._free.get])  # another thread takes a worker while those that are free are being listed

    def get_nowait():
        next(race, lambda: None)()
        return free(sandbox._slots._free)

    sandbox._slots._free.get_nowait = get_nowait
    sandbox.close()
    sandbox._slots._free.put(None)  # it is done
    assert sandbox._slots._free.qsize() == 2


def test_a_request_that_is_no_json_is_the_callers_error_and_leaves_nothing():
    sandbox = Sandbox(1)
    sandbox.run({"source": ""}, b"", PATIENT)
    before = left_behind()[0]
    with pytest.raises(TypeError, match="not JSON serializable"):
        sandbox.run({"source": {1}}, b"", PATIENT)
    assert left_behind()[0] < before  # the worker's socket
    assert sandbox.run({"source": HONEST}, b"1\n", dataclasses.replace(PATIENT, cpu_s=0.5)).stdout == b"2\n"
    sandbox.close()


def test_a_mode_that_is_asked_for_is_not_replaced(monkeypatch):
    monkeypatch.setattr("verl.rewards.sandbox.pool._view", lambda: {"paths": ["/no/such/file"], "packages": {}})
    with pytest.raises(SandboxError, match=r"mode='namespaces'.*No such file"):
        Sandbox(1, "namespaces").run({"source": ""}, b"", PATIENT)


def test_a_process_has_one_sandbox_and_a_forked_one_its_own():
    assert shared_sandbox() is shared_sandbox()
    read, write = os.pipe()
    mine = id(shared_sandbox())
    child = os.fork()
    if not child:
        os.write(write, b"same" if id(shared_sandbox()) == mine else b"own")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert os.read(read, 10) == b"own"
    os.close(read)


def test_the_numbers_of_system_calls_are_those_of_the_kernel_headers():
    """Both tables against the headers of this machine, where they are."""
    headers = {1: "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 2: "/usr/include/asm-generic/unistd.h"}
    rows = [
        row.split() for row in f"{system_calls.PLAIN},{system_calls.FILES},{','.join(system_calls.CHECKED)}".split(",")
    ]
    found = 0
    for column, header in headers.items():
        if not Path(header).exists():
            continue
        found_names = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text())
        numbers = dict(reversed(found_names))  # the first of two counts
        numbers["newfstatat"] = numbers.get("newfstatat", numbers.get("fstatat"))
        wrong = [row for row in rows if row and row[column] != "-" and numbers.get(row[0]) != row[column]]
        assert not wrong
        found += len(rows)
    if not found:
        skip_or_fail("no kernel headers; install linux-libc-dev")
    forbidden = {
        "fork",
        "vfork",
        "execve",
        "execveat",
        "ptrace",
        "socket",
        "connect",
        "unshare",
        "setns",
        "mount",
        "bpf",
    }
    assert not forbidden & {row[0] for row in rows if row}
