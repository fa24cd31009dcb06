"""A small trace, and a process that sends it to a backend beside a tracker of the same library."""

import sys

from verl.observe.tracing.backends import TRACE_BACKENDS
from verl.observe.tracing.spans import CONVERSATION, GENERATION, TOOL, Span
from verl.observe.tracing.writer import TraceWriter
from verl.observe.trackers import RunInfo
from verl.observe.tracking import Tracking

SECOND_NS = 1_000_000_000


def trace() -> Span:
    """A turn that calls a tool, which fails; three seconds."""
    turn = Span("generate", GENERATION, {"prompt_tokens": 9}, {"text": "<call>"}, {"sampled_tokens": 4}, 0, SECOND_NS)
    tool = Span("add", TOOL, {"arguments": "{}"}, {"response": "5"}, {}, SECOND_NS, 2 * SECOND_NS, "DataError: no")
    root = Span("tool_agent", CONVERSATION, {"prompt": [{"role": "user", "content": "2+3?"}]}, {"reward": 1.0})
    root.start_ns, root.end_ns, root.attributes, root.children = 0, 3 * SECOND_NS, {"step": 4}, [turn, tool]
    return root


def write(name: str) -> None:
    """Send the trace; AssertionError where something was said or not written."""
    said: list[str] = []
    writer = TraceWriter(name, TRACE_BACKENDS[name], RunInfo("proj", "exp"), said.append)
    writer.put(trace())
    writer.close()
    assert said == [] and writer.num_written == 1, said


if __name__ == "__main__":
    with Tracking("proj", "exp", sys.argv[1]) as tracking:
        tracking.log({"x": 1.0}, 1)
        write(sys.argv[1])
        tracking.log({"x": 2.0}, 2)
