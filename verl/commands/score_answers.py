"""`python3 -m verl.trainer.main_eval data.path=answers.parquet`: score a file of answers.

Prints one table (accuracy, pass@k, maj@k, each with a 95 % interval over the prompts) and, last, one line of JSON:
{"test_score/<data_source>": mean score}.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Column, Table

from verl.config import RewardConfig, load_config
from verl.config.evaluation import EvalConfig
from verl.data.chat import read_messages
from verl.data.data_files import FileRows
from verl.observe.progress import Progress
from verl.rewards.base import NoScorerError, RewardInput, Score
from verl.rewards.scorer_lookup import find_scorer
from verl.utils.command_line import run_command
from verl.utils.errors import ConfigError, DataError, Mistakes
from verl.utils.external_code import check_user_object
from verl.utils.process_end import end_process

HELP = f"""{__doc__}
usage: python3 -m verl.trainer.main_eval data.path=FILE [custom_reward_function.path=FILE] key=value ...

  data.path                    parquet or JSON lines; a column `responses` holds one answer or a list of answers
  data.response_key, data.data_source_key, data.reward_model_key, data.prompt_key    other names of columns
  data.answer_key              column with the ground truth, in place of reward_model.ground_truth
  reward.scorer                math, gsm8k, exact or another built-in scorer, in place of that of each data source
  custom_reward_function.path, custom_reward_function.name    a compute_score of your own
