"""The signs that raise an alert: as rules for Prometheus (examples/monitoring/alerts.yml), and looked for here."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from verl.observe.signs import ALERTS, Sign, Step
from verl.observe.timers import BESIDE_STEP

ERROR_WINDOW_S = 900.0  # how long failed rewards are an alert
INACTIVE, PENDING, FIRING, UNKNOWN = "inactive", "pending", "firing", "unknown"
Records = Sequence[Mapping[str, Any]]


class Past(NamedTuple):
    """A step of a run: its number, when it ended and when the next one did, in seconds, and what signs look at."""

    number: int
    end: float
    next_end: float
    step: Step


@dataclass(frozen=True)
class AlertState:
    """How a sign stands at the end of the metrics, and the steps at which its alert began to fire."""

    sign: Sign
    state: str
    fired_at: list[int]

    @property
    def meaning(self) -> str:
        bound = "" if self.sign.promql else f"{self.sign.metric} above {self.sign.limit:g}: "
        return bound + self.sign.sentence


def past_steps(records: Records, replicas: Records = (), idle_s: float = 0.0) -> Iterator[Past]:
    """The steps in the lines of a metrics file, `idle_s` after the last; `replicas`: those of the replicas file."""
    lost = {int(record["step"]): float(record["lost"]) for record in replicas}
    timed = [record for record in records if "timing_s/step" in record["data"]]
    ends, failed = [0.0], list[tuple[float, float]]()
    for record in timed:
        ends.append(ends[-1] + sum(float(record["data"].get(f"timing_s/{s}", 0.0)) for s in ("step", *BESIDE_STEP)))
    for record, end, next_end in zip(timed, ends[1:], [*ends[2:], ends[-1] + idle_s], strict=False):
        number, data = int(record["step"]), record["data"]
        failed.append((end, data.get("reward/errors", 0.0)))
        seen = next_end if record is timed[-1] else end
        recent = sum(errors for at, errors in failed if at + ERROR_WINDOW_S > seen)
        overdue_s = next_end - end - 600 - 5 * float(data["timing_s/step"])
        step = Step(data, lost=lost.get(number, 0.0), overdue_s=overdue_s, recent_errors=recent)
        yield Past(number, end, next_end, step)


def alert_states(steps: Sequence[Past]) -> list[AlertState]:
    """The state of every alert after these steps. The metrics do not say whether the driver answers."""
    known = [sign for sign in ALERTS if steps and (sign.metric or sign.value)]
    return [_state(sign, steps) if sign in known else AlertState(sign, UNKNOWN, []) for sign in ALERTS]


def _state(sign: Sign, steps: Sequence[Past]) -> AlertState:
    fired, first, state = list[int](), steps[0], INACTIVE
    for past in steps:
        if not sign.is_shown(past.step):
            state = INACTIVE
            continue
        first = past if state == INACTIVE else first
        if past.next_end - first.end < sign.for_s:
            state = PENDING
        elif state != FIRING:
            state = FIRING
            fired.append(first.number)
    return AlertState(sign, state, fired)
