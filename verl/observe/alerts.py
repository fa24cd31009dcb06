"""The alert rules of a run: for Prometheus (examples/monitoring/alerts.yml), and evaluated here on its metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verl.observe.timers import BESIDE_STEP

ERROR_WINDOW_S = 900.0  # how long failed rewards are an alert
INACTIVE, PENDING, FIRING, UNKNOWN = "inactive", "pending", "firing", "unknown"


@dataclass(frozen=True)
class Timeline:
    """The steps of a run: when each ended, in seconds since the first began, with its metrics and lost replicas."""

    steps: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    data: list[Mapping[str, float]] = field(default_factory=list)
    lost: list[float | None] = field(default_factory=list)  # None: not recorded
    now: float = 0.0

    @classmethod
    def of(
        cls, records: Sequence[Mapping[str, Any]], replicas: Sequence[Mapping[str, Any]] = (), idle_s: float = 0.0
    ) -> "Timeline":
        """That of the lines of a metrics file, `idle_s` after the last; `replicas` are lines of its replicas file."""
        lost = {int(record["step"]): float(record["lost"]) for record in replicas}
        found, at = cls(), 0.0
        for record in records:
            data = record["data"]
            if "timing_s/step" in data:
                at += sum(float(data.get(f"timing_s/{stage}", 0.0)) for stage in ("step", *BESIDE_STEP))
                found.steps.append(int(record["step"]))
                found.ends.append(at)
                found.data.append(data)
                found.lost.append(lost.get(int(record["step"])))
        return cls(found.steps, found.ends, found.data, found.lost, at + idle_s)


class Span(NamedTuple):
    """When a rule's condition held, the step that ended last before it, and whether it holds still."""

    start: float
    end: float
    step: int
    is_open: bool


Look = Callable[[Timeline], list[Span]]


@dataclass(frozen=True)
class Alert:
    """One rule. `look` finds where `expr` holds; None: the metrics do not say."""

    name: str
    expr: str
    for_s: int
    severity: str
    summary: str
    description: str
    meaning: str
    look: Look | None


@dataclass(frozen=True)
class AlertState:
    """How a rule stands at the end of the metrics, and the steps at which it began to fire."""

    alert: Alert
    state: str
    fired_at: list[int] = field(default_factory=list)


def alert_states(timeline: Timeline) -> list[AlertState]:
    """The state of every rule."""
    states = []
    for alert in ALERTS:
        if alert.look is None or not timeline.steps:
            states.append(AlertState(alert, UNKNOWN))
            continue
        spans = alert.look(timeline)
        fired = [span.step for span in spans if span.end - span.start >= alert.for_s]
        state = INACTIVE
        if spans and spans[-1].is_open:
            state = FIRING if spans[-1].end - spans[-1].start >= alert.for_s else PENDING
        states.append(AlertState(alert, state, fired))
    return states


def above(bound: float, value: Callable[[Timeline, int], float | None]) -> Look:
    """Where what a step says is above `bound`; it holds until the next step ends."""

    def look(timeline: Timeline) -> list[Span]:
        ends = [*timeline.ends[1:], timeline.now]
        found = []
        for i, step in enumerate(timeline.steps):
            now = value(timeline, i)
            if now is not None and now > bound:
                found.append(Span(timeline.ends[i], ends[i], step, i == len(timeline.steps) - 1))
        return merged(found)

    return look


def metric(name: str) -> Callable[[Timeline, int], float | None]:
    return lambda timeline, i: timeline.data[i].get(name)


def no_step(timeline: Timeline) -> list[Span]:
    """Where ten minutes and five times the last step have passed without another."""
    ends, found = [*timeline.ends[1:], timeline.now], []
    for i, step in enumerate(timeline.steps):
        due = timeline.ends[i] + 600 + 5 * float(timeline.data[i]["timing_s/step"])
        if ends[i] > due:
            found.append(Span(due, ends[i], step, i == len(timeline.steps) - 1))
    return found


