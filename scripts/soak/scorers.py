"""Fuzzed answers to every scorer: none raises, every score is finite, and the same answer gets the same score again.

    make soak PART=scorers                       # 100,000 answers to each scorer
    python -m scripts.soak.scorers --answers 1000 --folder /tmp/soak --only gsm8k

Goes on where the last run of this commit stopped.
"""

# ruff: noqa: RUF001 (characters that look like others)
import argparse
import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts.soak.progress import RESULTS, Progress
from verl.rewards.scorer_lookup import SOURCES, Scorer, find_scorer
from verl.rewards.scorers.equivalence_pool import shared_pool

CHUNK, THREADS = 1000, 4
NAMES = tuple(name for name in SOURCES if name != "code")  # programs have a soak of their own
NUMBERS = ("0", "7", "-3", "1,319", "0.5", "12345678901234567890", "1e5", "\u0661", "９", "½", "∞", "nan", "inf", "1/0")
MATHS = (
    r"\frac{", r"\frac12", r"\sqrt", r"\sqrt[3]{8}", r"\pi", r"\pm", r"\left(", r"\right)", r"\{", r"\}",
    r"\overline{3}", r"\text{ cm}", r"\text{and}", r"\cup", r"\infty", r"\begin{pmatrix}", r"\\", r"\end{pmatrix}",
    r"\log_2 8", r"\in", r"\sin", r"^\circ", r"\%", "x", "y", "i", "=", "<", "+", "-", "*", "/", "^", "_", "!", "(",
    ")", "[", "]", "{", "}", ",", ";", ":", "|", "&", "~", "'", '"', "`", "x^2", "2x", "e", "no solution", "A", "(B)",
    "__import__('os')", "10^9",
)  # fmt: skip
MARKS = (
    "#### ", "####", r"\boxed{", r"\boxed", r"\fbox{", "Answer: ", "**Answer:**", "The answer is ", "<answer>",
    "</answer>", "<think>", "</think>", "$", "$$", r"\(", r"\]", "\n", " ", ".", "```python\n", "\x00", "\u202e",
    "\ud800", "𝟙", "\t",
)  # fmt: skip
HANGS = "9^{9^{9^{9}}}"
GROUND_TRUTHS = {
    "gsm8k": ("7", "1,319", "-3", "0.5"),
    "search_r1_like_qa_em": ({"target": ["7", "the Half"]}, {"target": "x"}),
}
MATH_TRUTHS = ("7", r"\frac{1}{2}", "(1,2)", "x^2-1", r"\{1,2\}", r"(-\infty,3]", r"\text{no solution}", "x=5", "5!")
SCORES = {"math_dapo": {-1.0, 1.0}, "geo3k": {0.0, 0.1, 0.9, 1.0}}


def fuzzed(name: str, count: int, seed: int) -> Iterator[tuple[str, Any]]:
    """`count` pairs (answer, ground truth) for the scorer `name`; the same for the same seed."""
    generator = random.Random(f"{name} {seed}")
    for _ in range(count):
        truth = generator.choice(GROUND_TRUTHS.get(name, MATH_TRUTHS))
        size = generator.choice((1, 3, 8, 20))
        pieces = [generator.choice(generator.choice((NUMBERS, MATHS, MARKS))) for _ in range(size)]
        if generator.random() < 0.5:  # in the frame of an answer
            gold = truth["target"][0] if isinstance(truth, dict) else truth
            mixed = generator.sample([*pieces[:4], gold], k=min(size, 4) + 1)
            body = gold if generator.random() < 0.3 else "".join(mixed)
            pieces = [generator.choice(_frames(body))]
        if generator.random() < 0.0005:
            pieces = list(_frames(HANGS))
        if generator.random() < 0.02:
            pieces *= 300
        yield "".join(pieces), truth


def _frames(body: str) -> tuple[str, ...]:
    return (
        f"#### {body}",
        rf"so \boxed{{{body}}}",
        f"Answer: {body}",
        f"<answer>{body}</answer>",
        f"the answer is {body}.",
        rf"<think>hm</think> \boxed{{{body}}}",
    )


def check(name: str, scorer: Scorer, pairs: list[tuple[str, Any]]) -> dict[str, int]:
    """AssertionError names the first answer that breaks a law; else how many were right and undecided."""
    first = [scorer(*pair) for pair in pairs]
    with ThreadPoolExecutor(THREADS) as threads:
        again = list(threads.map(lambda pair: scorer(*pair), pairs))
    for pair, one, other in zip(pairs, first, again, strict=True):
        assert one == other, f"{name} scores {pair!r} as {one}, and from a thread as {other}"
        assert math.isfinite(one["score"]) and round(one["score"], 9) in SCORES.get(name, {0.0, 1.0}), (pair, one)
        assert one["acc"] in (0.0, 1.0) and isinstance(one["pred"], str) and one.keys() == first[0].keys(), (pair, one)
    return {
        "right": sum(int(one["acc"]) for one in first),
        "undecided": sum(int(one.get("undecided", 0)) for one in first),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=100_000, help="to each scorer")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the record")
    parser.add_argument("--only", nargs="+", default=NAMES, help="names of scorers (all)")
    options = parser.parse_args()
    progress = Progress("scorers", options.folder)
    for name in options.only:
        scorer = find_scorer(SOURCES[name][0])
        while (done := progress.done(name)) < options.answers:
            count = min(CHUNK, options.answers - done)
            found = check(name, scorer, list(fuzzed(name, count, seed=done)))
            before = progress.cases.get(name, {})
            progress.record(name, count, **{key: before.get(key, 0) + value for key, value in found.items()})
            print(f"{name}: {progress.done(name)} answers, {progress.cases[name]}", flush=True)
    print(f"comparisons killed in this run: {shared_pool().timeouts}")


if __name__ == "__main__":
    main()
