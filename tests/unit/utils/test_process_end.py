"""However user code ends the process of a command, somebody says so and the status is not 0."""

import gzip
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

COMMAND = """
import ctypes, os, signal, sys, threading
from verl.utils.command_line import run_command

def reward():
    {code}

def run(words):
    thread = threading.Thread(target=reward)
    thread.start()
    thread.join()
    print("over")
    return 3 if words else 0

sys.exit(run_command(sys.argv[1:], "help", run))
"""


def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", COMMAND.format(code=code), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        ("os._exit(0)", 1, "os._exit(0) ended the process before the run was over, called at <string>:6 in reward"),
        ("os.close(2); os._exit(5)", 5, "os._exit(5) ended the process"),
        ("os.abort()", -signal.SIGABRT, "crashed (SIGABRT)"),
        ("ctypes.string_at(0)", -signal.SIGSEGV, "crashed (SIGSEGV)"),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL, "was killed by SIGKILL"),
        ("os.kill(os.getpid(), 15)", -signal.SIGTERM, "was ended by SIGTERM"),
        ("signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()", -signal.SIGALRM, "was ended by SIGALRM"),
    ],
)
def test_an_end_from_inside_is_said_once_and_is_no_success(code: str, status: int, says: str):
    done = run(code)
    reasons = (
        says,
        "is gone: it was killed, it crashed, or native code called exit",
    )  # the kernel lists an ended process until it is waited for
    assert done.returncode == status and "over" not in done.stdout
    assert any(reason in done.stderr for reason in reasons[: 1 if "_exit" in code else 2]), done.stderr
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(3)"])
@pytest.mark.parametrize("saved", [True, False])
def test_the_end_says_from_which_step_the_run_resumes(tmp_path: Path, end: str, saved: bool):
    code = (
        "from pathlib import Path; from verl.utils.process_end import set_resume_point; "
        f"p = Path({str(tmp_path)!r}) / 'l'; "
    )
    said = run(f"{code}set_resume_point(p, 'k9'); {'p.write_text(str(5)); ' if saved else ''}{end}").stderr
    assert ("resumes from global_step_5, with trainer.experiment_name=k9" in said) == saved, said
    assert ("nothing was saved" in said) != saved and "Traceback" not in said


def test_a_crash_shows_where():
    assert "line 6 in reward" in run("ctypes.string_at(0)").stderr


def test_an_end_by_native_code_is_said_though_its_status_stays():
    said = run("ctypes.CDLL(None)._exit(0)").stderr
    assert ("status 0" in said and "native code called exit" in said) or "is gone" in said


@pytest.mark.parametrize(
    ("code", "words", "status"),
    [
        ("pass", [], 0),
        ("pass", ["x"], 3),
        ("os.fork() or os._exit(0)", [], 0),
        ("import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start(); p.join()", [], 0),
    ],
)
def test_a_command_that_ends_by_itself_says_nothing(code: str, words: list[str], status: int):
    done = run(code, *words)
    assert (done.returncode, "over" in done.stdout) == (status, True) and "error" not in done.stderr


def test_sys_exit_in_user_code_is_no_success():
    done = run("pass\n\nthreading.Thread.join = lambda thread: sys.exit(0)")
    assert done.returncode == 1 and "error: user code called sys.exit(0) before the run was over" in done.stderr


def test_an_exception_of_the_command_is_said_by_its_traceback_alone():
    done = run("pass\n\nthreading.Thread.join = lambda thread: 1 / 0")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr and "not over" not in done.stderr


ENDS = """
import atexit, cProfile, gzip, sys, threading, time, types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from verl.utils.process_end import end_process

if "torch" in sys.argv:
    sys.modules["torch"] = types.ModuleType("torch")  # as big a program as one with torch, here

class Teardown:
    def __del__(self):
        print("teardown")

at_teardown = Teardown()
text, packed, raw = open("text.txt", "w"), gzip.open("packed.gz", "wt"), open("raw.bin", "wb")
text.write("a line"), packed.write("b"), raw.write(b"c")
atexit.register(lambda: text.write(" of a hook"))
later = threading.Thread(target=lambda: (time.sleep(0.2), text.write(" of a thread")))
later.start()
ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.1), raw.write(b" of a pool")))
print("said", end="")
if __name__ == "__main__":
    end_process(lambda: int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [0, 3, 130])
def test_a_command_ends_without_teardown_and_loses_nothing(tmp_path: Path, status: int):
    for loaded, shown in (("torch", "said"), ("nothing", "saidteardown\n")):
        done = in_folder(tmp_path, [], str(status), loaded)
        assert (done.returncode, done.stdout, done.stderr) == (status, shown, "")
        assert (tmp_path / "text.txt").read_text() == "a line of a thread of a hook"
        assert gzip.decompress((tmp_path / "packed.gz").read_bytes()) == b"b"
        assert (tmp_path / "raw.bin").read_bytes() == b"c of a pool"


def test_a_profiler_that_runs_a_command_gets_its_end(tmp_path: Path):
    done = in_folder(tmp_path, ["-m", "cProfile", "-o", "profile.out"], "0", "torch")
    assert done.returncode == 0 and (tmp_path / "profile.out").stat().st_size > 0


def test_an_end_whose_words_cannot_be_written_is_no_success(tmp_path: Path):
    with open("/dev/full", "w") as full:
        assert in_folder(tmp_path, [], "0", "torch", stdout=full).returncode == 120
        assert in_folder(tmp_path, [], "2", "torch", stdout=full).returncode == 2


def in_folder(folder: Path, options: list[str], *words: str, stdout: Any = subprocess.PIPE) -> Any:
    (folder / "ends.py").write_text(ENDS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    command = [sys.executable, *options, "ends.py", *words]
    return subprocess.run(
        command, cwd=folder, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, env=environment, check=False
    )


def test_every_program_of_the_package_ends_by_end_process():
    texts = {str(path): path.read_text() for path in ROOT.joinpath("verl").rglob("*.py")}
    assert [path for path, text in texts.items() if re.search(r"(exit|Exit)\((\w+\.)?\w*main\(", text)] == []
    assert sum(".process_end import end_process" in text for text in texts.values()) > 12


NOISE = """
import atexit, logging, sys, threading, time, types

sys.modules["torch"] = types.ModuleType("torch")

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    print("a word that nobody flushed")
    atexit.register(lambda: print("a hook of the user"))
    atexit.register(logging.getLogger("some.library").warning, "a library says good-bye")
    threading.Thread(target=lambda: (time.sleep(0.2), print("a thread")), daemon=False).start()
    raise ValueError("boom")
"""
ANSWER = '{"data_source": "mine", "responses": ["1"], "reward_model": {"ground_truth": "1"}}\n'


def last_line(folder: Path, *words: str) -> str:
    """The last line on the screen of a command that refuses."""
    done = subprocess.run(
        [sys.executable, "-m", "verl.cli", *words],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
    )  # fmt: skip
    assert done.returncode, done.stdout
    return done.stdout.splitlines()[-1]


def test_the_error_of_a_command_is_the_last_thing_on_the_screen(tmp_path: Path):
    (tmp_path / "noise.py").write_text(NOISE)
    (tmp_path / "answers.jsonl").write_text(ANSWER)
    scoring = ["eval", "data.path=answers.jsonl", "reward.custom_reward_function.path=noise.py"]
    assert last_line(tmp_path, *scoring).startswith("Repair the function, or set ")  # the end of the error
    assert last_line(tmp_path, "config", "print", "trainer.nonsense=1").startswith("error: unknown key")
    assert last_line(tmp_path, "sft", "model.path=nowhere").startswith(("error: ", "  2. "))
