"""One live line about a run: step, stage and how far it is, reward, tokens per second, time left."""

import io
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

REWARD_NAMES = ("critic/score/mean", "critic/rewards/mean")
LOSS_NAMES = ("train/loss", "actor/pg_loss")
THROUGHPUT_NAMES = ("perf/throughput", "train/perf/throughput")
STAGE_WORDS = {
    "gen": "generating",
    "reward": "scoring",
    "old_log_prob": "evaluating log-probs",
    "ref": "evaluating the reference",
    "values": "evaluating values",
    "adv": "computing advantages",
    "update": "updating",
    "update_actor": "updating",
    "update_critic": "updating the critic",
    "update_weights": "publishing weights",
    "testing": "validating",
    "save_checkpoint": "saving",
}
BAR_WIDTHS = (6, 24)  # columns of the bar: the narrowest that is drawn, the widest
HEARTBEAT_S = 1.0  # how often at the least a thread looks whether a plain line is due, while a stage is long


class Silence:
    """Displays nothing."""

    def show(self, progress: "Progress", force: bool) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class ProgressDisplay(Protocol):
    """Displays the state of a Progress."""

    def show(self, progress: "Progress", force: bool) -> None: ...
    def close(self) -> None: ...


class Progress:
    """Progress of a run of `total_steps`: on a terminal a line redrawn in place, otherwise a line every `interval_s`.

    Call `begin(total_steps, step)` where the number of steps becomes known after the start, `stage(name)` when a stage
    begins (StageTimer does so through `on_enter`), `count("3 of 8 answers")` as it advances, and `step(step, metrics)`
    when a step is done. From its first stage on, a step is the one in progress, and its number is shown. Time left is
    the mean time of the last 20 steps times the number of remaining steps; "over", once a step takes longer than that.

    >>> with Progress(total_steps=10) as progress:
    ...     progress.stage("gen")
    ...     progress.step(1, {"critic/score/mean": 0.25, "perf/throughput": 900.0})
    """

    def __init__(
        self,
        total_steps: int = 0,
        start_step: int = 0,
        stream: TextIO | None = None,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total_steps = total_steps
        self.current_step = start_step  # the last that is done
        self.in_step = False
        self.stage_name = self.counted = ""
        self.reward: float | None = None
        self.loss: float | None = None
        self.tokens_per_s: float | None = None
        self.clock = clock
        self.start_time = clock()
        self._step_ends: deque[float] = deque([self.start_time], maxlen=21)
        stream = stream or sys.stderr
        self.display: ProgressDisplay = RichLine(stream) if is_live_terminal(stream) else PlainLines(stream, interval_s)

    @classmethod
    def silent(cls) -> "Progress":
        """Progress that nobody sees."""
        progress = cls(stream=io.StringIO())
        progress.display = Silence()
        return progress

    def begin(self, total_steps: int, start_step: int) -> None:
        """The steps begin: `start_step` of `total_steps` are done."""
        self.total_steps, self.current_step = total_steps, start_step
        self._step_ends = deque([self.clock()], maxlen=21)
        self.stage("starting")

    def stage(self, name: str) -> None:
        """Stage `name` begins, of the next step or before the first."""
        self.in_step = True
        if name != "step":
            self.stage_name, self.counted = STAGE_WORDS.get(name, name), ""
        self.display.show(self, force=False)

    def count(self, text: str) -> None:
        """How far the stage is."""
        self.counted = text
        self.display.show(self, force=False)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` is done, with these metrics."""
        self.current_step, self.in_step = step, False
        self._step_ends.append(self.clock())
        self.reward = first_available(metrics, REWARD_NAMES, self.reward)
        self.loss = first_available(metrics, LOSS_NAMES, self.loss)
        self.tokens_per_s = first_available(metrics, THROUGHPUT_NAMES, self.tokens_per_s)
        self.display.show(self, force=step >= self.total_steps)

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the end; None before the first step is done, and once the last step is overdue."""
        steps_left = self.total_steps - self.current_step
        if (per_step := self._seconds_per_step()) is None or (steps_left == 1 and self.is_overdue):
            return None
        since = self.clock() - self._step_ends[-1]
        later = max(per_step, (self._step_ends[-1] - self._step_ends[0] + since) / len(self._step_ends))
        return max(0.0, per_step - since) + later * (steps_left - 1) if steps_left > 0 else 0.0

    @property
    def is_overdue(self) -> bool:
        """Whether the step in progress already takes longer than the steps before it: time left is a lower bound."""
        per_step = self._seconds_per_step()
        return per_step is not None and self.clock() - self._step_ends[-1] > per_step

    def _seconds_per_step(self) -> float | None:
        steps = len(self._step_ends) - 1
        return (self._step_ends[-1] - self._step_ends[0]) / steps if steps else None

    def describe(self, width: int = sys.maxsize) -> str:
        """The text of the line, in `width` columns: tokens per second go first, the step and time left stay whole."""
        parts: dict[str, str] = {}
        if self.total_steps:
            parts["step"] = f"step {min(self.current_step + self.in_step, self.total_steps)}/{self.total_steps}"
        if self.stage_name:
            parts["stage"] = f"{self.stage_name} {self.counted}".rstrip()
        if self.reward is not None:
            parts["reward"] = f"reward {self.reward:.3f}"
        elif self.loss is not None:
            parts["reward"] = f"loss {self.loss:.4f}"
        if self.tokens_per_s is not None:
            parts["speed"] = f"{self.tokens_per_s:,.0f} tokens/s"
        parts["so far"] = f"{format_duration(self.clock() - self.start_time)} so far"
        if (left := self.seconds_left) is not None:
            bound = "over " if self.is_overdue and left else ""
            parts["left"] = f"{bound}{format_duration(left)} left"
        for name in ("speed", "so far", "reward"):
            if len(" | ".join(parts.values())) > width:
                parts.pop(name, None)
        if (excess := len(" | ".join(parts.values())) - width) > 0 and "stage" in parts:
            parts["stage"] = parts["stage"][: max(0, len(parts["stage"]) - excess - 1)] + "…"
        return " | ".join(parts.values())

    def close(self) -> None:
        """Stop the display and restore the terminal."""
        self.display.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class PlainLines:
    """At most one line every `interval_s`, also inside a long stage: for log files, pipes and dumb terminals."""

    def __init__(self, stream: TextIO, interval_s: float):
        self.stream, self.interval_s = stream, interval_s
        self._last: float | None = None
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def show(self, progress: Progress, force: bool) -> None:
        now = progress.clock()
        with self._lock:
            if self._thread is None:
                self._last = progress.start_time
                self._thread = threading.Thread(target=self._beat, args=(progress,), name="progress", daemon=True)
                self._thread.start()
            if not (force or now - (self._last or 0.0) >= self.interval_s):
                return
            self._last = now
            print(progress.describe(), file=self.stream, flush=True)

    def _beat(self, progress: Progress) -> None:
        due = 0.0
        while not self._closed.wait(min(HEARTBEAT_S, max(0.01, due))):
            self.show(progress, force=False)
            due = (self._last or 0.0) + self.interval_s - progress.clock()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()


class RichLine:
    """A bar and the line, redrawn in place while other output scrolls above it."""

    def __init__(self, stream: TextIO):
        from rich.console import Console
        from rich.progress import Progress as RichProgress

        # rich redirects sys.stdout to print above the bar; a stdout that goes to a file must not be redirected
        self._console = console = Console(file=stream, soft_wrap=True)  # a long path stays whole, to be copied
        columns, to_terminal = live_columns(console), sys.stdout.isatty()
        self._bar = RichProgress(
            *columns, console=console, transient=True, refresh_per_second=2, redirect_stdout=to_terminal
        )
        self._task: Any = None

    def show(self, progress: Progress, force: bool) -> None:
        if self._task is None:
            self._task = self._bar.add_task("", total=None, line=progress.describe)
            self._bar.start()
        total = progress.total_steps or None  # a bar without an end moves to and fro
        self._bar.update(self._task, total=total, completed=progress.current_step)

    def close(self) -> None:
        self._bar.stop()


def live_columns(console: Any) -> list[Any]:
    """Spinner, bar (as wide as the line leaves room), and the line, computed at every redraw so that times advance."""
    from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task
    from rich.text import Text

    class LineColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(task.fields["line"](console.width - 3), overflow="ellipsis", no_wrap=True)

    class FittingBar(ProgressColumn):
        def render(self, task: Task) -> Any:
            room = console.width - 4 - len(task.fields["line"]())  # one column more, for a time that grows meanwhile
            return BarColumn(bar_width=min(room, BAR_WIDTHS[1])).render(task) if room >= BAR_WIDTHS[0] else Text("")

    return [SpinnerColumn(), FittingBar(), LineColumn()]


def is_live_terminal(stream: TextIO) -> bool:
    """Whether lines can be redrawn in place on `stream`."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def first_available(metrics: Mapping[str, float], names: tuple[str, ...], default: float | None) -> float | None:
    return next((metrics[name] for name in names if name in metrics), default)


def format_duration(seconds: float) -> str:
    """75 -> '1m15s': the two largest units."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
