"""The quickstart with several seeds: held-out problems solved before and after GRPO, and seconds. For an idle machine.

python benchmarks/quickstart.py [--seeds 1 2 3 4 5] [--json benchmarks/results/quickstart.json]
python benchmarks/quickstart.py actor_rollout_ref.rollout.name=vllm --json benchmarks/results/quickstart_vllm.json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from support.record import save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="further key=value overrides for the GRPO run")
    args = parser.parse_args()
    rows = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "verl.cli",
                "quickstart",
                "--out",
                folder,
                "--seed",
                str(seed),
                *args.overrides,
            ]
            environment = {**os.environ, "VERL_FILE_LOGGER_ROOT": f"{folder}/metrics"}
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
            rows.append({"seed": seed, **json.loads(Path(folder, "result.json").read_text())})
        row = rows[-1]
        print(f"seed {seed}: {row['before']:.1%} -> {row['after']:.1%} in {row['seconds']:.0f} s", flush=True)
    if args.json:
        save(args.json, {"rows": rows, "overrides": args.overrides})


if __name__ == "__main__":
    main()
