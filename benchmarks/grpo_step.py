"""A full GRPO step of the ordinary trainer against TRL's GRPOTrainer: blocks of steps of each, in turns.

    python benchmarks/grpo_step.py [--peer-python PATH] [--json PATH] [--threads 2] [--blocks 3] [--steps 2]

A random Qwen3 of one million parameters (hidden 128, MLP 512, 4 layers, 4 heads, 2 key-value heads, vocabulary 128,
tied), 16 prompts x 8 completions a step, float32, learning rate 1e-4, no KL term, temperature 1. Equal lengths: 64
new tokens. Natural lengths: a random EOS ends a completion, at most 512 new tokens; only real tokens are counted.
Our step includes its records: metrics to a file and the ledger. TRL runs in its own process, stopped while ours runs.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import torch
from support.jobs import EQUAL, NATURAL, GRPOCase, grpo_overrides, prepare_1m, stepper
from support.peer import PEER_ENVIRONMENT, peer
from support.record import save


def summary(steps: list[tuple[float, int]]) -> dict[str, float]:
    """Medians over steps."""
    return {
        "step_s": statistics.median(seconds for seconds, _ in steps),
        "tokens_per_step": statistics.median(tokens for _, tokens in steps),
        "tokens_per_s": statistics.median(tokens / seconds for seconds, tokens in steps),
        "steps": len(steps),
    }


def measure(folder: Path, case: GRPOCase, args: argparse.Namespace) -> dict:
    """Medians of our blocks and the peer's, run in turns after warm-up steps of each."""
    ours, theirs = [], []
    with stepper(grpo_overrides(folder, case)) as job, peer(args.peer_python, folder, case, args.threads) as trl:
        for block in range(args.blocks + 1):
            count = args.steps if block else args.warmup
            our_steps = [job.step() for _ in range(count)]
            peer_steps = trl.steps(count) if trl else []
            if block:
                ours += [(step.seconds, step.tokens) for step in our_steps]
                theirs += peer_steps
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
        save(args.json, {"rows": rows})


def show(row: dict) -> None:
    for system in ("ours", "trl"):
        if system in row:
            s = row[system]
            print(
                f"{row['case']:<10}{system:<6}{s['step_s']:>8.2f}{s['tokens_per_step']:>9.0f}{s['tokens_per_s']:>10.0f}"
                f"   {s['steps']}",
                flush=True,
            )
    if "ratio" in row:
        print(f"{row['case']:<10}ratio {row['ratio']:.2f}x tokens/s", flush=True)


if __name__ == "__main__":
    main()
