"""Input and output of a reward. The output is a score, an abstention or an error, never a silent zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from verl.data.prompts import PromptRow
    from verl.data.trajectory import Trajectory


@dataclass(frozen=True)
class RewardInput:
    """One answer to be scored."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    prompt_str: str = ""
    num_turns: int = 1
    response_length: int | None = None  # tokens of the answer; the over-long penalty needs it
    where: str = ""  # file and row of the prompt, for messages
    answer: Trajectory | None = field(default=None, compare=False, repr=False)  # for managers of a user's own
    row: PromptRow | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_row(cls, row: PromptRow, solution_str: str, answer: Trajectory) -> RewardInput:
        """The answer to a prompt row, as text and as tokens; what `answer` tells of itself joins `extra_info`."""
        return cls(
            data_source=row.data_source,
            solution_str=solution_str,
            ground_truth=row.ground_truth,
            extra_info={**row.extra_info, **answer.told()},
            prompt_str=row.text,
            num_turns=answer.num_turns,
            response_length=answer.num_sampled,
            where=row.location,
            answer=answer,
            row=row,
        )

    def as_text(self) -> dict[str, Any]:
        """The fields of an answer by name, without the tokens and the prompt's row."""
        return {name: value for name, value in vars(self).items() if name not in ("answer", "row")}


@dataclass(frozen=True)
class Score:
    """The score of one answer.

    A success has a `value`; an abstention has neither value nor error; a failure has the text of its error. Training
    leaves out trajectories without a value, and counts them.
    """

    value: float | None
    extra: dict[str, Any] = field(default_factory=dict)  # further columns for logs and validation: acc, pred, ...
    error: str | None = None
    retries: int = 0  # further attempts that it took
    processes_lost: int = 0  # that ended meanwhile, each replaced by another

    @property
    def abstained(self) -> bool:
        return self.value is None and self.error is None


class NoScorerError(NotImplementedError):
    """No built-in scorer exists for the data source; the message lists the built-in ones and what to do."""


class Reward(Protocol):
    """Scores answers; the scores come in the order of the inputs."""

    @property
    def is_async(self) -> bool:
        """Whether it likely asks a service, as an async function does."""
        ...

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]: ...

    async def exchange_generators(self, states: str | None) -> str | None:
        """The states of the random generators that calls draw from, which `states` replace; None: not known."""
        ...
