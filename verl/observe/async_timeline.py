"""The events of an asynchronous run as the geometry of a timeline: the trainer's lane, and the prompts under way."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.observe.events import EVENTS_FILE, read_events
from verl.observe.svg_curves import nice_ticks, tick_label

WIDTH, LEFT, ROW, TOP = 1000, 90, 7, 30  # pixels
MAX_STEPS, MAX_ROWS = 12, 80
_ENDS = ("answered", "evicted", "dropped")


@dataclass
class Bar:
    """A rectangle: from `x`, `width` wide, in `row` of its lane, for one version of the weights."""

    x: float
    width: float
    row: int
    version: int
    title: str

    @property
    def hue(self) -> int:
        """Degrees on the colour wheel; those of neighbouring versions are far apart."""
        return self.version * 137 % 360


@dataclass
class AsyncTimeline:
    """What the page draws. Times are seconds since the first event that is shown."""

    trainer: list[Bar] = field(default_factory=list)  # from the batch being complete to the publish
    prompts: list[Bar] = field(default_factory=list)  # one bar a prompt and version, from sent to complete
    x_ticks: list[tuple[float, str]] = field(default_factory=list)
    num_rows: int = 0
    num_hidden: int = 0  # prompts for which there were no rows

    @property
    def height(self) -> int:
        return TOP + 22 + ROW * self.num_rows + 26


@dataclass
class _Prompt:
    number: int
    start: float
    end: float | None = None
    how: str = "under way"


def read_timeline(folder: Path | None) -> AsyncTimeline | None:
    """The timeline of the last steps of the run in `folder`; None where it has written no events."""
    path = folder / EVENTS_FILE if folder is not None else None
    return draw_timeline(read_events(path)) if path is not None and path.is_file() else None


def draw_timeline(events: Sequence[dict[str, Any]], max_steps: int = MAX_STEPS) -> AsyncTimeline | None:
    """The last `max_steps` versions; None where nothing was published. After a resume, prompts that its checkpoint did
    not have end with the process that was lost."""
    publishes = [(e["time"], e["version"]) for e in events if e["event"] == "publish"]
    if not publishes:
        return None
    begin, end = publishes[-max_steps:][0][0], max(events[-1]["time"], publishes[-max_steps:][0][0] + 1e-6)
    scale = (WIDTH - LEFT) / (end - begin)
    out = AsyncTimeline()
    for start, stop, version, groups in _trainings(events):
        if stop > begin:
            x = max(start, begin)
            title = f"trains version {version} on {groups} prompts, {stop - start:.2f} s"
            out.trainer.append(Bar(LEFT + (x - begin) * scale, (stop - x) * scale, 0, version, title))
    free: list[float] = []  # by row: when its last prompt ended
    for prompt in _prompts(events):
        stop = end if prompt.end is None else prompt.end
        if stop <= begin:
            continue
        row = next((row for row, until in enumerate(free) if until <= prompt.start), len(free))
        if row >= MAX_ROWS:
            out.num_hidden += 1
            continue
        free[row : row + 1] = [stop]
        for start, until, version in _by_version(max(prompt.start, begin), stop, publishes):
            title = f"prompt {prompt.number}: version {version}, {prompt.how}"
            out.prompts.append(Bar(LEFT + (start - begin) * scale, (until - start) * scale, row, version, title))
    out.num_rows = len(free)
    ticks = [tick for tick in nice_ticks(0.0, end - begin) if 0 <= tick <= end - begin]
    out.x_ticks = [(LEFT + tick * scale, f"{tick_label(tick)} s") for tick in ticks]
    return out


def _trainings(events: Sequence[dict[str, Any]]) -> list[tuple[float, float, int, int]]:
    """(from, to, version at its start, prompts) of each training: from its first batch to the next publish."""
    out, since, version, count = [], None, 0, 0
    for event in events:
        if event["event"] == "take":
            since, version = event["time"] if since is None else since, event["version"]
            count += len(event["groups"])
        elif event["event"] in ("publish", "resumed"):
            if event["event"] == "publish" and since is not None:
                out.append((since, event["time"], version, count))
            since, count = None, 0
    return out


def _prompts(events: Sequence[dict[str, Any]]) -> list[_Prompt]:
    """All prompts in the order in which they were sent."""
    under_way: dict[int, _Prompt] = {}
    out: list[_Prompt] = []
    last = events[0]["time"] if events else 0.0
    for event in events:
        if event["event"] == "admitted":
            out.append(_Prompt(event["group"], event["time"]))
            under_way[event["group"]] = out[-1]
        elif event["event"] in _ENDS and (prompt := under_way.pop(event["group"], None)) is not None:
            prompt.end, prompt.how = event["time"], _how(event)
        elif event["event"] == "resumed":
            for number in under_way.keys() - set(event["groups"]):
                prompt = under_way.pop(number)
                prompt.end, prompt.how = last, "lost with its process"
        last = event["time"]
    return out


def _how(event: dict[str, Any]) -> str:
    """How a prompt ended, in words; tokens by version of its longest answer."""
    if event["event"] != "answered":
        return str(event.get("reason", event["event"]))
    answers: list[list[list[int]]] = event["segments"]
    longest = max(answers, key=lambda parts: sum(count for _, count in parts), default=[])
    return "tokens " + ", ".join(f"{count} by {version}" for version, count in longest)


def _by_version(start: float, end: float, publishes: Sequence[tuple[float, int]]) -> list[tuple[float, float, int]]:
    """(from, to, version) of the pieces of a time span between publishes."""
    later = [*publishes[1:], (end + 1.0, -1)]
    spans = [(max(at, start), min(to, end), v) for (at, v), (to, _) in zip(publishes, later, strict=True)]
    return [span for span in spans if span[1] > span[0]]
