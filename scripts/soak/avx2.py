"""The suite as on processors without AVX-512: oneDNN and torch may use nothing above AVX2. A case for each
file, which says its commit; without benchmarks/results/soak/avx2.json all run again.

make soak PART=avx2                          # hours on two cores; goes on where it stopped, also with newer code
make soak PART=avx2 ARGS=tests/unit/models   # the files below these folders
"""

import sys

from scripts.soak.progress import ROOT
from scripts.soak.tests import run_files

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def main() -> int:
    folders = [ROOT / name for name in sys.argv[1:] or ["tests"]]
    tests = {file for folder in folders for file in folder.rglob("test_*.py")}
    return run_files(
        "avx2", tests, "not vllm and not ray and not gpu and not soak", AVX2, may_lack=True, keep_older=True
    )


if __name__ == "__main__":
    raise SystemExit(main())