def reward_errors(timeline: Timeline) -> list[Span]:
    """The quarter of an hour after each step with answers whose reward failed."""
    failed = [i for i, data in enumerate(timeline.data) if data.get("reward/errors", 0.0) > 0]
    spans = []
    for i in failed:
        end = timeline.ends[i] + ERROR_WINDOW_S
        spans.append(Span(timeline.ends[i], min(end, timeline.now), timeline.steps[i], end > timeline.now))
    return merged(spans)


def merged(spans: Sequence[Span]) -> list[Span]:
    """Spans in order, those that touch as one."""
    out: list[Span] = []
    for span in spans:
        if out and span.start <= out[-1].end:
            out[-1] = out[-1]._replace(end=max(out[-1].end, span.end), is_open=span.is_open)
        else:
            out.append(span)
    return out


_STALENESS, _MISMATCH = "training/off_policy/trajectory_staleness/max", "rollout_corr/k3_kl"
ALERTS = (
    Alert(
        "VerlNoStep",
        "time() - verl_last_step_timestamp_seconds > on(instance, experiment) 600 + 5 * "
        'verl_stage_seconds{stage="step"}',
        60,
        "warning",
        "{{ $labels.experiment }}: no step ended for {{ $value | humanizeDuration }}",
        "The last step is older than five of its kind and ten minutes. docs/when_a_run_hangs.md.",
        "no step for ten minutes and five times the last one",
        no_step,
    ),
    Alert(
        "VerlGone",
        'up{job="verl"} == 0',
        120,
        "critical",
        "{{ $labels.experiment }}: the driver does not answer at {{ $labels.instance }}",
        "The run has ended, or its machine is gone.",
        "the driver does not answer Prometheus",
        None,
    ),
    Alert(
        "VerlStaleness",
        f'verl_metric{{name="{_STALENESS}"}} > 8',
        600,
        "warning",
        "{{ $labels.experiment }}: answers are trained on {{ $value }} versions after they were sampled",
        "The rollout is slower than the trainer; lower the bound of staleness, or add replicas.",
        f"{_STALENESS} above 8 for ten minutes",
        above(8, metric(_STALENESS)),
    ),
    Alert(
        "VerlMismatch",
        f'verl_metric{{name="{_MISMATCH}"}} > 0.05',
        600,
        "warning",
        "{{ $labels.experiment }}: rollout and trainer differ by {{ $value }} nats a token",
        "Both compute the same policy; see docs/rollout_correction.md.",
        f"{_MISMATCH} above 0.05 nats for ten minutes",
        above(0.05, metric(_MISMATCH)),
    ),
    Alert(
        "VerlRewardErrors",
        "increase(verl_reward_errors_total[15m]) > 0",
        0,
        "warning",
        "{{ $labels.experiment }}: {{ $value }} answers without a reward in 15 minutes",
        "The reward function fails (reward.on_error=count); see the ledger and docs/own_reward.md.",
        "answers whose reward failed, in the last 15 minutes",
        reward_errors,
    ),
    Alert(
        "VerlReplicaLost",
        "verl_replicas_lost > 0",
        0,
        "warning",
        "{{ $labels.experiment }}: {{ $value }} rollout replicas are lost",
        "The others do their work; the run goes on more slowly.",
        "rollout replicas that are lost and not replaced",
        above(0, lambda timeline, i: timeline.lost[i]),
    ),
)


def rules_for_prometheus() -> dict[str, Any]:
    """The rules as Prometheus reads them."""
    rules = []
    for alert in ALERTS:
        rule: dict[str, Any] = {"alert": alert.name, "expr": alert.expr}
        if alert.for_s:
            rule["for"] = f"{alert.for_s // 60}m"
        rule["labels"] = {"severity": alert.severity}
        rule["annotations"] = {"summary": alert.summary, "description": alert.description}
        rules.append(rule)
    return {"groups": [{"name": "verl", "rules": rules}]}
