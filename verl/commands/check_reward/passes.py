"""Scores the same answers in several ways: one by one, again, from many threads, from other processes, many times."""

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from verl.commands.check_reward.answers import Call
from verl.commands.plan.command import load_run_config
from verl.config import RunConfig
from verl.models.load import load_tokenizer
from verl.observe.memory_metrics import resident_memory_bytes
from verl.rewards.base import Reward, RewardInput, Score
from verl.rewards.calls import ProcessKilledError, RewardTimeoutError
from verl.rewards.reward_setup import build_reward
from verl.rewards.scoring_pool import scoring_processes
from verl.utils.errors import RewardError

LIMIT_S = 60.0  # of a call, where the run's limit is longer
MAX_LATE = 3  # calls that reached it or ended their process, after which the others are left out
THREADS = 16
MEMORY_CALLS, MEMORY_S, FEWEST_MEMORY_CALLS = 1000, 10.0, 100
CHILD_ENVIRONMENTS = ({"PYTHONHASHSEED": "1", "LC_ALL": "C.UTF-8"}, {"PYTHONHASHSEED": "2", "LC_ALL": "C"})


def tokenizer_of(config: RunConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the run; None where the configuration names no model."""
    model = config.actor_rollout_ref.model
    return load_tokenizer(model) if model.path or model.tokenizer_path else None


def checked_reward(config: RunConfig, tokenizer: PreTrainedTokenizerBase | None, threads: int) -> Reward:
    """The reward of the run, whose failures are scores without a value."""
    limit = LIMIT_S if config.reward.timeout_s is None else min(config.reward.timeout_s, LIMIT_S)
    settings = replace(config.reward, on_error="count", max_errors=None, num_workers=threads, timeout_s=limit)
    return build_reward(replace(config, reward=settings), tokenizer)  # type: ignore[arg-type]  # none without a model


def is_late(score: Score) -> bool:
    """Whether a call reached its limit, in this process or in one that was killed because of it."""
    return any(error.__name__ in (score.error or "") for error in (RewardTimeoutError, ProcessKilledError))


async def one_by_one(reward: Reward, inputs: Sequence[RewardInput], count: Callable[[str], None]) -> list[Call]:
    """The scores and times of single calls in this order; fewer where too many calls hang."""
    calls: list[Call] = []
    for item in inputs:
        start = time.perf_counter()
        score = (await all_at_once(reward, [item]))[0]
        calls.append((score, time.perf_counter() - start))
        count(f"{len(calls):,} of {len(inputs):,} answers")
        if sum(is_late(score) or score.processes_lost > 0 for score, _ in calls) >= MAX_LATE:
            break
    return calls


async def all_at_once(reward: Reward, inputs: Sequence[RewardInput]) -> list[Score]:
    """The scores; that of a call that stops a run has its message."""
    try:
        return await reward.score(inputs)
    except RewardError as error:
        return [Score(None, error=str(error))] * len(inputs)


async def from_threads(reward: Reward, inputs: Sequence[RewardInput]) -> list[Score]:
    """The scores of all calls at once."""
    found = await asyncio.gather(*(all_at_once(reward, [item]) for item in inputs))  # one answer a batch, as alone
    return [score for (score,) in found]


def from_processes(words: Sequence[str], inputs: Sequence[RewardInput], limit_s: float) -> list[list[Score]]:
    """The scores of the inputs in fresh processes with another hash seed and locale each; RewardError if one fails."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        (asked := Path(name) / "asked.json").write_text(json.dumps([list(words), [vars(item) for item in inputs]]))
        files = [Path(name) / f"scores-{number}.json" for number in range(len(CHILD_ENVIRONMENTS))]
        children = []
        for file, environment in zip(files, CHILD_ENVIRONMENTS, strict=True):
            command = [sys.executable, "-m", "verl.commands.check_reward.passes", str(asked), str(file)]
            child = subprocess.Popen(
                command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            children.append(stack.enter_context(child))
            stack.callback(child.kill)
        for child in children:
            try:
                error = child.communicate(timeout=limit_s)[1]
            except subprocess.TimeoutExpired:
                raise RewardError(f"it was not done after {limit_s:.0f} s") from None
            if child.returncode != 0:
                raise RewardError((error.strip() or f"exit code {child.returncode}").splitlines()[-1])
        return [[Score(value, error=error) for value, error in json.loads(file.read_text())] for file in files]


def score_in_child(asked: str, scores: str) -> None:
    """The other end of `from_processes`."""
    words, inputs = json.loads(Path(asked).read_text())
    config = load_run_config(words)
    reward = checked_reward(config, tokenizer_of(config), 1)
    calls = asyncio.run(one_by_one(reward, [RewardInput(**item) for item in inputs], lambda text: None))
    Path(scores).write_text(json.dumps([(score.value, score.error) for score, _ in calls]))


async def memory_growth(reward: Reward, inputs: Sequence[RewardInput]) -> tuple[int, float]:
    """How many more calls were made, and by how many MB a thousand of them would make their processes grow."""
    before, end, calls = memory_bytes(), time.perf_counter() + MEMORY_S, 0
    for item in itertools.islice(itertools.cycle(inputs), MEMORY_CALLS):
        await all_at_once(reward, [item])
        calls += 1
        if time.perf_counter() > end:
            break
    return calls, (memory_bytes() - before) / 1e6 * 1000 / calls


def memory_bytes() -> int:
    """Resident memory of the processes that score, as far as they run on this machine."""
    return sum(resident_memory_bytes(pid).current for pid in scoring_processes())


if __name__ == "__main__":
    score_in_child(*sys.argv[1:])
