"""A child process: its answers, its limits, how it ended, and that nothing of it survives."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from verl.runtime.child import AskedChild, Child, ChildLateError, ChildLostError

ECHO = """
import os, sys, time
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
while True:
    request = connection.recv_bytes()
    if request == b"sleep":
        time.sleep(600)
    if request == b"spin":
        while True: pass
    if request == b"end":
        os._exit(3)
    connection.send_bytes(request.upper())
"""


@pytest.fixture
def asked():
    child = AskedChild([sys.executable, "-c", ECHO], os.environ)
    assert child.ask(b"first", 60.0) == b"FIRST"
    yield child
    child.close()


def test_a_child_that_ended_says_how(asked):
    with pytest.raises(ChildLostError, match="it ended with exit code 3"):
        asked.ask(b"end", 60.0)
    with pytest.raises(ChildLostError, match="it ended with exit code 3"):
        asked.ask(b"again", 60.0)
    killed = AskedChild([sys.executable, "-c", ECHO], os.environ)
    killed.child.kill()
    with pytest.raises(ChildLostError, match="it ended with signal SIGKILL"):
        killed.ask(b"first", 60.0)


@pytest.mark.parametrize(("request_", "limits"), [(b"sleep", (0.4,)), (b"spin", (60.0, 0.4))])
def test_a_child_beyond_its_limit_of_the_clock_or_of_the_processor_is_late(asked, request_: bytes, limits):
    begin = time.monotonic()
    with pytest.raises(ChildLateError):
        asked.ask(request_, *limits)
    assert time.monotonic() - begin < 30


def test_a_caller_that_was_suspended_makes_no_child_late(asked):
    """The program that asks is stopped, as by Ctrl-Z, for longer than the limit."""
    program = (
        "import os, sys, time\nfrom verl.runtime.child import AskedChild\n"
        f"child = AskedChild([sys.executable, '-c', {ECHO.replace('upper()', 'lower()')!r}], os.environ)\n"
        "child.ask(b'first', 60.0)\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        "print(child.ask(b'second', 0.8), flush=True)\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert caller.stdout.readline() == b"ready\n"
    (child,) = children_of(caller.pid)
    os.kill(child, signal.SIGSTOP)
    caller.stdin.write(b"\n")
    caller.stdin.flush()
    time.sleep(0.2)
    caller.send_signal(signal.SIGSTOP)
    time.sleep(1.2)
    os.kill(child, signal.SIGCONT)
    threading.Timer(0.1, caller.send_signal, [signal.SIGCONT]).start()
    assert caller.communicate(timeout=60)[0] == b"b'second'\n"


def children_of(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_nothing_that_a_child_started_survives_and_its_output_is_quoted_then_deleted():
    program = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    child = Child([sys.executable, "-c", program], os.environ, log_prefix="verl-test-")
    assert child.how_it_ended(60.0) == "exit code 0"
    below = int(child.last_lines().split()[-1])
    for _ in range(200):
        if not Path(f"/proc/{below}/exe").exists():
            break
        time.sleep(0.05)
    assert not Path(f"/proc/{below}/exe").exists()
    child.close()
    assert not child.log.exists() and child.last_lines() == "its last lines:\n  (none)"
