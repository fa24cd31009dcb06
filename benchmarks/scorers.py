"""Milliseconds that each built-in scorer takes per answer, beside its bar.

    python benchmarks/scorers.py [--json PATH] [--calls 20000] [--only NAME ...]

Solutions have 4,000 characters and end in an answer as models write it; half of the answers are right. Graders of
strings and numbers have a bar of 5 ms at the 99.9th percentile. "symbolic" is the comparison of the pairs in
tests/data/scorers that need one, each for the first time after a child has started: its bar is a median of 20 ms.
"killed" are comparisons that never end, with the limit of 2 s of processor time.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.record import save

from verl.rewards.scorer_lookup import SOURCES, find_scorer
from verl.rewards.scorers import math_equality
from verl.rewards.scorers.equivalence_pool import EquivalencePool

PERCENTILE_BAR_MS, MEDIAN_BAR_MS = 5.0, 20.0
PAIRS = Path(__file__).parents[1] / "tests" / "data" / "scorers" / "math_pairs.jsonl"
THOUGHT = "First we note that 3 + 4 = 7, so that $x = \\frac{14}{2}$; then 7 * 6 = 42. "
ENDINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "gsm8k": ("#### {}", str),
    "math_reward": ("so it is \\boxed{{{}}}.", str),
    "math_dapo": ("Answer: {}", str),
    "prime_math": ("The answer is {}.", str),
    "geo3k": ("</think> \\boxed{{{}}}", str),
    "search_r1_like_qa_em": ("<answer>the {}!</answer>", lambda text: {"target": ["one", text]}),
}
HANGS = ("9^{9^{9^{9}}}", "(x+y+z)^{3000}", "1000000!")


def milliseconds(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[float]:
    """Of each call, on the clock."""
    taken = []
    for one in arguments:
        start = time.perf_counter()
        function(*one)
        taken.append(1000 * (time.perf_counter() - start))
    return sorted(taken)


def solutions(name: str, count: int) -> list[tuple[str, Any]]:
    """`count` pairs (solution, ground truth)."""
    ending, as_truth = ENDINGS[name]
    generator, thought = random.Random(0), ("<think>" + THOUGHT * 60)[:4000] + "\n"
    out = []
    for _ in range(count):
        truth = generator.randrange(1_000_000)  # hardly one twice: normal forms are cached
        answer = truth + generator.randrange(2)
        written = generator.choice((f"{answer}", f"{answer:,}", f"{answer}.0"))
        written = generator.choice((f"{answer}", f"{answer:,}", f"{answer}.0"))
        out.append((thought + ending.format(written), as_truth(str(truth))))
    return out


def symbolic_pairs() -> list[tuple[str, str]]:
    """What the pool is asked for the hand-judged pairs, as the grammar gets it."""
    asked: list[tuple[str, str]] = []

    class Recorder:
        def compare(self, gold: str, answer: str) -> bool:
            asked.append((gold, answer))
            return False

    real, math_equality.shared_pool = math_equality.shared_pool, Recorder  # type: ignore[assignment]
    try:
        for pair in map(json.loads, PAIRS.read_text(encoding="utf-8").splitlines()):
            math_equality.is_equal(pair["gold"], pair["answer"])
    finally:
        math_equality.shared_pool = real
    return list(dict.fromkeys(asked))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--calls", type=int, default=20_000, help="of each scorer (20000)")
    parser.add_argument("--only", nargs="+", default=[*ENDINGS, "symbolic", "killed"], help="names (all)")
    options = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    for name in [name for name in options.only if name in ENDINGS]:
        taken = milliseconds(find_scorer(SOURCES[name][0]), solutions(name, options.calls))
        high = taken[int(0.999 * len(taken))]
        figures[name] = {"calls": len(taken), "median_ms": statistics.median(taken), "p99.9_ms": high}
        figures[name] |= {"bar_ms": PERCENTILE_BAR_MS, "ok": high <= PERCENTILE_BAR_MS}
        print(f"{name:22} median {statistics.median(taken):7.3f} ms   99.9 % {high:7.3f} ms   bar 5 ms", flush=True)
    pool = EquivalencePool(size=1)
    if "symbolic" in options.only:
        start = time.perf_counter()
        pool.compare("x", "y")
        started_s, pairs = time.perf_counter() - start, symbolic_pairs()
        taken = milliseconds(pool.compare, pairs)
        median = statistics.median(taken)
        figures["symbolic"] = {"pairs": len(pairs), "child_starts_s": started_s, "median_ms": median}
        figures["symbolic"] |= {"p90_ms": taken[int(0.9 * len(taken))], "max_ms": taken[-1], "killed": pool.timeouts}
        figures["symbolic"] |= {"bar_ms": MEDIAN_BAR_MS, "ok": median <= MEDIAN_BAR_MS}
        print(
            f"symbolic ({len(pairs)} pairs)   median {median:7.1f} ms   90 % {figures['symbolic']['p90_ms']:7.1f} ms   "
            f"longest {taken[-1]:.0f} ms   bar: median 20 ms; a child starts in {started_s:.1f} s",
            flush=True,
        )
    if "killed" in options.only:
        before, seconds = pool.timeouts, []
        for formula in HANGS:
            pool.compare("2x", "x+x")  # the child that replaces the last one has started
            seconds += [one / 1000 for one in milliseconds(pool.compare, [(formula, "3")])]
        figures["killed"] = {"limit_s": 2.0, "seconds": seconds, "counted": pool.timeouts - before}
        print(f"killed after {', '.join(f'{one:.2f}' for one in seconds)} s, counted: {pool.timeouts - before}")
    pool.close()
    if options.json:
        save(options.json, {"scorers": figures})


if __name__ == "__main__":
    main()
