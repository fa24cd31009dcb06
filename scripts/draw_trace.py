"""Draw docs/pictures/trace.svg: the stages of a profiled step, and where the time of the longest ones goes.

Run as `python -m scripts.draw_trace TRACE [PICTURE]` with a trace that `global_profiler.tool=torch` wrote
(docs/see/profiling.md says how); not part of `make docs`.
"""

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from scripts.draw_architecture import PICTURES, WIDTH, box, picture, text

LEFT, RIGHT, ROW, TOP = 150, 24, 30, 84
NUM_OPERATORS, MILLISECONDS = 5, 1e3
Event = dict[str, Any]


def read_trace(path: Path) -> list[Event]:
    """The complete events of a trace, in order of time, those around others first."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"]))


def own_times(events: list[Event]) -> Counter[str]:
    """Microseconds of each operator without those that it calls."""
    found: Counter[str] = Counter()
    open_by_thread: dict[Any, list[Event]] = {}
    for event in events:
        stack = open_by_thread.setdefault(event["tid"], [])
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            stack.pop()
        if stack:
            found[stack[-1]["name"]] -= event["dur"]
        found[event["name"]] += event["dur"]
        stack.append(event)
    return found


def depths(slices: list[Event]) -> list[int]:
    """How many slices are around each."""
    return [sum(o["ts"] <= e["ts"] and e["ts"] + e["dur"] <= o["ts"] + o["dur"] for o in slices) - 1 for e in slices]


def draw(events: list[Event], source: str) -> str:
    """The picture of one trace."""
    lane = [e for e in events if e.get("cat") == "stage"]
    names = {e["name"] for e in lane}
    on_rank = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in names]
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    start, whole = lane[0]["ts"], lane[0]["dur"]
    scale = (WIDTH - LEFT - RIGHT) / whole
    parts = [text(20, 34, "One step of the quickstart", "title"), text(20, 56, source, "faint small")]
    y = TOP
    for label, slices in (("driver", lane), ("rank 0, stages", on_rank)):
        parts.append(text(20, y + 19, label, "name"))
        levels = depths(slices)
        for e, depth in zip(slices, levels, strict=True):
            x, width = LEFT + (e["ts"] - start) * scale, max(1.0, e["dur"] * scale)
            parts.append(box(x, y + depth * ROW, width, ROW - 4, "room", 3))
            words = f"{e['name']} {e['dur'] / MILLISECONDS:,.0f} ms"
            if width > 8 * len(words):
                parts.append(text(x + 6, y + depth * ROW + 18, words, "small"))
        y += (max(levels) + 1) * ROW + 12
    parts.append(text(20, y + 19, "operators", "name"))
    inside = [e for e in operators if start <= e["ts"] < start + whole]
    columns = [0.0] * (WIDTH - LEFT - RIGHT)
    for e, depth in zip(inside, outermost(inside), strict=True):
        if depth == 0:
            first = int((e["ts"] - start) * scale)
            for column in range(first, min(len(columns), int((e["ts"] + e["dur"] - start) * scale) + 1)):
                columns[column] = max(columns[column], min(1.0, e["dur"] * scale))
    parts += [box(LEFT + n, y + (ROW - 4) * (1 - v), 1, (ROW - 4) * v, "bar", 0) for n, v in enumerate(columns) if v]
    y += ROW + 24
    top = [e for e, depth in zip(lane, depths(lane), strict=True) if depth == 1]
    for stage in sorted(top, key=lambda e: -e["dur"])[:2]:
        parts.append(text(20, y, f"{stage['name']}: {stage['dur'] / whole:.0%} of the step; its operators", "name"))
        within = [e for e in operators if stage["ts"] <= e["ts"] < stage["ts"] + stage["dur"]]
        for name, micros in own_times(within).most_common(NUM_OPERATORS):
            y += 24
            parts.append(text(20, y, name.removeprefix("aten::")[:44], "small"))
            parts.append(box(330, y - 12, max(1.0, micros / stage["dur"] * 400), 14, "bar", 2))
            parts.append(text(740, y, f"{micros / stage['dur']:.0%} of the stage", "faint small"))
        y += 36
    return picture(y, "The stages of one training step over time, and the operators of the two longest", parts)


def outermost(operators: list[Event]) -> list[int]:
    """0 for an operator that no other one of its thread calls, 1 for the others."""
    ends: dict[Any, float] = {}
    found = []
    for e in operators:
        found.append(int(e["ts"] < ends.get(e["tid"], 0.0)))
        ends[e["tid"]] = max(ends.get(e["tid"], 0.0), e["ts"] + e["dur"])
    return found


if __name__ == "__main__":
    trace = Path(sys.argv[1])
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else PICTURES / "trace.svg"
    where = f"{trace.parent.name}/{trace.name}, on two CPU cores that others used, too"
    target.write_text(draw(read_trace(trace), where))
