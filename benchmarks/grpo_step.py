"""A whole GRPO step through the ordinary trainer, against TRL's GRPOTrainer: blocks of steps of each in turns.

    python benchmarks/grpo_step.py [--peer-python PATH] [--json PATH] [--threads 2] [--blocks 3] [--steps 2]

A random Qwen3 of one million parameters (hidden 128, MLP 512, 4 layers, 4 heads, 2 key-value heads, vocabulary 128,
tied), 16 prompts x 8 completions a step, float32, learning rate 1e-4, no KL term, temperature 1. Equal lengths: 64
new tokens. Natural lengths: EOS ends a completion by chance, at most 512 new tokens; only real tokens are counted.
Our step includes its records: metrics to a file and the ledger. TRL runs in its own process, asleep while we run.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from support.jobs import EQUAL, NATURAL, GRPOCase, overrides_1m, prepare_1m, stepper

PEER_ENVIRONMENT = """\
The peer was not run. An environment for it, on the torch and transformers of this one (nothing is installed here):
  python3 -m venv peer
  python -c "import site; print(site.getsitepackages()[0])" > "$(echo peer/lib/python3*/site-packages)/base.pth"
  peer/bin/pip install 'trl==1.16.*'
  python benchmarks/grpo_step.py --peer-python peer/bin/python"""


class Peer:
    """TRL in a process of its own; works only while a block is asked for."""

    def __init__(self, python: str, folder: Path, case: GRPOCase, threads: int):
        script = Path(__file__).resolve().parent / "support" / "trl_steps.py"
        settings = json.dumps({**dataclasses.asdict(case), "threads": threads})
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        self.log = (folder / f"trl_{case.name}.log").open("w+")
        self.process = subprocess.Popen(
            [python, str(script), str(folder), settings],
            cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip
        self.read()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"the peer ended early:\n{self.log.read()[-2000:]}")
        return json.loads(line)

    def steps(self, count: int) -> list[tuple[float, int]]:
        """(seconds, completion tokens) of each."""
        self.process.stdin.write(json.dumps({"steps": count}) + "\n")
        self.process.stdin.flush()
        return [(seconds, tokens) for seconds, tokens in self.read()]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()


@contextlib.contextmanager
def peer(python: str | None, folder: Path, case: GRPOCase, threads: int) -> Iterator[Peer | None]:
    it = Peer(python, folder, case, threads) if python else None
    try:
        yield it
    finally:
        if it is not None:
            it.close()


def summary(steps: list[tuple[float, int]]) -> dict[str, float]:
    """Medians over steps."""
    return {
        "step_s": statistics.median(seconds for seconds, _ in steps),
        "tokens_per_step": statistics.median(tokens for _, tokens in steps),
        "tokens_per_s": statistics.median(tokens / seconds for seconds, tokens in steps),
        "steps": len(steps),
    }


def measure(folder: Path, case: GRPOCase, args: argparse.Namespace) -> dict:
    """Blocks of ours and of the peer's in turns, after warm-up steps of each."""
    ours, theirs = [], []
    with stepper(overrides_1m(folder, case)) as job, peer(args.peer_python, folder, case, args.threads) as trl:
        for block in range(args.blocks + 1):
            count = args.steps if block else args.warmup
            mine = [job.step() for _ in range(count)]
            other = trl.steps(count) if trl else []
            if block:
                ours += [(step.seconds, step.tokens) for step in mine]
                theirs += other
    row: dict = {"case": case.name, "ours": summary(ours)}
    if theirs:
        row["trl"] = summary(theirs)
        row["ratio"] = row["ours"]["tokens_per_s"] / row["trl"]["tokens_per_s"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="Python of an environment with TRL")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=3, help="blocks of steps of each, after the warm-up")
    parser.add_argument("--steps", type=int, default=2, help="steps in a block")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each before the first block")
    parser.add_argument("--only", default="", help="run the cases whose name starts with this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cases = [case for case in (EQUAL, NATURAL) if case.name.startswith(args.only)]
    rows = []
    print(f"{'case':<10}{'':<6}{'step s':>8}{'tokens':>9}{'tokens/s':>10}   medians of steps", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["VERL_FILE_LOGGER_ROOT"] = temporary
        prepare_1m(Path(temporary))
        for case in cases:
            rows.append(measure(Path(temporary), case, args))
            show(rows[-1])
    if not args.peer_python:
        print(PEER_ENVIRONMENT)
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "rows": rows}, indent=2) + "\n")


def show(row: dict) -> None:
    for who in ("ours", "trl"):
        if who in row:
            s = row[who]
            print(
                f"{row['case']:<10}{who:<6}{s['step_s']:>8.2f}{s['tokens_per_step']:>9.0f}{s['tokens_per_s']:>10.0f}"
                f"   {s['steps']}",
                flush=True,
            )
    if "ratio" in row:
        print(f"{row['case']:<10}ratio {row['ratio']:.2f}x tokens/s", flush=True)


if __name__ == "__main__":
    main()