"""
RIGHT_ABOVE = 0.5  # without `acc`, a score above this counts as right


def main(argv: Sequence[str] | None = None) -> int:
    """0: scored; 2: a mistake the message explains."""
    return run_command(argv, HELP, lambda words: print_scores(load_config(words, config_name="evaluation")))


def print_scores(config: EvalConfig) -> dict[str, float]:
    """Score the file and print the table; returns every metric by name."""
    reward, custom = config.reward, config.custom_reward_function
    if custom.path:
        function = replace(reward.custom_reward_function, path=custom.path, name=custom.name)
        reward = replace(reward, custom_reward_function=function)
    answers = read_scorable_answers(config, reward)
    scores = score_all(answers.inputs, reward)
    figures: dict[str, float] = {}
    table = Table(Column("data source", overflow="fold"))  # a terminal breaks long names; nothing is cut
    for header in ("prompts", "answers", "figure", "value", "95 % interval"):
        table.add_column(header, no_wrap=True)
    for source in dict.fromkeys(answers.sources):
        by_prompt: dict[int, list[Score]] = {}
        for score, prompt_index in zip(scores, answers.prompt_indices, strict=True):
            if answers.sources[prompt_index] == source:
                by_prompt.setdefault(prompt_index, []).append(score)
        groups = list(by_prompt.values())
        for name, value, low, high in metrics(groups):
            figures[f"{name}/{source}"] = value
            bounds = "" if math.isnan(low) else f"{low:.3f} to {high:.3f}"
            table.add_row(source, str(len(groups)), str(sum(map(len, groups))), name, f"{value:.4f}", bounds)
        figures[f"test_score/{source}"] = figures[f"mean score/{source}"]
    console = Console()
    if not console.is_terminal:
        console.width = console.measure(table, options=console.options.update(max_width=1 << 20)).maximum
    console.print(table)
    unscored = sum(score.value is None for score in scores)
    if unscored:
        console.print(f"{unscored} answers were not scored; they are left out")
    means = {name: value for name, value in figures.items() if name.startswith("test_score/")}
    print(json.dumps({name: None if math.isnan(value) else value for name, value in means.items()}))
    return figures


class Answers(NamedTuple):
    """The answers of a file: one input each, the row of each, and the data source of each row."""

    inputs: list[RewardInput]
    prompt_indices: list[int]
    sources: list[str]


def read_scorable_answers(config: EvalConfig, reward: RewardConfig) -> Answers:
    """`read_answers`; one error with all that keeps them from being scored, before heavy libraries are loaded."""
    mistakes, answers = Mistakes(), None
    function = reward.custom_reward_function.path
    with mistakes:
        if reward.reward_model.enable:
            raise ConfigError(
                "reward.reward_model.enable=True scores the answers of a run; here a function or a built-in scorer does"
            )
    with mistakes:
        check_user_object(function, reward.custom_reward_function.name, "custom_reward_function")
    with mistakes:
        if not config.data.path:
            raise ConfigError("data.path is not set; give the file of answers: data.path=answers.parquet")
        answers = read_answers(config)
    if answers is not None and function is None and reward.on_error == "stop":
        for source in dict.fromkeys(answers.sources):
            try:
                find_scorer(source, reward.scorer)
            except (NoScorerError, ConfigError) as error:
                mistakes.add(DataError(f"{config.data.path}: {error}"))
    mistakes.raise_if_any("things keep these answers from being scored")
    assert answers is not None  # without a mistake
    return answers


def score_all(inputs: list[RewardInput], reward: RewardConfig) -> list[Score]:
    """The scores, while a line on stderr says what is done."""
    with Progress() as progress:
        progress.stage("loading libraries")
        from verl.rewards.reward_setup import function_reward  # torch
        from verl.rewards.scoring_pool import end_scoring_processes

        scorer = function_reward(reward)
        progress.stage("scoring")
        progress.count(f"{len(inputs):,} answers")
        try:
            return asyncio.run(scorer.score(inputs))
        finally:
            end_scoring_processes()  # before an error is said, so that nothing of theirs comes after it


def read_answers(config: EvalConfig) -> Answers:
    """The answers of data.path; DataError names the first row that is not in the format."""
    data = config.data
    rows, truth_key = FileRows(data.path or ""), data.answer_key or data.reward_model_key
    inputs, prompt_indices, sources = [], [], []
    for index in range(len(rows)):
        row, where = rows[index], rows.location(index)
        source = row.get(data.data_source_key) or data.data_source or rows.source(index, data.data_source_key)
        fixes = {data.response_key: "data.response_key=COLUMN", truth_key: "data.answer_key=COLUMN"}
        fixes |= {} if source else {data.data_source_key: "data.data_source=NAME"}
        if lacking := [f"no column {name!r}: set {fix}" for name, fix in fixes.items() if row.get(name) is None]:
            raise DataError(f"{where} has {'; '.join(lacking)}; found: {', '.join(sorted(row))}")
        responses, reward_model, extra = row[data.response_key], row[truth_key], row.get("extra_info") or {}
        answers = [responses] if isinstance(responses, str) else responses
        if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
            raise DataError(f"{where}: {data.response_key} must be a text or a list of texts, found {responses!r:.80}")
        reward_model = {"ground_truth": reward_model} if data.answer_key else reward_model
        has_truth = isinstance(reward_model, dict) and ("ground_truth" in reward_model or "style" in reward_model)
        if not has_truth or not isinstance(extra, dict):
            raise DataError(f"{where}: {truth_key} must hold ground_truth, and extra_info be an object")
        sources.append(str(source))
        try:
            messages = read_messages(row[data.prompt_key]) if row.get(data.prompt_key) is not None else []
        except ValueError as error:
            raise DataError(f"{where}: {data.prompt_key}: {error}") from error
        for answer in answers:
            inputs.append(
                RewardInput(
                    data_source=sources[-1],
                    solution_str=answer,
                    ground_truth=reward_model.get("ground_truth"),
                    extra_info=extra,
                    prompt_str=str(messages[-1].get("content", "")) if messages else "",
                    where=where,
                )
            )
            prompt_indices.append(index)
    return Answers(inputs, prompt_indices, sources)


class Figure(NamedTuple):
    """A mean over prompts, and the bounds of its 95 % interval."""

    name: str
    value: float
    low: float
    high: float


def metrics(groups: list[list[Score]]) -> list[Figure]:
    """The figures of one data source, from the answers of each prompt; those without a score are left out."""
    groups = [scored for group in groups if (scored := [score for score in group if score.value is not None])]
    right = [[is_right(score) for score in group] for group in groups]
    out = [interval("mean score", [mean([s.value for s in group]) for group in groups])]
    out.append(proportion("accuracy", [mean(group) for group in right]))
    answers = min(map(len, right), default=0)
    for k in (2**i for i in range(1, answers.bit_length()) if 2**i <= answers):
        out.append(proportion(f"pass@{k}", [pass_at(k, len(group), sum(group)) for group in right]))
    votes = [majority(group[:answers]) for group in groups]
    if answers > 1 and all(vote is not None for vote in votes):
        out.append(proportion(f"maj@{answers}", [float(bool(vote)) for vote in votes]))
    return out


def is_right(score: Score) -> bool:
    """Whether an answer is right: its `acc` if the scorer returns one, else its score above RIGHT_ABOVE."""
    return bool(score.extra["acc"]) if "acc" in score.extra else (score.value or 0.0) > RIGHT_ABOVE


def pass_at(k: int, n: int, right: int) -> float:
    """Chance that at least one of k answers drawn without replacement from n, `right` of them right, is right.

    The unbiased estimator of Chen et al. (2021, arXiv:2107.03374).
    """
    return 1.0 if n - right < k else 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(group: list[Score]) -> bool | None:
    """Whether the answer most often given is right; ties go to the earliest; None without `pred`."""
    votes = [(str(score.extra["pred"]), is_right(score)) for score in group if "pred" in score.extra]
    if not votes:
        return None
    winner, _ = Counter(pred for pred, _ in votes).most_common(1)[0]
    return next(right for pred, right in votes if pred == winner)


def interval(name: str, values: list[float]) -> Figure:
    """The mean and its normal 95 % interval; nan with fewer than two prompts."""
    center = mean(values)
    half = 1.96 * math.sqrt(variance(values) / len(values)) if len(values) > 1 else math.nan
    return Figure(name, center, center - half, center + half)


def proportion(name: str, values: list[float]) -> Figure:
    """The mean of values in [0, 1] and Wilson's 95 % interval, which has a width above 0 and stays in [0, 1].

    Uses the number of binary outcomes that would give the mean the same variance (Korn and Graubard, 1998).
    """
    center, n = mean(values), len(values)
    if n < 2:
        return Figure(name, center, math.nan, math.nan)
    spread = variance(values)
    z2_over_n = 1.96**2 / (n * max(center * (1 - center) / spread, 1.0) if spread else n)
    middle = (center + z2_over_n / 2) / (1 + z2_over_n)
    half = math.sqrt(z2_over_n * center * (1 - center) + z2_over_n**2 / 4) / (1 + z2_over_n)
    return Figure(name, center, middle - half, middle + half)


def variance(values: list[float]) -> float:
    center = mean(values)
    return sum((value - center) ** 2 for value in values) / (len(values) - 1)


def mean(values: Sequence[Any]) -> float:
    """The mean; nan without values."""
    return sum(values) / len(values) if values else math.nan


if __name__ == "__main__":
    end_process(main)
