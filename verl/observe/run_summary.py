"""A run's results and where its time went, in a few lines."""

import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from verl.observe.progress import STAGE_WORDS, format_duration
from verl.observe.timers import BESIDE_STEP
from verl.observe.trackers import format_number, parse_metrics

ACCURACY = "rewards/accuracies"
SCORES = ("critic/score/mean", *(f"{part}/{name}" for part in ("train", "val") for name in ("loss", ACCURACY)))
_QUANTITIES = {"loss": "loss", "accuracies": "accuracy"}
_NUM_STAGES = 5
_NOT_STAGES = ("step", "agent_loop", *BESIDE_STEP)  # the whole, parts of other stages, and what is not in the whole


class RunSummary:
    """Best and last scores of the run, and the seconds of each stage of the steps that this process has done."""

    def __init__(self) -> None:
        self.start_time, self.is_empty = time.monotonic(), True
        self.num_steps = self.last_step = 0
        self.scores: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self.seconds: dict[str, float] = defaultdict(float)

    def add_earlier(self, metrics: Path | None) -> None:
        """Scores of the steps before a resume, as far as there is a metrics file that has them."""
        for record in parse_metrics(metrics).records if metrics and metrics.is_file() else ():
            self._add_scores(record["step"], record["data"])

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step, or of a validation at it."""
        self.is_empty = False
        self._add_scores(step, metrics)
        if "timing_s/step" in metrics:
            self.num_steps, self.last_step = self.num_steps + 1, step
        for name, value in metrics.items():
            stage = name.removeprefix("timing_s/")
            if stage != name and "/" not in stage and not stage.startswith(_NOT_STAGES):
                self.seconds[STAGE_WORDS.get(stage, stage)] += value
        self.seconds["the rest"] += metrics.get("timing_s/step", 0.0)

    def _add_scores(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if name.startswith("val-core/") or name in SCORES:
                self.scores[name].append((step, value))

    def lines(self, complete: bool) -> list[str]:
        """The summary of a run that did all its steps, or that stopped before; empty where nothing was done."""
        if self.is_empty or not self.scores:
            return []
        took = format_duration(time.monotonic() - self.start_time)
        state = "done" if complete else "stopped"
        lines = [f"{state:<12} {self.num_steps} steps in {took}, the last is step {self.last_step}"]
        for name, points in sorted(self.scores.items(), key=lambda item: not item[0].startswith("val")):
            text = _score(points[-1])
            if len(points) > 1:
                best = (min if name.endswith("loss") else max)(points, key=lambda point: point[1])
                text += f", best {_score(best)}, first {_score(points[0])}"
            lines.append(f"{_label(name)} {text} ({name})")
        if times := self._times():
            lines.append(f"time         {times}")
        return lines

    def _times(self) -> str:
        """The longest stages in percent of all steps; what was in none is the rest."""
        total = self.seconds["the rest"]
        if not total:
            return ""
        stages = {name: seconds for name, seconds in self.seconds.items() if name != "the rest"}
        longest = sorted(stages.items(), key=lambda item: -item[1])[:_NUM_STAGES]
        parts = [(name, seconds) for name, seconds in longest if seconds >= total / 100]
        rest = max(0.0, total - sum(seconds for _, seconds in parts))
        return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in [*parts, ("the rest", rest)])


def _label(name: str) -> str:
    """Where a score is from, and what it is."""
    quantity = "score" if name.startswith("val-core/") else _QUANTITIES.get(name.rpartition("/")[2], "reward")
    return f"{'validation' if name.startswith('val') else 'training':<12} {quantity}"


def _score(point: tuple[int, float]) -> str:
    step, value = point
    return f"{format_number(value)} {f'at step {step}' if step else 'before training'}"
