"""A stand-in for `nsys`: notes its command line and what programs mark, and writes a report as nsys does."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = f'#!/bin/sh\nexec {sys.executable} {os.path.abspath(__file__)} "$@"\n'


def install(folder: Path) -> dict[str, str]:
    """Put it into `folder`; the environment that finds it there, whose notes are in `folder/notes`."""
    folder.mkdir()
    (folder / "nsys").write_text(PROGRAM)
    (folder / "nsys").chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "STANDIN_NSYS_NOTES": str(folder / "notes"), "VERL_PLATFORM": "marking-cpu"}


def note(*words: object) -> None:
    with open(os.environ["STANDIN_NSYS_NOTES"], "a") as notes:
        notes.write(json.dumps([os.getpid(), *words]) + "\n")


def notes(folder: Path) -> list[list]:
    return [json.loads(line) for line in (folder / "notes").read_text().splitlines()]


def main(words: list[str]) -> int:
    assert words[0] == "profile"
    flags, program = [], words[1:]
    while program[0].startswith("-"):
        flag = program.pop(0)
        flags.append(flag if flag.startswith("--") else f"{flag} {program.pop(0)}")
    [output] = [f.removeprefix("--output=").removeprefix("-o ") for f in flags if f.startswith(("--output=", "-o "))]
    keep = [int(n) for n in os.listdir("/proc/self/fd") if int(n) > 2]
    environment = {**os.environ, "NSYS_PROFILING_SESSION_ID": "1"}
    child = subprocess.Popen(program, env=environment, pass_fds=[fd for fd in keep if is_open(fd)])
    note("nsys", child.pid, flags, program)
    code = child.wait()
    Path(output.replace("%p", str(child.pid)) + ".1.nsys-rep").write_text("report")
    return code


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
