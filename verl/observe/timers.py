"""Seconds per stage of a step, and its throughput in tokens."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

BESIDE_STEP = ("start_profile", "stop_profile")  # stages of a profiled step that `timing_s/step` is without


class StageRecorder(Protocol):
    """A listener to the stages of a `StageTimer`."""

    def enter(self, stage: str) -> None: ...

    def exit(self) -> None: ...

    def add(self, stage: str, seconds: float) -> None: ...


StageSpan = tuple[str, float, float]  # stage, when it began by the timer's clock, seconds


class StageTimer:
    """Seconds per named stage of one step, for `timing_s/<stage>`. Seconds of a stage entered twice are added.

    >>> timer = StageTimer()
    >>> with timer("gen"):
    ...     pass
    >>> list(timer.metrics())
    ['timing_s/gen']

    `synchronize` runs before each clock reading; a GPU run passes the device's synchronise, otherwise the time of
    queued kernels is counted in a later stage. `on_enter` is called with each stage's name (for the live progress).
    """

    def __init__(
        self,
        synchronize: Callable[[], None] | None = None,
        on_enter: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.seconds: dict[str, float] = {}
        self.spans: list[StageSpan] = []  # of the stages that were entered here, in the order in which they ended
        self._recorder: StageRecorder | None = None  # of a profiled step
        self._synchronize = synchronize
        self._on_enter = on_enter
        self._clock = clock

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self._on_enter is not None:
            self._on_enter(stage)
        with self.slice(stage):
            start = self._now()
            try:
                yield
            finally:
                seconds = self._now() - start
                self.spans.append((stage, start, seconds))
                self._count(stage, seconds)

    @contextlib.contextmanager
    def recorded_by(self, recorder: StageRecorder) -> Iterator[None]:
        """Inside, `recorder` gets the stages; an error leaves it there, since what would end it may be gone."""
        self._recorder = recorder
        yield
        self._recorder = None

    @contextlib.contextmanager
    def slice(self, name: str) -> Iterator[None]:
        """A named part of a profiled step, which is not measured here."""
        if self._recorder is None:
            yield
            return
        self._recorder.enter(name)
        yield
        self._recorder.exit()

    def add(self, stage: str, seconds: float) -> None:
        """Add `seconds`, measured elsewhere, to `stage`."""
        self._count(stage, seconds)
        if self._recorder is not None:
            self._recorder.add(stage, seconds)

    def _count(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        """`timing_s/<stage>` for every stage so far."""
        return {f"timing_s/{stage}": seconds for stage, seconds in self.seconds.items()}

    def reset(self) -> None:
        """Start a new step."""
        self.seconds, self.spans = {}, []

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()


PER_TOKEN_STAGES = ("gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


def throughput_metrics(
    timing_s: Mapping[str, float], num_tokens: int, num_response_tokens: int, num_devices: int
) -> dict[str, float]:
    """perf/total_num_tokens, perf/time_per_step, perf/throughput (tokens/s/device), perf/publish_share of the step, and
    timing_per_token_ms/<stage>.

    `timing_s` maps stages (with or without the `timing_s/` prefix) to seconds and contains "step". Per token means per
    response token for "gen" and per token (prompt and response) for every other stage.
    """
    seconds = {stage.removeprefix("timing_s/"): value for stage, value in timing_s.items()}
    step = seconds.get("step")
    if step is None:
        raise KeyError(f"throughput needs the time of stage 'step'; timed stages: {sorted(seconds)}")
    out = {
        "perf/total_num_tokens": float(num_tokens),
        "perf/time_per_step": step,
        "perf/throughput": num_tokens / (step * num_devices) if step > 0 else 0.0,
    }
    if "update_weights" in seconds and step > 0:
        out["perf/publish_share"] = seconds["update_weights"] / step
    for stage in PER_TOKEN_STAGES:
        count = num_response_tokens if stage == "gen" else num_tokens
        if stage in seconds and count > 0:
            out[f"timing_per_token_ms/{stage}"] = 1000 * seconds[stage] / count
    return out
