"""Counts of rollout engines: each only grows, and every reader subtracts what it read before."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

Counts = Mapping[str, float]


@dataclass(frozen=True)
class EngineStats:
    """Counts of one replica or rank since it started, and its state now."""

    totals: Counts = field(default_factory=dict)  # counts and seconds; the metric is the sum over the replicas
    steps: Counts = field(default_factory=dict)  # counts; the metric is the mean over the replicas that worked
    ratios: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # two counts; the mean of their quotients
    gauges: Counts = field(default_factory=dict)  # as of now, subtracted by nobody; the sum over the replicas
    sums: Counts = field(default_factory=dict)  # of DecodeTimes: for `verl plan --schedule`, and no metric

    def continuing(self, ended: "EngineStats") -> "EngineStats":
        """Stats of an engine that took the place of one that `ended`."""
        fresh = EngineStats(  # it may not name yet what it has not counted
            {**dict.fromkeys(ended.totals, 0), **self.totals},
            {**dict.fromkeys(ended.steps, 0), **self.steps},
            {**dict.fromkeys(ended.ratios, (0, 0)), **self.ratios},
            self.gauges,
            {**dict.fromkeys(ended.sums, 0.0), **self.sums},
        )
        return fresh._plus(ended, 1)

    def since(self, before: "EngineStats") -> "EngineStats":
        """The counts after `before`; all of them where one is lower now, as for an engine started anew."""
        was, now = before._counts(), self._counts()
        return self if any(now.get(name, 0) < count for name, count in was.items()) else self._plus(before, -1)

    def _plus(self, other: "EngineStats", sign: int) -> "EngineStats":
        ratios = {
            name: tuple(count + sign * more for count, more in zip(ratio, other.ratios.get(name, (0, 0)), strict=True))
            for name, ratio in self.ratios.items()
        }
        totals, steps = _add(self.totals, other.totals, sign), _add(self.steps, other.steps, sign)
        sums = _add(self.sums, other.sums, sign)
        return EngineStats(totals, steps, cast(dict[str, tuple[float, float]], ratios), self.gauges, sums)

    def _counts(self) -> dict[Any, float]:
        halves = {(name, half): ratio[half] for name, ratio in self.ratios.items() for half in (0, 1)}
        return {**self.totals, **self.steps, **self.sums, **halves}


def metrics_between(before: Sequence[EngineStats], now: Sequence[EngineStats]) -> dict[str, float]:
    """The metrics of what the replicas did between two readings of `RolloutEngine.stats`; `[]` is their start.

    A replica that counts steps and made none has no part in the means.
    """
    starts = [*before, *(EngineStats() for _ in now[len(before) :])]
    done = [stats.since(start) for start, stats in zip(starts, now, strict=False)]
    worked = [stats for stats in done if not stats.steps or any(stats.steps.values())]
    metrics: dict[str, float] = {}
    for stats in done:
        for name, value in (*stats.totals.items(), *stats.gauges.items()):
            metrics[name] = metrics.get(name, 0) + value
    means: dict[str, list[float]] = {}
    for stats in worked:
        quotients = {name: count / per if per else 0.0 for name, (count, per) in stats.ratios.items()}
        for name, value in (*stats.steps.items(), *quotients.items()):
            means.setdefault(name, []).append(value)
    return metrics | {name: sum(values) / len(values) for name, values in means.items()}


def _add(values: Counts, others: Counts, sign: int) -> dict[str, float]:
    return {name: value + sign * others.get(name, 0) for name, value in values.items()}


@dataclass
class SchedulerStatistics:
    """Sums of what vLLM's scheduler reports; they only grow."""

    generated_tokens: int = 0
    engine_steps: int = 0
    running: int = 0  # sums over engine steps
    waiting: int = 0
    cache_use: float = 0.0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0

    def record(self, scheduler: Any, iteration: Any) -> None:
        if scheduler is not None:
            self.engine_steps += 1
            self.running += scheduler.num_running_reqs
            self.waiting += scheduler.num_waiting_reqs
            self.cache_use += scheduler.kv_cache_usage
            self.prefix_queries += scheduler.prefix_cache_stats.queries
            self.prefix_hits += scheduler.prefix_cache_stats.hits
        if iteration is not None:
            self.preemptions += iteration.num_preempted_reqs

    def totals(self) -> EngineStats:
        """All of them; the tokens alone where vLLM reports nothing (`disable_log_stats=True`)."""
        totals: dict[str, float] = {"generated_tokens": self.generated_tokens}
        if not self.engine_steps:
            return EngineStats(totals)
        per_step = {name: (getattr(self, name), self.engine_steps) for name in ("running", "waiting", "cache_use")}
        return EngineStats(
            totals | {"preemptions": self.preemptions},
            {"engine_steps": self.engine_steps},
            per_step | {"prefix_cache_hit_rate": (self.prefix_hits, self.prefix_queries)},
        )


