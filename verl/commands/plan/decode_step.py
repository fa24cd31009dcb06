"""The time of a decode step: from an engine's own records, or from how long the answers of a step took."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from verl.commands.plan.observed_steps import ObservedRun, ObservedStep
from verl.commands.plan.schedule_simulation import Costs, decode_steps, generate, line
from verl.workers.rollout.engine_stats import DECODE_SUMS, Counts

FEW_STEPS = 5  # decode steps with as many answers; fewer say little


@dataclass(frozen=True)
class DecodeStep:
    """Seconds of a decode step by the answers running on a device: `points`, straight lines between them and beyond the
    last; and `per_token_s` x tokens in their caches."""

    points: tuple[tuple[float, float], ...]
    error: float  # largest difference from an observed generation, as a share of it
    squares: float  # sum of the squared differences, s^2
    per_token_s: float = 0.0
    begin_s: float = 0.0  # of each answer beside its decode steps

    @property
    def base_s(self) -> float:
        """Seconds of a step besides its answers, if one line describes it."""
        return self.points[0][1]

    @property
    def per_answer_s(self) -> float:
        """Seconds that each answer adds, if one line describes it."""
        (first, first_s), (last, last_s) = self.points[0], self.points[-1]
        return (last_s - first_s) / (last - first)

    def text(self) -> str:
        """`2 ms + 0.1 ms x answers`, or `2.2 ms with 1 answer, 3 ms with 8 + 0.5 us x cached tokens`."""
        if self.points[0][0] == 0:
            return f"{self.base_s * 1e3:.3g} ms + {self.per_answer_s * 1e3:.3g} ms x answers"
        shown = self.points[:: -(-len(self.points) // 4)]
        times = ", ".join(f"{seconds * 1e3:.3g} ms with {answers:.0f}" for answers, seconds in shown)
        return f"{times} answers + {self.per_token_s * 1e6:.3g} us x cached tokens"


def find_decode_steps(run: ObservedRun, costs: Costs) -> list[DecodeStep]:
    """The engine's own measurements, if it records them; else each decode step that explains how long generation took.

    `costs`: what is known of the run beside it. Two where the engine always had nearly as many answers: more of them
    may take as much longer, or no longer.
    """
    points, per_token_s = measured(run.decode_times or {})
    if not points:
        return fit_decode_step(run.steps, run.devices, costs.max_running)
    answers, seconds = points[-1]
    if answers < 2 * points[0][0]:
        return [_measured(run, costs, p, per_token_s) for p in (line(0.0, seconds / answers), line(seconds, 0.0))]
    return [_measured(run, costs, points, per_token_s)]


def _measured(
    run: ObservedRun, costs: Costs, points: tuple[tuple[float, float], ...], per_token_s: float
) -> DecodeStep:
    """With what is left of the observed generation for each answer."""
    costs = replace(costs, decode_s=points, per_token_s=per_token_s, begin_s=0.0)
    decoding = np.array([generate(step.groups, costs, run.devices).now for step in run.steps])
    answers = np.array([sum(map(len, step.groups)) for step in run.steps]) / run.devices
    times = np.array([step.generation_s for step in run.steps])
    begin_s = max(0.0, float((times - decoding).sum() / answers.sum()))
    off = np.abs(decoding + begin_s * answers - times)
    return DecodeStep(points, float((off / times).max()), float(off @ off), per_token_s, begin_s)


def measured(sums: Counts) -> tuple[tuple[tuple[float, float], ...], float]:
    """`points` and `per_token_s` of what `DecodeTimes` has summed; no points where it has little.

    Among steps with as many answers, least squares say what a cached token takes: a line for each number of answers,
    all with the same slope.
    """
    sizes = {name.split(":")[0] for name in sums}
    rows = [[sums[f"{size}:{name}"] for name in DECODE_SUMS] for size in sorted(sizes, key=int)]
    table = np.array([row for row in rows if row[0] >= FEW_STEPS])
    if not len(table):
        return (), 0.0
    steps, answers, cached, seconds, squares, products = table.T
    spread = float((squares - cached**2 / steps).sum())
    slope = max(0.0, float((products - cached * seconds / steps).sum()) / spread) if spread > 0 else 0.0
    times = (seconds - slope * cached) / steps
    return tuple((float(n), float(s)) for n, s in zip(answers / steps, times, strict=True)), slope


def fit_decode_step(steps: Sequence[ObservedStep], devices: int, max_running: float) -> list[DecodeStep]:
    """The decode step that explains `generation_s` best, by least squares with neither part below 0.

    Two where the steps are too alike, or too noisy, to exclude that all of it is `per_answer_s`, or all of it `base_s`
    (an F-test with a bound of 4): the ends of what is possible, the former first.
    """
    counts = [
        (decode_steps(step.groups, max_running * devices), sum(map(sum, step.groups)) / devices) for step in steps
    ]
    columns, times = np.array(counts), np.array([step.generation_s for step in steps])
    ends = [_one_part(columns, times, 1), _one_part(columns, times, 0)]
    both, *_ = np.linalg.lstsq(columns, times, rcond=None)
    inside = [] if (both < 0).any() else [_decode_step(columns, times, float(both[0]), float(both[1]))]
    best = min([*inside, *ends], key=lambda fit: fit.squares)
    noise = max(best.squares, 1e-12 * float(times @ times)) / (len(times) - 2)
    all_each, all_base = (end.squares - best.squares <= 4 * noise for end in ends)
    if not all_each and not all_base:
        return [best]
    found = [ends[0] if all_each else best, ends[1] if all_base else best]
    return found if found[0] != found[1] else found[:1]


def _one_part(columns: np.ndarray, times: np.ndarray, part: int) -> DecodeStep:
    """The best fit with one of the two alone: base_s (0) or per_answer_s (1)."""
    column = columns[:, part]
    value = float(column @ times / max(column @ column, 1e-12))
    return _decode_step(columns, times, *((value, 0.0) if part == 0 else (0.0, value)))


def _decode_step(columns: np.ndarray, times: np.ndarray, base_s: float, per_answer_s: float) -> DecodeStep:
    off = np.abs(columns @ np.array([base_s, per_answer_s]) - times)
    return DecodeStep(line(base_s, per_answer_s), float((off / np.maximum(times, 1e-12)).max()), float(off @ off))
