"""The batch of a step: scored trajectories with their prompts, and their progress while they are collected."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from verl.data.prompts import PromptRow
from verl.data.trajectory import Trajectory
from verl.rewards.base import Score


@dataclass(frozen=True)
class RolloutBatch:
    """Scored trajectories, grouped prompt by prompt, and the prompts they answer.

    The lists are left out of its repr, which asyncio calls four times a step.
    """

    trajectories: list[Trajectory] = field(default_factory=list, repr=False)
    rows: list[PromptRow] = field(default_factory=list, repr=False)  # one per prompt, in order
    generate_s: float = 0.0  # until the last answer was complete
    reward_s: float = 0.0  # from then until the last was scored
    num_reward_errors: int = 0
    num_abstained: int = 0
    num_reward_retries: int = 0
    num_reward_processes_lost: int = 0
    scores: list[Score] = field(default_factory=list, repr=False)  # one per trajectory
    engine_stats: dict[str, float] = field(default_factory=dict)  # metrics of the rollout engine meanwhile
    metrics: dict[str, float] = field(default_factory=dict)  # of dynamic sampling

    @classmethod
    def of(
        cls, rows: Sequence[PromptRow], answers: Sequence[tuple[Trajectory, Score]], found: Sequence[Score], **more: Any
    ) -> "RolloutBatch":
        """The scored answers to `rows`. `found` are all scores that were asked for, of which errors and retries count;
        `more` are further fields."""
        return cls(
            trajectories=[trajectory for trajectory, _ in answers],
            rows=list(rows),
            num_reward_errors=sum(score.error is not None for score in found),
            num_abstained=sum(score.abstained for score in found),
            num_reward_retries=sum(score.retries for score in found),
            num_reward_processes_lost=sum(score.processes_lost for score in found),
            scores=[score for _, score in answers],
            **more,
        )

    @classmethod
    def cat(cls, parts: "Sequence[RolloutBatch]") -> "RolloutBatch":
        """The parts of a step one after the other; the last has the metrics of them all."""
        joined: dict[str, Any] = {name: [one for part in parts for one in getattr(part, name)] for name in LISTS}
        joined |= {name: sum(getattr(part, name) for part in parts) for name in SUMS}
        return cls(**joined, engine_stats=parts[-1].engine_stats, metrics=parts[-1].metrics)


LISTS = ("trajectories", "rows", "scores")
SUMS = ("generate_s", "reward_s", *(one.name for one in fields(RolloutBatch) if one.name.startswith("num_")))


@dataclass
class CollectCounts:
    """How far the answers to some prompts are."""

    total: int
    answered: int = 0
    scored: int = 0
    tokens: int = 0  # sampled, also of unfinished answers; 0 where the engine does not say

    def add(self, total: int = 0, answered: int = 0, scored: int = 0, tokens: int = 0) -> None:
        self.total, self.answered = self.total + total, self.answered + answered
        self.scored, self.tokens = self.scored + scored, self.tokens + tokens

    def text(self) -> str:
        """`64 of 512 answers, 8,300 tokens`, or how many are scored once all are there."""
        if self.answered == self.total and self.scored < self.total:
            return f"{self.scored:,} of {self.total:,} answers scored"
        return f"{self.answered:,} of {self.total:,} answers" + (f", {self.tokens:,} tokens" if self.tokens else "")
