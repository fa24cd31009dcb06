"""The repetitions of tests that CI leaves out: those marked `soak`, a case for each file.

make soak PART=tests                         # about five minutes on two cores; goes on where it stopped
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from pytest import ExitCode

from scripts.soak.progress import RESULTS, ROOT, Progress, current_commit

IMPORT = "from tests.tiers import"  # in a file of tests that has some for the soak
AT_ONCE = 16  # files a call of pytest; what is lost if it is interrupted


def run_files(
    part: str,
    tests: Iterable[Path],
    markers: str,
    environment: Mapping[str, str],
    may_lack: bool,
    keep_older: bool = False,
) -> int:
    """Run the tests of `markers` in each file, which is a case of `part`; 1 if one fails.

    With `may_lack` a file may have none; with `keep_older` one that passed with older code is not run again.
    """
    progress, failed = Progress(part, commit=current_commit("verl", "tests"), keep_older=keep_older), list[str]()
    files = [str(file.relative_to(ROOT)) for file in sorted(tests)]
    waiting = [file for file in files if not progress.done(file)]
    for start in range(0, len(waiting), AT_ONCE):
        group = waiting[start : start + AT_ONCE]
        passed, said = passed_tests(group, markers, environment)
        for file, count in passed.items():
            if count:
                progress.record(file, count)
            elif count == 0 and may_lack:
                progress.record(file, 1, tests=0)
            else:
                failed.append(file)
        print(f"{min(start + AT_ONCE, len(waiting))} of {len(waiting)} files: {len(failed)} failed", flush=True)
        if not all(file in progress.cases for file in group):
            print(said, file=sys.stderr, flush=True)
    print(f"{len(files) - len(failed)} of {len(files)} files passed; {RESULTS / f'{part}.json'}")
    return 1 if failed else 0


def passed_tests(
    files: Sequence[str], markers: str, environment: Mapping[str, str]
) -> tuple[dict[str, int | None], str]:
    """The number of tests that passed in each of these files, None where one failed; and what pytest printed.

    Two processes share the files, so that torch is loaded twice and not once a file.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-m", markers]
        ran = subprocess.run(
            [*command, f"--junitxml={report}", "-o", "junit_family=xunit1", *files],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "CI": "true", **environment},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        said = f"{ran.stdout[-4000:]}\n{ran.stderr[-2000:]}"
        if ran.returncode not in (ExitCode.OK, ExitCode.TESTS_FAILED, ExitCode.NO_TESTS_COLLECTED):
            return dict.fromkeys(files), said
        passed: dict[str, int | None] = dict.fromkeys(files, 0)
        for test in ElementTree.parse(report).iter("testcase"):
            file = test.get("file", "")
            if test.find("failure") is not None or test.find("error") is not None:
                passed[file] = None
            elif test.find("skipped") is None and (count := passed.get(file)) is not None:
                passed[file] = count + 1
    return passed, said


def main() -> int:
    tests = [file for file in (ROOT / "tests").rglob("test_*.py") if IMPORT in file.read_text()]
    return run_files("tests", tests, "soak and not vllm and not ray", {}, may_lack=False)


if __name__ == "__main__":
    raise SystemExit(main())