@dataclass
class Counters:
    """Sums since the start; they only grow."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    prompts_computed: int = 0
    requests: int = 0
    decode_steps: int = 0
    row_steps: int = 0
    cache_columns: int = 0
    model_s: float = 0.0
    sampling_s: float = 0.0
    scheduling_s: float = 0.0

    def add_prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prefill_tokens += sum(map(len, prompts))
        self.prompts_computed += len(prompts)

    def add_decode(self, rows: int, columns: int) -> None:
        """A step of `rows` answers over as many cache columns each."""
        self.decode_steps += 1
        self.row_steps += rows
        self.cache_columns += rows * columns

    @contextmanager
    def timed_model(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.model_s += time.perf_counter() - started

    def add_sampled(self, tokens: int, seconds: float) -> None:
        self.generated_tokens += tokens
        self.sampling_s += seconds

    def add_scheduling(self, seconds: float, before: "Counters") -> None:
        """The part of the `seconds` since `before` that neither the model nor the sampling took."""
        self.scheduling_s += seconds - (self.model_s - before.model_s) - (self.sampling_s - before.sampling_s)

    def decoded_since(self, before: "Counters") -> tuple[int, int] | None:
        """(answers that ran, tokens in their caches) of the decode step since `before`; None if prompts came, too."""
        if self.decode_steps == before.decode_steps or self.prefill_tokens > before.prefill_tokens:
            return None
        return self.row_steps - before.row_steps, self.cache_columns - before.cache_columns


DECODE_SUMS = ("steps", "answers", "cached", "seconds", "cached*cached", "cached*seconds")


class DecodeTimes:
    """Sums over decode steps, by how many answers ran: of these, of the tokens that their caches hold, of the seconds
    that a step took, and of products of the last two. Keys of `sums` are `8:seconds`; 8 stands for 8 to 11 answers."""

    STALLED = 10  # times the mean: the machine did something else
    COLD = 8  # steps after new weights, which come from memory at first

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self._left_out = 0

    def new_weights(self) -> None:
        """Leave the next steps out."""
        self._left_out = self.COLD

    def record(self, answers: int, cached: int, seconds: float) -> None:
        """Add a step; one that takes far longer than those before it with as many answers is left out."""
        if self._left_out:
            self._left_out -= 1
            return
        octave = 1 << (answers.bit_length() - 1)
        size = octave if 2 * answers < 3 * octave else 3 * octave // 2  # 1, 2, 3, 4, 6, 8, 12, 16 ...
        count = self.sums.get(f"{size}:steps", 0.0)
        if count > 20 and seconds * count > self.STALLED * self.sums[f"{size}:seconds"]:
            return
        values = (1.0, answers, cached, seconds, cached * cached, cached * seconds)
        for name, value in zip(DECODE_SUMS, values, strict=True):
            self.sums[f"{size}:{name}"] = self.sums.get(f"{size}:{name}", 0.0) + value
