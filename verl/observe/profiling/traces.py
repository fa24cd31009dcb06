"""Trace files: what torch's profiler exports, with the driver's stages in a lane of their own."""

import gzip
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

Slice = tuple[str, int, int]  # name, and when it began and ended, in ns since the epoch
DRIVER_LANE = 1  # process id of the lane, which no rank has
_HEAD_BYTES = 1 << 20  # the events begin before


def lane_events(slices: Sequence[Slice], base_ns: int) -> list[dict[str, object]]:
    """The driver's lane as events of a trace whose times count from `base_ns`."""
    place = {"pid": DRIVER_LANE, "tid": DRIVER_LANE}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", **place, "args": {"name": "driver"}},
        {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": -1}},
        {"ph": "M", "name": "thread_name", **place, "args": {"name": "stages of the step"}},
    ]
    for name, start, end in slices:
        times = {"ts": (start - base_ns) / 1000, "dur": (end - start) / 1000}
        events.append({"ph": "X", "cat": "stage", "name": name, **place, **times})
    return events


def move_trace(exported: Path, target: Path, slices: Sequence[Slice]) -> None:
    """Compress the trace `exported` into `target`, which Perfetto opens, with the driver's lane; removes `exported`.

    The events are copied, not read: a trace can have gigabytes.
    """
    with exported.open("rb") as source, gzip.open(target, "wb", compresslevel=3) as out:
        head = source.read(_HEAD_BYTES)
        base, begin = re.search(rb'"baseTimeNanoseconds": (\d+)', head), re.search(rb'"traceEvents": \[', head)
        if begin is not None:
            events = lane_events(slices, int(base[1]) if base else 0)
            out.write(head[: begin.end()] + json.dumps(events)[1:-1].encode() + b",")
            head = head[begin.end() :]
        out.write(head)
        shutil.copyfileobj(source, out)
    exported.unlink()
