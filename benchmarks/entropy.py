"""The cost of `actor/entropy`, which every RL run reports, as a share of a training step.

    python benchmarks/entropy.py [--json PATH] [--threads 2] [--pairs 15] [--only NAME]

GRPO on the 1M model, 16 prompts x 8 answers of 64 tokens, float32. Steps with and without the entropy alternate in one
run, the first of a pair by turns; the ratio is the median over the pairs. The entropy comes from the update's own
forward pass (one mini-batch a step) or from the log-prob pass (two mini-batches). In the jobs called "32k" the model
has a vocabulary of 32,768 tokens, so that most of a step is the head, where the entropy is computed.
"""

import argparse
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from support.jobs import EQUAL, Stepper, grpo_overrides, prepare_1m, stepper
from support.record import save

from verl.algorithms.losses import make_actor_loss
from verl.data.batch import Batch

AIM = 1.02
WARM_UP = 2  # pairs
JOBS = {  # name: (vocabulary, mini-batches a step)
    "update, 128 tokens": (128, 1),
    "log-prob pass, 128 tokens": (128, 2),
    "update, 32k tokens": (32768, 1),
    "log-prob pass, 32k tokens": (32768, 2),
}


class EntropySwitch:
    """Turns the entropy of a run's steps on and off, wherever it is computed."""

    def __init__(self, job: Stepper):
        self.actor = actor = job.run.trainer.actor
        self.worker, self.pass_with = actor.group.local_worker, actor.logprobs_and_entropy
        config = job.run.config.actor_rollout_ref.actor
        self.losses = {True: self.worker.loss, False: make_actor_loss(config, observe_entropy=False)}

    def set(self, on: bool) -> None:
        self.worker.loss = self.losses[on]
        self.actor.logprobs_and_entropy = self.pass_with if on else self.pass_without

    def pass_without(self, batch: Batch, more: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
        assert not more, more  # GRPO reads no further output
        logprobs = self.actor.logprobs(batch)
        return {"logprobs": logprobs, "entropy": torch.zeros_like(logprobs)}


def measure(name: str, folder: Path, pairs: int) -> dict:
    """Median seconds of a step with and without the entropy, and the ratios of the pairs."""
    vocabulary, mini_batches = JOBS[name]
    prepare_1m(folder, vocabulary)
    words = grpo_overrides(folder, replace(EQUAL, name=folder.name))
    words.append(f"actor_rollout_ref.actor.ppo_mini_batch_size={EQUAL.prompts // mini_batches}")
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with stepper(words) as job:
        switch = EntropySwitch(job)
        for pair in range(WARM_UP + pairs):
            for on in (True, False) if pair % 2 else (False, True):
                switch.set(on)
                step = job.step()
                if pair >= WARM_UP:
                    seconds[on].append(step.seconds)
    ratios = [with_it / without for with_it, without in zip(seconds[True], seconds[False], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    medians = {"with_s": statistics.median(seconds[True]), "without_s": statistics.median(seconds[False])}
    return {"job": name, **medians, "ratio": statistics.median(ratios), "quartiles": [low, high], "pairs": pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of steps of each job, after two of warm-up")
    parser.add_argument("--only", default="", help="run the jobs whose name starts with this")
    args = parser.parse_args()
    if args.pairs < 2:
        parser.error(f"--pairs {args.pairs}: at least 2")
    torch.set_num_threads(args.threads)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["VERL_FILE_LOGGER_ROOT"] = temporary
        for number, name in enumerate(JOBS):
            if name.startswith(args.only):
                folder = Path(temporary) / f"job{number}"
                folder.mkdir()
                rows.append(row := measure(name, folder, args.pairs))
                low, high = row["quartiles"]
                print(
                    f"{name}: {row['with_s']:.3f} s a step with the entropy, {row['without_s']:.3f} s without: "
                    f"{row['ratio']:.3f}x (quartiles {low:.3f} to {high:.3f}, aim {AIM}x, {args.pairs} pairs)",
                    flush=True,
                )
    if args.json:
        save(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
