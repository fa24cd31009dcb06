"""The repetitions of tests that CI leaves out: those marked `soak`, a case for each file.

make soak PART=tests                         # about five minutes on two cores; goes on where it stopped
"""

import os
import re
import subprocess
import sys

from scripts.soak.progress import RESULTS, ROOT, Progress, current_commit

IMPORT = "from tests.tiers import"  # in a file of tests that has some for the soak


def main() -> int:
    progress, failed = Progress("tests", commit=current_commit("verl", "tests")), list[str]()
    tests = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if IMPORT in file.read_text()]
    files = [str(file.relative_to(ROOT)) for file in tests]
    for file in files:
        if progress.done(file):
            continue
        command = [sys.executable, "-m", "pytest", "-q", "-m", "soak and not vllm and not ray", file]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CI": "true"}
        said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        print(f"{file}: {said.stdout.strip().splitlines()[-1]}", flush=True)
        passed = re.search(r"(\d+) passed", said.stdout)
        if said.returncode or passed is None:
            failed.append(file)
            print(said.stdout[-4000:], said.stderr[-2000:], sep="\n", file=sys.stderr)
        else:
            progress.record(file, int(passed[1]))
    print(f"{len(files) - len(failed)} of {len(files)} files passed; {RESULTS / 'tests.json'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
