"""`verl check-reward`: scores answers whose scores are known beforehand, in several ways; writes a table and a page."""

import asyncio
import contextlib
import logging
import random
import secrets
from argparse import Namespace
from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from verl.commands.check_data.checks import check_readable, worst
from verl.commands.check_data.rows import read_split
from verl.commands.check_reward import findings, passes
from verl.commands.check_reward.answers import Answer, Answers, Call
from verl.commands.parsers import reward_options
from verl.commands.plan.command import load_run_config
from verl.config import RunConfig
from verl.observe.check_report import SKIPPED, WARNING, WRONG, CheckResult, print_results, write_checks_page
from verl.observe.progress import Progress
from verl.rewards.base import Reward, Score
from verl.rewards.canary import is_storable, may_cost_money
from verl.utils.errors import ConfigError, DataError, RewardError
from verl.utils.paths import expand_home

ROWS = (64, 8)  # by default; where a call may cost money
AGAIN_S = 30.0  # that each pass over answers that were scored before may take
CHILD_START_S = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """0: nothing that cannot be right; 1: something is; 2: a mistake the message explains."""
    options, words = reward_options(argv)
    config = load_run_config(words)
    if config.reward.reward_model.enable:
        raise ConfigError(
            "reward.reward_model.enable=True: this command starts no reward model; leave it out to check the reward "
            "function alone"
        )
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    with Progress(interval_s=2.0) as progress:
        facts, results = asyncio.run(CheckOfReward(config, words, options, seed, progress).run())
    print_results(results, options.examples)
    for level in (WRONG, WARNING):
        facts[level] = str(sum(result.level == level for result in results))
    page = expand_home(options.html, "--html")
    write_checks_page(page, "Check of the reward", facts, results)
    code = worst(results)
    verdict = "something cannot be right" if code else "nothing that cannot be right was found"
    print(f"{'; '.join(f'{name}: {fact}' for name, fact in facts.items())}\n{verdict}; {page} has more examples")
    return code


class CheckOfReward:
    """One check: its rows, its reward, and the passes over the answers."""

    def __init__(self, config: RunConfig, words: Sequence[str], options: Namespace, seed: int, progress: Progress):
        self.config, self.words, self.options, self.seed, self.progress = config, words, options, seed, progress

    async def run(self) -> tuple[dict[str, str], list[CheckResult]]:
        """Runs the checks; returns what was checked and the results."""
        count, data, reward_config = self.progress.count, self.config.data, self.config.reward
        self.progress.stage("loading the reward")
        tokenizer = passes.tokenizer_of(self.config)
        with silenced("verl.rewards.function_reward"):
            reward = passes.checked_reward(self.config, tokenizer, 1)
            self.progress.stage("reading rows")
            template = tokenizer if data.custom_cls.path else None  # which a class of the user's gets
            split = read_split("rows", data.train_files or [], -1, data, template, count)
            if not split.rows:
                first = ": ".join(split.refused[0]) if split.refused else "it is empty"
                raise DataError(f"{split.source} has no row that a run can read; the first: {first}")
            number = self.options.rows or ROWS[may_cost_money(reward_config, reward)]
            rows = random.Random(self.seed).sample(split.rows, min(number, len(split.rows)))
            answers = Answers(rows, self.seed, tokenizer, self.options.gold_key)
            self.progress.stage("looking for the form of gold answers")
            await answers.choose_forms(lambda inputs: passes.one_by_one(reward, inputs, count))
            self.progress.stage("scoring")
            asked = answers.all()
            calls = await passes.one_by_one(reward, [answer.given for answer in asked], count)
            results = [check_readable(split), *self.results_of(asked, calls, answers.forms)]
            results += await self.score_again(asked, calls, reward, tokenizer)
        facts = {"rows": f"{len(rows):,} of {split.count:,} of {split.source}", "seed": str(self.seed)}
        return facts | {"answers": f"{len(asked):,}"}, results

    def results_of(self, asked: Sequence[Answer], calls: Sequence[Call], forms: dict[str, str]) -> list[CheckResult]:
        """Results that the first scores of the answers give."""
        scored = [(answer, score) for answer, (score, _) in zip(asked, calls, strict=False)]
        level = WRONG if self.config.reward.on_error == "stop" else WARNING
        note = ", ".join(f"{form.format('…')} of {source}" for source, form in forms.items() if form)
        results = [*findings.check_gold(scored, note or "none"), *findings.check_failures(scored, level)]
        timed = findings.check_time(asked, calls, self.config.reward.timeout_s)
        return [*results, *findings.check_values(scored), timed]

    async def score_again(
        self, asked: Sequence[Answer], calls: Sequence[Call], reward: Reward, tokenizer: PreTrainedTokenizerBase | None
    ) -> list[CheckResult]:
        """The same answers again in another order, from threads and from processes; memory."""
        again, check_same = "the same answer again", findings.check_same
        if len(calls) < len(asked):
            return [CheckResult(again, SKIPPED, f"{passes.MAX_LATE} calls reached their limit or ended their process")]
        mean_s = sum(seconds for _, seconds in calls) / len(calls)
        number = min(len(asked), max(20, int(AGAIN_S / mean_s)))
        picked = random.Random(self.seed).sample(range(len(asked)), number)
        some, first = [asked[i] for i in picked], [calls[i][0] for i in picked]
        inputs = [answer.given for answer in some]
        self.progress.stage("scoring again")
        second = await passes.one_by_one(reward, inputs, self.progress.count)
        results = [check_same(again, some, first, [score for score, _ in second], WARNING)]
        if results[0].examples:
            return [*results, CheckResult("threads and processes", SKIPPED, "scores differ from call to call already")]
        self.progress.stage("scoring from threads")
        threads = await passes.from_threads(passes.checked_reward(self.config, tokenizer, passes.THREADS), inputs)
        results.append(check_same(f"{passes.THREADS} threads at once", some, first, threads, WRONG))
        self.progress.stage("scoring in other processes")
        results += self.processes(some, first, mean_s)
        if not may_cost_money(self.config.reward, reward):
            self.progress.stage("measuring memory")
            results.append(findings.check_memory(*await passes.memory_growth(reward, inputs)))
        return results

    def processes(self, some: Sequence[Answer], first: Sequence[Score], mean_s: float) -> list[CheckResult]:
        check = "other processes, hash seeds, locales"
        pairs = [pair for pair in zip(some, first, strict=True) if is_storable(pair[0].given)]
        if not pairs:
            return [CheckResult(check, SKIPPED, "no row can be written as JSON")]
        limit_s = CHILD_START_S + 5 * mean_s * len(pairs)
        try:
            children = passes.from_processes(self.words, [answer.given for answer, _ in pairs], limit_s)
        except RewardError as error:
            return [CheckResult(check, WRONG, f"another process cannot score: {error}")]
        answers, scores = [[*column] for column in zip(*pairs, strict=True)]
        results = [findings.check_same(check, answers, scores, child, WRONG) for child in children]
        nothing = CheckResult(check, SKIPPED, "no process was started")
        return [max(results, key=lambda result: len(result.examples), default=nothing)]


@contextlib.contextmanager
def silenced(name: str) -> Iterator[None]:
    """A logger says nothing inside."""
    logger = logging.getLogger(name)
    logger.addFilter(is_silent := lambda record: False)
    try:
        yield
    finally:
        logger.removeFilter(is_silent)
