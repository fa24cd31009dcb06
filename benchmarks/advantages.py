"""Processor seconds that each advantage estimator takes on a large batch, on one thread, beside its bar.

    python benchmarks/advantages.py [--json PATH] [--sequences 100000] [--tokens 100] [--rounds 5] [--only NAME ...]

100,000 answers of 100 tokens, 8 to a prompt, the last 70 of them sampled: 10 million tokens, float32. Estimators with
one advantage per sequence have a bar of 1 s, those that work token by token one of 3 s. Figures are medians.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from support.record import save

from verl.algorithms import token_advantages
from verl.algorithms.advantages import ADVANTAGES, compute_advantages
from verl.config import AlgorithmConfig
from verl.data.batch import Batch, cumulative_lengths

GROUP_BAR_S, TOKEN_BAR_S = 1.0, 3.0


def random_batch(num_sequences: int, length: int) -> Batch:
    """`num_sequences` answers of `length` tokens with every column that an estimator reads."""
    generator, num_tokens = torch.Generator().manual_seed(0), num_sequences * length
    position, is_last = torch.arange(num_tokens) % length, torch.arange(num_tokens) % length == length - 1
    scores = torch.rand(num_sequences, generator=generator)
    values, probs, squares = (torch.rand(num_tokens, generator=generator) for _ in range(3))
    columns = {
        "tokens": torch.zeros(num_tokens, dtype=torch.long),
        "loss_mask": position >= 3 * length // 10,
        "token_rewards": torch.where(is_last, scores.repeat_interleave(length), 0.0),
        "values": values,
        "old_logprobs": probs.log(),
        "sum_pi_squared": squares,
    }
    of_sequences = {
        "rewards": scores,
        "group_ids": torch.arange(num_sequences) // 8,
        "reward_baselines": torch.rand(num_sequences, generator=generator),
        "reward_parts.score": scores,
    }
    return Batch(cumulative_lengths(torch.full((num_sequences,), length)), columns, of_sequences)


def median_seconds(name: str, batch: Batch, rounds: int) -> float:
    """Processor seconds of `rounds` calls, after one that is not counted."""
    config = AlgorithmConfig(adv_estimator=name, gdpo_reward_keys=["score"] if name == "gdpo" else None)
    seconds = []
    for _ in range(rounds + 1):
        start = time.process_time()
        compute_advantages(batch, config)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=100, help="of each answer (100)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=ADVANTAGES.names(), help="names of estimators (all)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    batch, figures = random_batch(options.sequences, options.tokens), {}
    for name in options.only:
        per_token = ADVANTAGES.get(name).function.__module__ == token_advantages.__name__
        bar, seconds = TOKEN_BAR_S if per_token else GROUP_BAR_S, median_seconds(name, batch, options.rounds)
        figures[name] = {"seconds": seconds, "bar": bar}
        print(f"{name:30} {seconds:6.2f} s   bar {bar:.0f} s   {'ok' if seconds < bar else 'ABOVE'}", flush=True)
    if options.json:
        save(options.json, {"sequences": options.sequences, "tokens": batch.num_tokens, "estimators": figures})


if __name__ == "__main__":
    main()
