"""Metrics of asynchronous training: ages, what was dropped, and who waited for whom."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from verl.data.trajectory import Trajectory
from verl.trainer.ppo.batch_metrics import mean_max_min
from verl.trainer.ppo.sources.group_filter import Group

if TYPE_CHECKING:
    from verl.trainer.ppo.sources.async_source import AsyncSource


@dataclass
class AsyncCounts:
    """Sums since the run began; a resumed run goes on with them."""

    generated_groups: int = 0
    stale_groups: int = 0
    stale_trajectories: int = 0
    dropped_groups: int = 0
    dropped_now: int = 0  # by the last publish

    def add_step(self, ages: Sequence[int], trajectories: Sequence[Trajectory], version: int) -> None:
        """Count what a step has taken."""
        self.generated_groups += len(ages)
        self.stale_groups += sum(age > 0 for age in ages)
        self.stale_trajectories += sum(t.policy_version[0] < version for t in trajectories)

    def add_publish(self, dropped: int) -> None:
        """Count the groups that became too old by a publish."""
        self.dropped_groups += dropped
        self.dropped_now = dropped

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.__dict__.update(state)


@dataclass
class StepTally:
    """The groups that a step has taken so far, and how long it took."""

    ages: list[int] = field(default_factory=list)  # of each group: versions between its admission and its training
    trajectories: list[Trajectory] = field(default_factory=list)
    waited_s: float = 0.0  # the trainer in `take`, in which a colocated rollout works
    trained_s: float = 0.0  # between one `take` and the next
    idle_s: float = 0.0  # of a rollout apart

    def add_training(self, seconds: float) -> None:
        self.trained_s += seconds

    def add(self, ages: Sequence[int], trajectories: Sequence[Trajectory], waited_s: float, idle_s: float) -> None:
        """One `take` more."""
        self.ages += ages
        self.trajectories += trajectories
        self.waited_s += waited_s
        self.idle_s += idle_s


class IdleClock:
    """Seconds in which no answer was being sampled."""

    def __init__(self) -> None:
        self._sampled: set[int] = set()  # groups
        self._idle_s, self._since = 0.0, time.perf_counter()

    def begin(self, group: int) -> None:
        """The answers of `group` are being sampled from now on."""
        self._count()
        self._sampled.add(group)

    def end(self, group: int) -> None:
        """They are complete, or not wanted any more."""
        self._count()
        self._sampled.discard(group)

    def seconds(self) -> float:
        """Idle seconds since the last call."""
        self._count()
        idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s

    def _count(self) -> None:
        now = time.perf_counter()
        if not self._sampled:
            self._idle_s += now - self._since
        self._since = now


def step_metrics(source: "AsyncSource", step: StepTally, evicted: Sequence[Group]) -> dict[str, float]:
    """fully_async/*, training/off_policy/* and training/*/evicted_samples of the groups that a step has taken."""
    counts, admission, version = source.counts, source.admission, source.admission.version
    ages, trajectories, waited_s, trained_s = step.ages, step.trajectories, step.waited_s, step.trained_s
    spans = [t.policy_version[1] - t.policy_version[0] for t in trajectories]
    partial, whole_s = sum(span > 0 for span in spans), max(waited_s + trained_s, 1e-9)
    rollout_idle_s = step.idle_s if source.goes_on else trained_s
    failed = [group for group in evicted if all(t.reward is None for t, _ in group)]
    out: dict[str, Any] = {
        "fully_async/count/current_param_version": version,
        "fully_async/count/total_generated_samples": counts.generated_groups + admission.num_queued,
        "fully_async/count/stale_samples_processed": counts.stale_groups,
        "fully_async/count/stale_trajectory_processed": counts.stale_trajectories,
        "fully_async/count/dropped_stale_samples": counts.dropped_groups,
        "fully_async/count/queued": admission.num_queued,
        "fully_async/count/in_flight": len(admission.versions) - admission.num_queued,
        "fully_async/partial/total_partial_num": partial,
        "fully_async/partial/partial_ratio": partial / max(len(spans), 1),
        "fully_async/partial/max_partial_span": max(spans, default=0),
        "fully_async/trainer/idle_ratio": waited_s / whole_s,
        "fully_async/rollouter/idle_ratio": min(rollout_idle_s / whole_s, 1.0),
        "fully_async/total_wait_time": waited_s,
        "training/off_policy/evicted_samples": counts.dropped_now * source.sampling.n,
        "training/rollout_failure/evicted_samples": sum(map(len, failed)),
        "training/filter_groups/evicted_samples": sum(map(len, evicted)) - sum(map(len, failed)),
    }
    for age, count in sorted(Counter(ages).items()):
        out[f"training/off_policy/lag_histogram/{age}"] = count / len(ages)
    oldest = [version - t.policy_version[0] for t in trajectories]
    out |= mean_max_min("training/off_policy/lag", torch.tensor(ages, dtype=torch.float64))
    out |= mean_max_min("training/off_policy/trajectory_spans", torch.tensor(spans, dtype=torch.float64))
    worst = {t.group_id: 0 for t in trajectories}
    for trajectory, age in zip(trajectories, oldest, strict=True):
        worst[trajectory.group_id] = max(worst[trajectory.group_id], age)
    worst_ages = torch.tensor(list(worst.values()), dtype=torch.float64)
    return out | mean_max_min("training/off_policy/trajectory_staleness_worst", worst_ages)
