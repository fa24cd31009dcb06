"""The events of an asynchronous run as the geometry of a timeline: a lane for the trainer, and one for each replica."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.observe.events import EVENTS_FILE, read_events
from verl.observe.svg_curves import nice_ticks, tick_label

WIDTH, LEFT = 1000, 90  # pixels
TRAINER_TOP, TRAINER_HEIGHT, STAGE_HEIGHT, ROW, GAP, BOTTOM = 14, 16, 8, 7, 14, 26
MAX_STEPS, MAX_ROWS, MIN_ROWS, MAX_LANES = 12, 80, 10, 16  # rows of all lanes, and of one if there are many
MAX_ANSWERS = 8  # of a prompt, that its title tells of
_ENDS = ("answered", "evicted", "dropped")
_WHOLE = ("step",)  # stages that hold the others


@dataclass
class Bar:
    """A rectangle; `version` of the weights gives its colour, if it is not a pause or a stage."""

    x: float
    width: float
    y: float
    height: float
    title: str
    version: int = 0
    stage: int = 0  # its number in `AsyncTimeline.stage_names`

    @property
    def hue(self) -> int:
        """Degrees on the colour wheel; those of neighbouring versions are far apart."""
        return self.version * 137 % 360


@dataclass
class Lane:
    """A replica: what it samples, and when it is paused, over that."""

    name: str
    top: float
    height: float
    prompts: list[Bar]  # one bar a prompt and version
    pauses: list[Bar]


@dataclass
class AsyncTimeline:
    """The data of the page. Times are seconds since the first event that is shown."""

    trainer: list[Bar]  # from the batch being complete to the publish
    stages: list[Bar]
    stage_names: list[str]  # the longest in all first
    lanes: list[Lane]
    x_ticks: list[tuple[float, str]]
    height: float
    num_hidden: int  # bars for which there were no rows

    @property
    def prompts(self) -> list[Bar]:
        return [bar for lane in self.lanes for bar in lane.prompts]


@dataclass
class _Prompt:
    """A prompt, and when which replica had a request of it."""

    number: int
    start: float
    how: str = "under way"
    running: dict[int, float] = field(default_factory=dict)  # since when, by replica
    served: list[tuple[int, float, float]] = field(default_factory=list)  # replica, from, to

    def close(self, time: float, replica: int | None = None) -> None:
        """Closes the prompt's bar at the replica. With a single engine the bar covers the whole prompt."""
        if replica is None and not self.running and not self.served:
            self.running[0] = self.start
        for number in list(self.running) if replica is None else [replica]:
            if (since := self.running.pop(number, None)) is not None:
                self.served.append((number, since, time))

    def end(self, time: float, how: str) -> None:
        """Closes the bar at all replicas, for the reason `how`."""
        self.close(time)
        self.how = how


class _Scale:
    """Pixels of the time from `begin` to `end`."""

    def __init__(self, begin: float, end: float):
        self.begin, self.end, self.per_second = begin, end, (WIDTH - LEFT) / (end - begin)

    def shown(self, start: float, stop: float) -> bool:
        return stop > self.begin and start < self.end

    def bar(self, start: float, stop: float, y: float, height: float, title: str, **of_kind: int) -> Bar:
        start, stop = max(start, self.begin), min(stop, self.end)
        return Bar(self.x(start), (stop - start) * self.per_second, y, height, title, **of_kind)

    def x(self, time: float) -> float:
        return LEFT + (time - self.begin) * self.per_second


def read_timeline(folder: Path | None) -> AsyncTimeline | None:
    """The timeline of the last steps of the run in `folder`; None where it has written no events."""
    path = folder / EVENTS_FILE if folder is not None else None
    return draw_timeline(read_events(path)) if path is not None and path.is_file() else None


def draw_timeline(events: Sequence[dict[str, Any]], max_steps: int = MAX_STEPS) -> AsyncTimeline | None:
    """The last `max_steps` versions; None where nothing was published. After a resume, prompts that its checkpoint did
    not have end with the process that was lost."""
    published = [event for event in events if event["event"] == "publish"]
    if not published:
        return None
    begin = published[-max_steps:][0]["time"]
    scale = _Scale(begin, max(events[-1]["time"], begin + 1e-6))
    trainer = []
    for start, stop, version, groups in _trainings(events):
        if scale.shown(start, stop):
            title = f"trains version {version} on {groups} prompts, {stop - start:.2f} s"
            trainer.append(scale.bar(start, stop, TRAINER_TOP, TRAINER_HEIGHT, title, version=version))
    stage_names, stages = _draw_stages(events, scale)
    top = TRAINER_TOP + TRAINER_HEIGHT + (STAGE_HEIGHT + 1 if stages else 0)
    lanes, num_hidden = _draw_lanes(events, published, scale, top + GAP)
    ticks = [tick for tick in nice_ticks(0.0, scale.end - begin) if 0 <= tick <= scale.end - begin]
    x_ticks = [(scale.x(begin + tick), f"{tick_label(tick)} s") for tick in ticks]
    bottom = lanes[-1].top + lanes[-1].height if lanes else top + GAP
    return AsyncTimeline(trainer, stages, stage_names, lanes, x_ticks, bottom + BOTTOM, num_hidden)


