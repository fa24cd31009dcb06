"""Answers to the rows of a run whose scores are known beforehand: gold ones high, all others low."""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.commands.check_data.checks import truth
from verl.commands.check_data.rows import Row
from verl.rewards.base import RewardInput, Score
from verl.rewards.gold_answers import FORMS, gold_texts

GOLD, EMPTY, GARBAGE, CUT, OTHER = "gold", "empty", "garbage", "halved", "another prompt's"
TRIED = 8  # rows of a data source whose gold answers are scored in every form
Call = tuple[Score, float]  # and how many seconds it took
ScoreAll = Callable[[Sequence[RewardInput]], Awaitable[list[Call]]]


@dataclass(frozen=True)
class Answer:
    """One answer of a kind, with what the reward gets."""

    kind: str
    row: Row
    given: RewardInput


class Answers:
    """Makes the answers; `gold_key` is the path of the gold answer in a row, or None to look for it."""

    def __init__(self, rows: Sequence[Row], seed: int, tokenizer: PreTrainedTokenizerBase | None, gold_key: str | None):
        self.rows, self.tokenizer, self.gold_key = rows, tokenizer, gold_key
        self.random, self.forms = random.Random(seed), dict[str, str]()  # by data source

    def answer(self, kind: str, row: Row, text: str) -> Answer:
        length = len(text) // 4 if self.tokenizer is None else len(self.tokenizer(text)["input_ids"])
        given = RewardInput(
            row.data_source, text, row.ground_truth, row.extra_info, row.text, response_length=length, where=row.where
        )
        return Answer(kind, row, given)

    def golds_of(self, row: Row) -> dict[str, str]:
        """The gold answer of a row by its form: that of `gold_key`, or the worked answer and each of FORMS."""
        if self.gold_key:
            value: Any = {"extra_info": row.extra_info, "reward_model": {"ground_truth": row.ground_truth}}
            for part in self.gold_key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            return {self.gold_key: str(value)} if value not in (None, "") else {}
        worked = {"the worked answer": row.solution} if row.solution else {}
        return worked | {form: form.format(text) for text in gold_texts(row.ground_truth)[:1] for form in FORMS}

    async def choose_forms(self, score: ScoreAll) -> None:
        """Take for each data source the form whose answers score highest on some rows.

        Where none scores above empty answers, it is the one that scores lowest: the sign may be wrong.
        """
        for source in dict.fromkeys(row.data_source for row in self.rows):
            rows = [row for row in self.rows if row.data_source == source and self.golds_of(row)][:TRIED]
            texts = [(form, row, text) for row in rows for form, text in (self.golds_of(row) | {EMPTY: ""}).items()]
            tried = [self.answer(*parts) for parts in texts]
            totals: dict[str, float] = {}
            for answer, (found, _) in zip(tried, await score([a.given for a in tried]), strict=False):
                totals[answer.kind] = totals.get(answer.kind, 0.0) + (found.value or 0.0)
            empty = totals.pop(EMPTY, 0.0)
            best = max(totals, key=lambda form: totals[form], default="")
            if best and totals[best] <= empty:
                best = min(totals, key=lambda form: totals[form])
            self.forms[source] = best

    def all(self) -> list[Answer]:
        """The answers of every row, one of each kind that it has; garbage is as long as the gold answer."""
        golds = [self.golds_of(row).get(self.forms.get(row.data_source, "")) for row in self.rows]
        out = []
        for index, (row, gold) in enumerate(zip(self.rows, golds, strict=True)):
            letters = self.random.choices("abcdefghijklmnopqrstuvwxyz ", k=max(12, len(gold or "")))
            texts = {EMPTY: "", GARBAGE: "".join(letters)}
            if gold is not None:
                around = [(index + step) % len(self.rows) for step in range(1, len(self.rows))]
                texts |= {GOLD: gold, CUT: gold[: len(gold) // 2]}
                if other := next((o for i in around if (o := golds[i]) and is_other(self.rows[i], row)), None):
                    texts[OTHER] = other
            out += [self.answer(kind, row, text) for kind, text in texts.items()]
        return out


def is_other(one: Row, other: Row) -> bool:
    """Whether the gold answer of `one` is wrong for `other`, and reads like a right one."""
    return one.data_source == other.data_source and truth(one) != truth(other)
