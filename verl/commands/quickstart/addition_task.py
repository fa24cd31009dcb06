"""Two-digit addition with worked answers, and its data files.

    prompt    37+48=
    answer    7+8=15,3+4+1=8;85

Units, tens with the carry, then the result. Only the result after `;` is scored.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

DATA_SOURCE = "quickstart/addition"
CHARACTERS = "0123456789+=,;"


@dataclass(frozen=True)
class Problem:
    """`a + b`, both from 10 to 99."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.a}+{self.b}="

    @property
    def result(self) -> str:
        return str(self.a + self.b)

    @property
    def worked(self) -> str:
        """The right answer with its working."""
        (tens_a, units_a), (tens_b, units_b) = divmod(self.a, 10), divmod(self.b, 10)
        units = units_a + units_b
        carry = units // 10
        tens = tens_a + tens_b + carry
        return f"{units_a}+{units_b}={units},{tens_a}+{tens_b}+{carry}={tens};{self.result}"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> dict:
    """Half a point for the exact result after the last `;`, half for the share of its digits that are right.

    Digits are compared from the units up. `acc` is 1 for the exact result only, and is what validation reports.
    """
    _, mark, result = solution_str.rpartition(";")
    exact = float(bool(mark) and result == ground_truth)
    right = sum(a == b for a, b in zip(reversed(result), reversed(ground_truth), strict=False)) if mark else 0
    return {
        "score": 0.5 * exact + 0.5 * right / max(len(result), len(ground_truth)),
        "acc": exact,
        "pred": result if mark else "",
    }


@dataclass(frozen=True)
class Split:
    """Problems to train on, problems never trained on, and the few that come with worked answers."""

    train: list[Problem]
    held_out: list[Problem]
    worked: list[Problem]


def make_split(seed: int, num_held_out: int, num_worked: int) -> Split:
    """A shuffle of all 8,100 problems, cut in two; the worked examples are training problems."""
    problems = [Problem(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(problems)
    train = problems[num_held_out:]
    return Split(train, problems[:num_held_out], train[:num_worked])


def write_split(split: Split, folder: Path) -> None:
    """train.jsonl and test.jsonl for reinforcement learning, worked.jsonl for supervised fine-tuning."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.jsonl", [rl_row(p, "train", i) for i, p in enumerate(split.train)])
    write_rows(folder / "test.jsonl", [rl_row(p, "test", i) for i, p in enumerate(split.held_out)])
    rows = [{"messages": [*chat(p), {"role": "assistant", "content": p.worked}]} for p in split.worked]
    write_rows(folder / "worked.jsonl", rows)


def chat(problem: Problem) -> list[dict[str, str]]:
    return [{"role": "user", "content": problem.prompt}]


def rl_row(problem: Problem, split: str, index: int) -> dict:
    """One data row in the format of this library."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": chat(problem),
        "ability": "arithmetic",
        "reward_model": {"style": "rule", "ground_truth": problem.result},
        "extra_info": {"split": split, "index": index},
    }


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
