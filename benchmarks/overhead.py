"""The share of a training step that is not model maths, on the quickstart's job and on the 1M job.

    python benchmarks/overhead.py [--json PATH] [--threads 2] [--steps 10]

Model maths: forward and loss, backward, the optimiser step (norm and clipping included), decode and prefill forwards,
and sampling. Everything else is overhead: batching, packing, scheduling of the rollout, rewards, advantages,
metrics, the ledger, logging. Wrappers time the calls of engine and rollout, with a few timers per micro-batch.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.jobs import EQUAL, NATURAL, Stepper, grpo_overrides, prepare_1m, prepare_quickstart, stepper
from support.record import save

from verl.workers.engine import micro_batch_forward, torch_engine
from verl.workers.engine.torch_engine import TorchEngine

FORWARD = {
    micro_batch_forward: ("hidden_states",),
    torch_engine: ("token_logprobs", "token_values", "token_loss_one_pass"),
}
STAGES = ("gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights", "ledger")


class MathsTimer:
    """Seconds of the training engine's maths, by kind; patches the functions for the whole process."""

    def __init__(self) -> None:
        self.seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        for module, names in FORWARD.items():
            for name in names:
                setattr(module, name, self.timed("forward", getattr(module, name)))
        torch.Tensor.backward = self.timed("backward", torch.Tensor.backward)  # type: ignore[method-assign]
        TorchEngine.optim_step = self.timed("optimizer", TorchEngine.optim_step)  # type: ignore[method-assign]

    def timed(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[kind] += time.perf_counter() - started

        return call

    def take(self) -> dict[str, float]:
        values = dict(self.seconds)
        self.seconds.update(dict.fromkeys(self.seconds, 0.0))
        return values


def measure(name: str, job: Stepper, maths: MathsTimer, steps: int) -> dict:
    """Median over steps of each part's share of a step."""
    rows = []
    for number in range(steps + 2):
        step = job.step()
        stats, kinds = step.rollout, maths.take()
        if number < 2:
            continue  # warm-up
        kinds |= {"decode": stats["model_s"], "sampling": stats["sampling_s"]}
        parts = shares(step.seconds, step.timing_s, kinds, stats["scheduling_s"])
        rows.append({"step_s": step.seconds, "tokens": step.tokens, **parts})
    row = {key: statistics.median(r[key] for r in rows) for key in rows[0]}
    return {"job": name, "steps": steps, **row}


def shares(
    seconds: float, timing_s: dict[str, float], kinds: dict[str, float], scheduling_s: float
) -> dict[str, float]:
    """Shares of one step: each kind of maths, and the other parts."""
    training = kinds["forward"] + kinds["backward"] + kinds["optimizer"]
    stage = {name: timing_s.get(name, 0.0) for name in STAGES}
    engines = stage["old_log_prob"] + stage["update_actor"]
    other = {
        "scheduling": scheduling_s,
        "answers and rewards": stage["gen"] + stage["reward"] - kinds["decode"] - kinds["sampling"] - scheduling_s,
        "advantages": stage["adv"],
        "mini-batches": engines - training,
        "publishing": stage["update_weights"],
        "ledger": stage["ledger"],
        "metrics, rest": seconds - sum(stage.values()),
    }
    values = {**kinds, "outside": sum(other.values()), **{f"outside: {k}": v for k, v in other.items()}}
    return {key: value / seconds for key, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="steps of each job, after two of warm-up")
    parser.add_argument("--only", default="", help="run the jobs whose name starts with this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    maths, rows = MathsTimer(), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["VERL_FILE_LOGGER_ROOT"] = temporary
        for name in ("quickstart", "1M equal", "1M natural"):
            if name.startswith(args.only):
                rows.append(run_job(name, folder / name.replace(" ", "_"), maths, args.steps))
                show(rows[-1])
    if args.json:
        save(args.json, {"rows": rows})


def run_job(name: str, folder: Path, maths: MathsTimer, steps: int) -> dict:
    folder.mkdir()
    if name == "quickstart":
        overrides = prepare_quickstart(folder)
    else:
        prepare_1m(folder)
        overrides = grpo_overrides(folder, NATURAL if name.endswith("natural") else EQUAL)
    with stepper(overrides) as job:
        maths.take()
        return measure(name, job, maths, steps)


def show(row: dict) -> None:
    print(
        f"{row['job']}: {row['step_s']:.3f} s a step, {row['tokens']:.0f} tokens; "
        f"outside model maths {row['outside']:.1%} (medians of {row['steps']} steps)"
    )
    kinds = ("forward", "backward", "optimizer", "decode", "sampling")
    print("  maths:   " + ", ".join(f"{kind} {row[kind]:.1%}" for kind in kinds))
    parts = {key.removeprefix("outside: "): value for key, value in row.items() if key.startswith("outside: ")}
    print("  outside: " + ", ".join(f"{key} {value:.1%}" for key, value in parts.items()), flush=True)


if __name__ == "__main__":
    main()
