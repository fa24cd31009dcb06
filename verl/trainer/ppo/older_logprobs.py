"""Old log-probs of tokens that older weights sampled: scored by the trainer before it leaves the version of these."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.agent import single_turn
from verl.agent.agent_runner import AgentRunner
from verl.data.batch import Batch
from verl.data.prompts import PromptDataset
from verl.data.trajectory import Trajectory
from verl.trainer.ppo.group_filter import Group
from verl.utils.errors import ConfigError

if TYPE_CHECKING:
    from verl.trainer.ppo.async_source import AsyncSource, Flight


def check_loops_can_be_scored(runner: AgentRunner, rows: PromptDataset) -> None:
    """ConfigError for a prompt with an agent loop: its finished turns are not known before the conversation ends."""
    for row in rows:
        name = runner.loop_name(row.agent_name)
        if runner.loop_factory(name) is not None:
            raise ConfigError(
                f"{row.location} is answered by agent loop {name}, whose conversations may span versions of the "
                "weights, and the rollout's log-probs are not the trainer's: only single answers "
                f"({single_turn.NAME}) are scored before the trainer leaves a version. Set "
                "algorithm.rollout_correction.bypass_mode=True, rollout.name=native with dtype=auto, top_p=1 and "
                "top_k=-1, or async_training.staleness_threshold=0"
            )


async def sequences_under_way(source: "AsyncSource") -> "list[tuple[Flight, int, list[int], int]]":
    """(group, sample, prompt + tokens so far, tokens of the prompt) of all that is parked or waits to be taken."""
    for _ in range(2):  # what was complete when the engine was parked reaches its group
        await asyncio.sleep(0)
    out = []
    for saved in source.collector.engine.parked():
        flight = source.flights.get(saved["request_id"])  # of greedy answers there is none: nothing trains on them
        if flight is not None:
            prompt = saved["prompt"]
            out += [(flight, i, prompt + tokens, len(prompt)) for i, tokens in tokens_by_sample(saved).items()]
    for flight in source.flights.values():
        answers = enumerate(flight.answers or ())
        out += [(flight, i, answer.tokens.tolist(), answer.prompt_length) for i, answer in answers]
    return out


def tokens_by_sample(saved: dict[str, Any]) -> dict[int, list[int]]:
    """What a parked request has sampled, from either form of `RolloutEngine.parked`."""
    if "samples" in saved:
        return {index: sample["tokens"] for index, sample in enumerate(saved["samples"])}
    finished = {int(index): completion["token_ids"] for index, completion in saved["finished"].items()}
    return finished | {entry["sample"]: entry["tokens"] for entry in saved["unfinished"]}


def keep_logprobs(
    under_way: "list[tuple[Flight, int, list[int], int]]", version: int, logprobs_of: Callable[[Batch], Tensor]
) -> int:
    """Score the tokens that were not scored yet: `version`, which the trainer is about to leave, sampled them. Returns
    their number."""
    new = [
        (flight, sample, tokens, prompt + len(flight.older_logprobs.get(sample, ())))
        for flight, sample, tokens, prompt in under_way
    ]
    new = [part for part in new if len(part[2]) > part[3]]
    if not new:
        return 0
    batch = Batch.pack([_as_trajectory(tokens, first, version) for _, _, tokens, first in new])
    scored = logprobs_of(batch).split([len(tokens) for _, _, tokens, _ in new])
    for (flight, sample, _, first), values in zip(new, scored, strict=True):
        flight.older_logprobs.setdefault(sample, []).extend(values[first:].tolist())
    return sum(len(tokens) - first for _, _, tokens, first in new)


def _as_trajectory(tokens: list[int], first: int, version: int) -> Trajectory:
    count = len(tokens) - first
    return Trajectory.from_completion(
        tokens[:first], tokens[first:], [0.0] * count, group_id=0, reward=0.0, policy_version=(version, version)
    )


def with_older_logprobs(group: Group, older: dict[int, list[float]]) -> Group:
    """The answers with what was kept of them; of a sample without a complete answer there is nothing."""
    if not older:
        return group
    return [
        (replace(answer, older_logprobs=tuple(older.get(index, ()))), score)
        for index, (answer, score) in enumerate(group)
    ]


def with_known_old_logprobs(batch: Batch, answers: list[Trajectory]) -> Batch:
    """With a column `old_logprobs` where some were scored by older versions; NaN where the trainer of now says them."""
    if not any(answer.older_logprobs for answer in answers):
        return batch
    old = torch.full_like(batch["rollout_logprobs"], torch.nan)
    for answer, start in zip(answers, batch.cu_seqlens.tolist(), strict=False):
        places = answer.loss_mask.nonzero().squeeze(1)[: len(answer.older_logprobs)] + start
        old[places] = torch.tensor(answer.older_logprobs)
    return batch.with_columns(old_logprobs=old)
