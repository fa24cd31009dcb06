"""The oldest and the newest torch and transformers that pyproject.toml allows, each in an environment of its own.

    make soak PART=versions                       # both ends; goes on where it stopped, also with newer code
    python -m scripts.soak.versions --only newest

constraints/oldest.txt and newest.txt say what is installed (gigabytes: both torches are default builds), below
~/.cache/verl-soak/versions or VERL_SOAK_CACHE. The tests of models, data, agents and a few whole runs must
pass. Each case says its commit; without benchmarks/results/soak/versions.json all run again.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from scripts.soak.progress import RESULTS, ROOT, Progress, current_commit

ENDS = ("oldest", "newest")
TESTS = (
    "tests/models",
    "tests/unit/models",
    "tests/unit/agent",
    "tests/unit/data",
    "tests/e2e/test_main_job.py",
    "tests/e2e/test_sft.py",
    "tests/e2e/test_ranks.py",
)


def environment_of(end: str) -> Path:
    """The Python of an end's environment, installed if its pins have changed."""
    cache = Path(os.environ.get("VERL_SOAK_CACHE") or Path.home() / ".cache" / "verl-soak") / "versions"
    pins, venv = ROOT / "constraints" / f"{end}.txt", cache / end
    stamp, wanted = venv / ".installed", pins.read_text() + (ROOT / "pyproject.toml").read_text()
    if not stamp.is_file() or stamp.read_text() != wanted:
        cache.mkdir(parents=True, exist_ok=True)
        settings = {**os.environ, "CONSTRAINTS": str(pins.relative_to(ROOT))}
        subprocess.run([ROOT / "scripts" / "install.sh", venv, "dev"], check=True, env=settings)
        stamp.write_text(wanted)
    return venv / "bin" / "python"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ENDS, action="append", help="this end; may be repeated")
    commit = current_commit("verl", "tests", "constraints")
    progress, failed = Progress("versions", commit=commit, keep_older=True), list[str]()
    for end in parser.parse_args().only or ENDS:
        waiting = [tests for tests in TESTS if not progress.done(f"{end}: {tests}")]
        python = environment_of(end) if waiting else Path()
        for tests in waiting:
            command = [python, "-m", "pytest", "-q", "-m", "not soak and not vllm and not ray and not gpu", tests]
            settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            said = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
            print(f"{end}: {tests}: {(said.stdout.strip().splitlines() or ['nothing said'])[-1]}", flush=True)
            passed = re.search(r"(\d+) passed", said.stdout)
            if said.returncode or passed is None:
                failed.append(f"{end}: {tests}")
                print(said.stdout[-4000:], said.stderr[-2000:], sep="\n", file=sys.stderr)
            else:
                progress.record(f"{end}: {tests}", int(passed[1]))
    print("\n".join(f"failed: {name}" for name in failed) or f"all passed; {RESULTS / 'versions.json'}")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
