"""The hostile set once in every mode, and as a user without rights: scripts/soak/sandbox.py has the laws."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.soak.sandbox import EXPECTED, Surroundings, attack, attack_all, read_programs, run_fuzzed
from tests.conftest import skip_or_fail
from verl.rewards.sandbox import ProgramResult, Sandbox
from verl.rewards.sandbox.pool import MODES

ROOT = Path(__file__).resolve().parents[3]
QUICK = {
    "fork bomb", "kill of everybody", "signals by other calls", "the grader's file", "files of the machine", "proc",
    "ptrace of the grader", "memory of the grader by system calls", "writing everywhere", "8 GB allocation",
    "leaving a file for the next program", "reading what the last program left", "a tcp connection to the grader",
    "limits and priorities of the grader", "new namespaces and rights", "stolen descriptors", "threads without end",
    "a datagram to sockets of the machine",
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_no_hostile_program_escapes_passes_hangs_or_leaves_anything(mode):
    assert attack_all(mode) >= 60


@pytest.mark.parametrize("mode", MODES)
def test_the_set_holds_for_a_user_without_rights(mode):
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if os.geteuid() or not shutil.which("setpriv") or python is None:
        skip_or_fail("not root, or no setpriv or system python that another user may run")
    script = f"from scripts.soak.sandbox import attack_all\nprint(attack_all({mode!r}, {sorted(QUICK)}))"
    command = ["setpriv", "--reuid=65533", "--regid=65533", "--clear-groups", python, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PATH": "/usr/bin:/bin"})
    assert done.stdout == f"{len(QUICK)}\n", done.stderr


def test_programs_that_are_right_stay_right_among_a_thousand_fuzzed():
    sandbox = Sandbox(2)
    try:
        assert 900 < run_fuzzed(sandbox, 1000, seed=1, threads=2) <= 1000
    finally:
        sandbox.close()


@pytest.mark.parametrize(
    ("stdout", "stderr", "law"),
    [
        (EXPECTED.encode(), b"", "fork bomb passed"),
        (b"", b"ESCAPED", "fork bomb: "),
        (b"", b"", "fork bomb ended by"),
    ],
)
def test_a_broken_law_is_found(tmp_path, stdout, stderr, law):
    class Broken:
        mode = "namespaces"

        def run(self, request, stdin, limits):
            return ProgramResult(stdout, stderr, "wall", -9, 0.0)

    around = Surroundings(tmp_path)
    try:
        with pytest.raises(AssertionError, match=law):
            attack(Broken(), read_programs()[0], around)
    finally:
        around.close()
