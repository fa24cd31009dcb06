"""Gold answers that the reward of the run does not accept. docs/rewards/check_data.md has the rules."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from verl.commands.check_data.checks import Examples, found, short, truth
from verl.commands.check_data.rows import Count, Row, Split
from verl.commands.score_answers import is_right
from verl.config import RewardConfig
from verl.observe.check_report import SKIPPED, WARNING, WRONG, CheckResult
from verl.rewards.base import NoScorerError, Reward, RewardInput, Score
from verl.rewards.gold_answers import FORMS, gold_texts
from verl.rewards.reward_setup import function_reward
from verl.rewards.scorer_lookup import find_scorer

CHUNK = 256  # rows scored between two lines of progress


@dataclass
class Verdict:
    """The score of a row's gold answer, or why it has none."""

    row: Row
    tried: str = ""  # the last text
    form: str | None = None  # of FORMS, accepted
    solution: bool | None = None  # whether the worked answer was accepted; None without one
    error: str | None = None
    abstained: bool = False

    def read(self, text: str, form: str | None, score: Score) -> None:
        """Note the score of `text`, which is the gold answer in `form`, or the worked answer where that is None."""
        self.tried, self.error, self.abstained = text, score.error, score.abstained
        right = score.value is not None and is_right(score)
        if form is None:
            self.solution = right
        else:
            self.form = form if right else None


def check_gold(split: Split, config: RewardConfig, count: Count) -> list[CheckResult]:
    """Unknown data sources, and gold answers that the reward rejects."""
    check = f"{split.name}: gold answers"
    if config.reward_model.enable:
        return [CheckResult(check, SKIPPED, "a reward model scores the answers")]
    custom, unknown = bool(config.custom_reward_function.path), dict[str, str]()
    for source in () if custom else dict.fromkeys(row.data_source for row in split.rows):
        try:
            find_scorer(source, config.scorer)
        except NoScorerError as error:
            unknown[source] = str(error)
    strangers = [(row.where, unknown[row.data_source]) for row in split.rows if row.data_source in unknown]
    text = f"rows have a data source without a scorer: {', '.join(sorted(unknown))}"
    level = WRONG if config.on_error == "stop" else WARNING
    results = [] if custom else [found(f"{split.name}: data sources", strangers, len(split.rows), text, level)]
    rows = [row for row in split.rows if row.data_source not in unknown]
    scored = [row for row in rows if row.solution or gold_texts(row.ground_truth)]
    if not scored:
        return [*results, CheckResult(check, SKIPPED, "no row has a gold answer that can be written as text")]
    config = replace(config, on_error="count")
    reward = function_reward(config)
    log = logging.getLogger("verl.rewards.function_reward")
    before, log.level = log.level, logging.ERROR  # failures are counted below
    try:
        verdicts = score_gold(scored, reward, count)
    finally:
        log.level = before
    return [*results, *_results(check, verdicts, len(rows) - len(scored), custom)]


def score_gold(rows: Sequence[Row], reward: Reward, count: Count) -> list[Verdict]:
    """Score the worked answer of each row, and its gold answer in each of FORMS until one is accepted."""
    verdicts = [Verdict(row) for row in rows]

    def score(some: Sequence[Verdict], texts: Sequence[str], form: str | None = None) -> None:
        rows = [verdict.row for verdict in some]
        inputs = [
            RewardInput(row.data_source, text, row.ground_truth, row.extra_info, where=row.where)
            for row, text in zip(rows, texts, strict=True)
        ]
        for verdict, text, its_score in zip(some, texts, asyncio.run(reward.score(inputs)), strict=True):
            verdict.read(text, form, its_score)

    for start in range(0, len(verdicts), CHUNK):
        part = verdicts[start : start + CHUNK]
        solved = [verdict for verdict in part if verdict.row.solution]
        score(solved, [str(verdict.row.solution) for verdict in solved])
        for form in FORMS:
            left = [v for v in part if not v.solution and v.form is None and gold_texts(v.row.ground_truth)]
            score(left, [form.format(gold_texts(verdict.row.ground_truth)[0]) for verdict in left], form)
        count(f"{start + len(part):,} of {len(verdicts):,} gold answers")
    return verdicts


def _results(check: str, verdicts: list[Verdict], without_text: int, custom: bool) -> list[CheckResult]:
    failed, rejected, unlike = Examples(), Examples(), Examples()
    forms = dict.fromkeys(("the worked answer", *FORMS), 0)
    for v in verdicts:
        if v.solution or v.form:
            forms["the worked answer" if v.solution else str(v.form)] += 1
            if v.solution is False:
                unlike.append(
                    (v.row.where, f"ground truth {truth(v.row)}, solution …{short(str(v.row.solution)[-100:])}")
                )
        elif v.error:
            failed.append((v.row.where, v.error))
        elif not v.abstained:
            rejected.append((v.row.where, f"ground truth {truth(v.row)}; last tried {short(v.tried)!r}"))
    total = len(verdicts)
    accepted = "; ".join(f"{number:,} as {form.format('…')}" for form, number in forms.items() if number)
    note = f"accepted: {accepted or 'none'}" + f"; {without_text:,} rows have no text form" * bool(without_text)
    level = WARNING if custom else WRONG  # a function of the user may read another form
    results = [found(check, rejected, total, "are rejected in every form", level, note)]
    results.append(found(f"{check}, failures", failed, total, "make the reward fail", WRONG))
    text = "worked answers are rejected, but the ground truth alone is accepted"
    return [*results, found(f"{check}, worked", unlike, total, text, WARNING)]
