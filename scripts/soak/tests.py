"""The repetitions of tests that CI leaves out: those marked `soak`, a case for each file.

make soak PART=tests                         # about five minutes on two cores; goes on where it stopped
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from scripts.soak.progress import RESULTS, ROOT, Progress, current_commit

IMPORT = "from tests.tiers import"  # in a file of tests that has some for the soak
NOTHING_SELECTED = 5  # pytest's exit code


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
    for file in files:
        if progress.done(file):
            continue
        command = [sys.executable, "-m", "pytest", "-q", "-m", markers, file]
        said = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "CI": "true", **environment},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        print(f"{file}: {(said.stdout.strip().splitlines() or ['nothing said'])[-1]}", flush=True)
        passed = re.search(r"(\d+) passed", said.stdout)
        if passed and not said.returncode:
            progress.record(file, int(passed[1]))
        elif may_lack and said.returncode in (0, NOTHING_SELECTED):  # all of them skipped, or none
            progress.record(file, 1, tests=0)
        else:
            failed.append(file)
            print(said.stdout[-4000:], said.stderr[-2000:], sep="\n", file=sys.stderr)
    print(f"{len(files) - len(failed)} of {len(files)} files passed; {RESULTS / f'{part}.json'}")
    return 1 if failed else 0


def main() -> int:
    tests = [file for file in (ROOT / "tests").rglob("test_*.py") if IMPORT in file.read_text()]
    return run_files("tests", tests, "soak and not vllm and not ray", {}, may_lack=False)


if __name__ == "__main__":
    raise SystemExit(main())
