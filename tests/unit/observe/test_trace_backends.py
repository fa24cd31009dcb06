"""Weave and Trackio, which are not installed here: their calls against signatures of the packages, which are compared
with the real ones where they are. Every backend refuses to start without its package."""

import datetime
import importlib
import inspect
import sys
import types
from typing import Any, ClassVar

import pytest

from verl.observe.tracing.backends import TRACE_BACKENDS, check_trace_backend
from verl.observe.tracing.spans import CONVERSATION, GENERATION, TOOL, Span
from verl.observe.tracing.writer import TraceWriter
from verl.observe.trackers import RunInfo
from verl.plugin.installed import has_module
from verl.utils.errors import ConfigError


class WeaveClient:
    """Weave 0.54's, as far as it is called."""

    calls: ClassVar[list[tuple[Any, ...]]] = []

    def create_call(
        self, op, inputs, parent=None, attributes=None, display_name=None, *, use_stack=True, _call_id_override=None,
        started_at=None,
    ):  # fmt: skip
        self.calls.append(("create", op, inputs, parent, attributes, use_stack, started_at))
        return f"call {op}"

    def finish_call(self, call, output=None, exception=None, *, op=None, ended_at=None):
        self.calls.append(("finish", call, output, exception, ended_at))

    def flush(self):
        self.calls.append(("flush",))


def weave_init(
    project_name, *, settings=None, autopatch_settings=None, postprocess_inputs=None, postprocess_output=None,
    attributes=None, global_postprocess_inputs=None, global_postprocess_output=None, global_attributes=None,
):  # fmt: skip
    WeaveClient.calls.append(("init", project_name))
    return WeaveClient()


class TrackioTrace:
    """Trackio 0.43's."""

    def __init__(self, messages, metadata=None, spans=None):
        self.messages, self.metadata, self.spans = messages, metadata, spans


class TrackioRun:
    logged: ClassVar[list[tuple[Any, int | None]]] = []

    def log(self, metrics, step=None):
        self.logged.append((metrics["trace"], step))

    def finish(self):
        self.logged.append((None, None))


def trackio_init(
    project, name=None, group=None, space_id=None, server_url=None, dataset_id=None, bucket_id=None, config=None,
    resume="never", settings=None, private=None, embed=True, auto_log_gpu=None, gpu_log_interval=10.0,
    auto_log_cpu=None, cpu_log_interval=10.0, webhook_url=None, webhook_min_level=None,
):  # fmt: skip
    assert resume == "allow"  # a run that goes on is the same
    return TrackioRun()


def trace() -> Span:
    second = 1_000_000_000
    turn = Span("generate", GENERATION, {"prompt_tokens": 9}, {"text": "<call>"}, {"sampled_tokens": 4}, 0, second)
    tool = Span("add", TOOL, {"arguments": "{}"}, {"response": "5"}, {}, second, 2 * second, "DataError: no")
    root = Span("tool_agent", CONVERSATION, {"prompt": [{"role": "user", "content": "2+3?"}]}, {"reward": 1.0})
    root.start_ns, root.end_ns, root.attributes, root.children = 0, 3 * second, {"step": 4}, [turn, tool]
    return root


def write(name: str, monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)
    said: list[str] = []
    writer = TraceWriter(name, TRACE_BACKENDS[name], RunInfo("proj", "exp"), said.append)
    writer.put(trace())
    writer.close()
    assert said == [] and writer.num_written == 1


def test_weave_gets_nested_calls_with_their_times(monkeypatch):
    monkeypatch.setenv("WANDB_ENTITY", "team")
    monkeypatch.setattr(WeaveClient, "calls", [])
    write("weave", monkeypatch, init=weave_init)
    init, root, turn, _, tool, end_of_tool, end, flush = WeaveClient.calls
    assert init == ("init", "team/proj") and flush == ("flush",)
    assert root[1:4] == ("tool_agent", {"prompt": [{"role": "user", "content": "2+3?"}]}, None)
    assert root[4] == {"kind": "conversation", "experiment": "exp", "step": 4}
    assert turn[1:4] == ("generate", {"prompt_tokens": 9}, "call tool_agent") and tool[3] == "call tool_agent"
    assert not root[5], "the stack of the thread is left alone"
    assert str(end_of_tool[3]) == "DataError: no" and end[2] == {"reward": 1.0}
    assert end[4] - root[6] == datetime.timedelta(seconds=3)


def test_trackio_gets_the_conversation_and_its_spans(monkeypatch):
    monkeypatch.setattr(TrackioRun, "logged", [])
    write("trackio", monkeypatch, init=trackio_init, Trace=TrackioTrace)
    (logged, step), end = TrackioRun.logged
    assert step == 4 and end == (None, None)
    assert [m["role"] for m in logged.messages] == ["user", "assistant", "tool"]
    assert logged.metadata == {"step": 4, "reward": 1.0, "status": "ok"}
    assert [(s["id"], s["parent_id"], s["kind"]) for s in logged.spans] == [
        ("0", None, "span"), ("1", "0", "generation"), ("2", "0", "tool"),
    ]  # fmt: skip
    assert logged.spans[1]["usage"] == {"input_tokens": 9, "output_tokens": 4}
    assert logged.spans[2]["error"] == "DataError: no" and logged.spans[2]["duration_ms"] == 1000


@pytest.mark.parametrize(
    ("module", "name", "ours"),
    [
        ("weave", "init", weave_init),
        ("weave.trace.weave_client", "WeaveClient.create_call", WeaveClient.create_call),
        ("weave.trace.weave_client", "WeaveClient.finish_call", WeaveClient.finish_call),
        ("trackio", "init", trackio_init),
        ("trackio", "Trace.__init__", TrackioTrace.__init__),
        ("trackio", "Run.log", TrackioRun.log),
    ],
)
def test_what_is_called_is_there_in_an_installed_package(module, name, ours):
    if not has_module(module):
        assert set(inspect.signature(ours).parameters) - {"self"}  # what the tests above check the calls against
        return
    real: Any = importlib.import_module(module)
    for part in name.split("."):
        real = getattr(real, part)
    assert list(inspect.signature(real).parameters) == list(inspect.signature(ours).parameters)


@pytest.mark.parametrize(
    ("name", "module", "advice"),
    [
        ("mlflow", "mlflow", r"\[trackers\]"),
        ("weave", "weave", "pip install weave"),
        ("trackio", "trackio", "pip install trackio"),
        ("opentelemetry", "opentelemetry.exporter.otlp.proto.http", r"\[traces\]"),
    ],
)
def test_a_backend_without_its_package_is_refused_with_what_to_install(name, module, advice, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ConfigError, match=f"trace.backend={name} needs a package.*{advice}"):
        check_trace_backend(name)
    check_trace_backend(None)
