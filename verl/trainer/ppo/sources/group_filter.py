"""Which groups of answers a step trains on: all, or the first ones that can be trained on (dynamic sampling)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from verl.config import RunConfig
from verl.data.prompts import PromptRow
from verl.data.reward_parts import reward_part
from verl.data.trajectory import Trajectory, conversations_of
from verl.rewards.base import Score
from verl.utils.errors import VerlError

Group = list[tuple[Trajectory, Score]]  # the answers to one prompt
Prompt = tuple[PromptRow, int]  # a row and the request id of its answers
WHOLE_REWARD = ("seq_reward", "seq_final_reward")  # metrics that are what is trained on


class GroupPlan(Protocol):
    """Names prompts to be answered, and picks groups. Groups are numbered in the order of their prompts, from 0."""

    def next_prompts(self) -> Sequence[Prompt]:
        """Prompts to send now; each is given out once."""

    def add(self, number: int, group: Group) -> None:
        """Take note of a group whose answers are scored. They come in any order."""

    @property
    def complete(self) -> bool:
        """Whether nothing more is needed, so that answers in flight can be aborted."""

    @property
    def picked(self) -> Sequence[int]:
        """The groups to train on."""

    @property
    def consumed(self) -> int:
        """How many of the first prompts are used up."""

    def metrics(self) -> dict[str, float]:
        """Metrics of what was left out, and why."""


class FixedPrompts:
    """Some prompts, all of which are picked."""

    complete = False

    def __init__(self, rows: Sequence[PromptRow], request_ids: Sequence[int]):
        self._due = list(zip(rows, request_ids, strict=True))
        self.consumed = len(self._due)
        self.picked = range(self.consumed)

    def next_prompts(self) -> Sequence[Prompt]:
        due, self._due = self._due, []
        return due

    def add(self, number: int, group: Group) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class GroupRules:
    """Which groups are replaced, and how many prompts are sent at once."""

    metric: str | None = None  # replace groups in which this is the same for all answers; None: do not look
    replace_failed: bool = False  # replace groups in which no answer has a reward
    gen_batch_size: int | None = None  # prompts that are sent together; None: as many as groups are wanted
    max_gen_batches: int = 0  # of one step; 0: no limit
    max_inflight: int = 1  # prompts answered at once, in units of the groups wanted

    @classmethod
    def of(cls, config: RunConfig) -> "GroupRules":
        """The filter that `algorithm.filter_groups`, `data.gen_batch_size` and `trainer.v1.sampler` ask for."""
        settings = config.algorithm.filter_groups
        return cls(
            settings.metric if settings.enable else None,
            config.trainer.v1.sampler.sync_refill_failed_groups,
            config.data.gen_batch_size,
            settings.max_num_gen_batches,
            settings.max_inflight_gen_batches,
        )

    @property
    def replace_groups(self) -> bool:
        return self.metric is not None or self.replace_failed


class GroupFilter:
    """Picks the first `wanted` groups, in the order of the data, that can be trained on, and replaces the others.

    How many prompts are sent at once, and which answers come first, changes neither the groups that are picked nor
    where the next step begins: a group counts once all before it are there, and prompts after the last that is needed
    are given back unused. Source: arXiv 2503.14476, §3.2 (dynamic sampling).
    """

    def __init__(self, wanted: int, rules: GroupRules, draw: Callable[[int], Sequence[Prompt]]):
        self.wanted, self.rules, self.draw = wanted, rules, draw  # draw(k): the next k prompts, fewer at the end
        self.batch_size = rules.gen_batch_size or wanted
        self.picked: list[int] = []
        self.consumed = self.num_sent = self.num_batches = self.num_kept = 0
        self.verdicts: dict[int, Verdict] = {}

    def next_prompts(self) -> list[Prompt]:
        """Whole generation batches while there is room for them and groups are missing; VerlError at a limit."""
        out: list[Prompt] = []
        while self._is_room():
            limit = self.rules.max_gen_batches
            prompts = self.draw(self.batch_size) if not limit or self.num_batches < limit else []
            if not prompts:
                if self._in_flight == 0:
                    raise VerlError(self._too_few_text())
                break
            out += prompts
            self.num_sent, self.num_batches = self.num_sent + len(prompts), self.num_batches + 1
        return out

    @property
    def _in_flight(self) -> int:
        return self.num_sent - len(self.verdicts)

    def _is_room(self) -> bool:
        limit, in_flight = self.wanted * self.rules.max_inflight, self._in_flight
        return self.num_kept + in_flight < limit and (in_flight == 0 or in_flight + self.batch_size <= limit)

    def add(self, number: int, group: Group) -> None:
        verdict = self.verdicts[number] = verdict_on(group, self.rules)
        self.num_kept += verdict.reason == ""
        while not self.complete and self.consumed in self.verdicts:
            if not self.verdicts[self.consumed].reason:
                self.picked.append(self.consumed)
            self.consumed += 1

    @property
    def complete(self) -> bool:
        return len(self.picked) == self.wanted

    def metrics(self) -> dict[str, float]:
        """training/filter_groups/* and training/rollout_failure/evicted_samples; samples are answers."""
        used = [self.verdicts[number] for number in range(self.consumed)]
        equal, failed = ([v for v in used if v.reason == reason] for reason in ("equal", "failed"))
        out = {"training/rollout_failure/evicted_samples": float(sum(v.num_answers for v in failed))}
        if self.rules.metric is None:
            return out
        values = [value for verdict in used for value in verdict.values]
        low, high = min(values, default=0.0), max(values, default=0.0)
        counts = {
            "evicted_samples": sum(v.num_answers for v in equal),
            "filtered_reward_counts": len(equal),
            "filtered_lowest": sum(v.values[0] == low for v in equal),
            "filtered_highest": sum(v.values[0] == high > low for v in equal),
            "discarded_surplus_samples": used[0].num_answers * (self.num_sent - self.consumed),
            "gen_batches": self.num_batches,
        }
        return out | {f"training/filter_groups/{name}": float(count) for name, count in counts.items()}

    def _too_few_text(self) -> str:
        metric, limit = self.rules.metric, self.rules.max_gen_batches
        counts = {name.rpartition("/")[2]: int(value) for name, value in self.metrics().items()}
        no_reward = sum(verdict.reason == "failed" for verdict in self.verdicts.values())
        text = f"{self.num_sent} prompts gave {len(self.picked)} of the {self.wanted} groups of a step"
        if metric is not None:
            text += (
                f" (algorithm.filter_groups.metric={metric}): in {counts['filtered_reward_counts']} groups all answers "
                f"were equal, in {counts['filtered_lowest']} of them the lowest value and in "
                f"{counts['filtered_highest']} the highest"
            )
        text += f"; in {no_reward} no answer had a reward" if no_reward else ""
        if limit and self.num_batches >= limit:
            text += (
                f". algorithm.filter_groups.max_num_gen_batches={limit} allows no more: raise it (0 is no limit), or"
            )
        else:
            text += ". These are as many prompts as the data has, and a step takes none twice:"
        return (
            f"{text} take prompts that are neither too hard nor too easy, raise actor_rollout_ref.rollout.n, or lower "
            "data.train_batch_size"
        )


@dataclass(frozen=True)
class Verdict:
    """Why a group is replaced ("equal" or "failed"; "" is kept), and the metric of its answers that have a reward."""

    reason: str
    values: tuple[float, ...]
    num_answers: int


def verdict_on(group: Group, rules: GroupRules) -> Verdict:
    """The verdict on one group; RewardError where an answer lacks the metric."""
    answers = conversations_of([trajectory for trajectory, _ in group])
    scored = [[t for t in outputs if t.reward is not None] for outputs in answers]
    if not any(scored):
        return Verdict("failed", (), len(answers))
    if rules.metric is None:
        return Verdict("", (), len(answers))
    name = "" if rules.metric in WHOLE_REWARD else rules.metric
    each = [[reward_part(t, name) if name else t.reward or 0.0 for t in outputs] for outputs in scored if outputs]
    values = tuple(map(fmean, each))
    return Verdict("equal" if min(values) == max(values) else "", values, len(answers))