def _draw_stages(events: Sequence[dict[str, Any]], scale: _Scale) -> tuple[list[str], list[Bar]]:
    """(names, bars) of the trainer's stages, below its bar."""
    spans = [span for event in events if event["event"] == "stages" for span in event["stages"]]
    spans = [(n, start, s) for n, start, s in spans if n not in _WHOLE and scale.shown(start, start + s)]
    seconds = defaultdict[str, float](float)
    for name, _, taken in spans:
        seconds[name] += taken
    names, y = sorted(seconds, key=lambda name: -seconds[name]), TRAINER_TOP + TRAINER_HEIGHT + 1
    bars = [
        scale.bar(start, start + taken, y, STAGE_HEIGHT, f"{name}, {taken:.3f} s", stage=names.index(name))
        for name, start, taken in spans
    ]
    return names, bars


def _draw_lanes(
    events: Sequence[dict[str, Any]], published: Sequence[dict[str, Any]], scale: _Scale, top: float
) -> tuple[list[Lane], int]:
    """A lane for each replica from `top` on, and for how many bars there were no rows."""
    served = [(span, prompt) for prompt in _prompts(events, scale.end) for span in prompt.served]
    served = [(span, prompt) for span, prompt in served if scale.shown(*span[1:])]
    replicas = sorted({replica for (replica, _, _), _ in served})
    lanes, num_hidden = list[Lane](), sum(replica not in replicas[:MAX_LANES] for (replica, _, _), _ in served)
    replicas = replicas[:MAX_LANES]
    max_rows = max(MIN_ROWS, MAX_ROWS // max(len(replicas), 1))
    versions = [(event["time"], event["version"]) for event in published]
    for replica in replicas:
        bars, free = list[Bar](), list[float]()  # by row: when its last prompt ended
        mine = sorted(
            ((start, stop, p) for (number, start, stop), p in served if number == replica), key=lambda s: s[0]
        )
        for start, stop, prompt in mine:
            row = next((row for row, until in enumerate(free) if until <= start), len(free))
            if row >= max_rows:
                num_hidden += 1
                continue
            free[row : row + 1] = [stop]
            for begin, end, version in _by_version(max(start, scale.begin), stop, versions):
                title = f"prompt {prompt.number}: version {version}, {prompt.how}"
                bars.append(scale.bar(begin, end, top + row * ROW, ROW - 1, title, version=version))
        height = ROW * len(free)
        pauses = [
            scale.bar(e["time"] - e["pause_s"], e["time"], top, height, _pause_title(e))
            for e in published
            if e.get("pause_s") and scale.shown(e["time"] - e["pause_s"], e["time"])
        ]
        lanes.append(Lane(f"replica {replica}", top, height, bars, pauses))
        top += height + GAP
    return lanes, num_hidden


def _pause_title(publish: dict[str, Any]) -> str:
    return f"paused for {publish['pause_s']:.3f} s, until version {publish['version']} is published"


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


def _prompts(events: Sequence[dict[str, Any]], end: float) -> list[_Prompt]:
    """All prompts in the order in which they were sent; what is under way is so until `end`."""
    under_way: dict[int, _Prompt] = {}
    out: list[_Prompt] = []
    last = events[0]["time"]
    for event in events:
        name, prompt = event["event"], under_way.get(event.get("group", -1))
        if name == "admitted":
            out.append(_Prompt(event["group"], event["time"]))
            under_way[event["group"]] = out[-1]
        elif name == "resumed":
            for number in under_way.keys() - set(event["groups"]):
                under_way.pop(number).end(last, "lost with its process")
            for each in under_way.values():
                if each.running:  # else it goes on at the only engine
                    each.close(last)
        elif prompt is not None and name == "sent":
            prompt.running.setdefault(event["replica"], event["time"])
        elif prompt is not None and name == "returned":
            prompt.close(event["time"], event["replica"])
        elif prompt is not None and name in _ENDS:
            prompt.end(event["time"], _how(event))
            del under_way[event["group"]]
        last = event["time"]
    for prompt in under_way.values():
        prompt.close(end)
    return out


def _how(event: dict[str, Any]) -> str:
    """How a prompt ended, in words; tokens of its answers by version, the longest answer first."""
    if event["event"] != "answered":
        return str(event.get("reason", event["event"]))
    answers: list[list[list[int]]] = event["segments"]
    longest = sorted(answers, key=lambda parts: -sum(count for _, count in parts))
    told = [", ".join(f"{count} by {version}" for version, count in parts) for parts in longest[:MAX_ANSWERS]]
    return "tokens " + "; ".join(told) + (f"; {len(longest) - MAX_ANSWERS} more" * (len(longest) > MAX_ANSWERS))


def _by_version(start: float, end: float, publishes: Sequence[tuple[float, int]]) -> Iterator[tuple[float, float, int]]:
    """(from, to, version) of the pieces of a time span between publishes."""
    later = [*publishes[1:], (end + 1.0, -1)]
    for (at, version), (to, _) in zip(publishes, later, strict=True):
        if (stop := min(to, end)) > (begin := max(at, start)):
            yield begin, stop, version
