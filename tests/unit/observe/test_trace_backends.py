"""Trackio's own database, and Weave, which needs a server: its calls against the signatures of the package, which are
compared with the real ones where it is installed. Every backend refuses to start without its package."""

import datetime
import importlib
import inspect
import json
import os
import sqlite3
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.conftest import ROOT, import_or_skip
from tests.trace_cases import write
from verl.observe.tracing.backends import check_trace_backend
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


def test_weave_gets_nested_calls_with_their_times(monkeypatch):
    monkeypatch.setenv("WANDB_ENTITY", "team")
    monkeypatch.setattr(WeaveClient, "calls", [])
    module = types.ModuleType("weave")
    vars(module)["init"] = weave_init
    monkeypatch.setitem(sys.modules, "weave", module)
    write("weave")
    init, root, turn, _, tool, end_of_tool, end, flush = WeaveClient.calls
    assert init == ("init", "team/proj") and flush == ("flush",)
    assert root[1:4] == ("tool_agent", {"prompt": [{"role": "user", "content": "2+3?"}]}, None)
    assert root[4] == {"kind": "conversation", "experiment": "exp", "step": 4}
    assert turn[1:4] == ("generate", {"prompt_tokens": 9}, "call tool_agent") and tool[3] == "call tool_agent"
    assert not root[5], "the stack of the thread is left alone"
    assert str(end_of_tool[3]) == "DataError: no" and end[2] == {"reward": 1.0}
    assert end[4] - root[6] == datetime.timedelta(seconds=3)


def test_trackio_keeps_the_conversation_and_its_spans_beside_its_tracker(tmp_path: Path):
    import_or_skip("trackio")
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.trace_cases", "trackio"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    with sqlite3.connect(tmp_path / "proj.db") as database:
        found = database.execute("select run_name, step, messages, metadata, spans from traces").fetchall()
        metrics = database.execute("select step, metrics from metrics where run_name = 'exp' order by step").fetchall()
    assert [(step, json.loads(values)) for step, values in metrics] == [(1, {"x": 1.0}), (2, {"x": 2.0})]
    [(run, step, *parts)] = found
    messages, metadata, spans = map(json.loads, parts)
    assert (run, step) == ("exp-traces", 4) and [m["role"] for m in messages] == ["user", "assistant", "tool"]
    assert metadata == {"step": 4, "reward": 1.0, "status": "ok"}
    kinds = [(span["id"], span["parent_id"], span["kind"]) for span in spans]
    assert kinds == [("0", None, "span"), ("1", "0", "generation"), ("2", "0", "tool")]
    assert spans[1]["usage"] == {"input_tokens": 9, "output_tokens": 4}
    assert spans[2]["error"] == "DataError: no" and spans[2]["duration_ms"] == 1000


@pytest.mark.parametrize(
    ("module", "name", "ours"),
    [
        ("weave", "init", weave_init),
        ("weave.trace.weave_client", "WeaveClient.create_call", WeaveClient.create_call),
        ("weave.trace.weave_client", "WeaveClient.finish_call", WeaveClient.finish_call),
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
        ("opentelemetry", "opentelemetry.exporter.otlp.proto.http", r"\[traces\]"),
    ],
)
def test_a_backend_without_its_package_is_refused_with_what_to_install(name, module, advice, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ConfigError, match=f"trace.backend={name} needs a package.*{advice}"):
        check_trace_backend(name)
    check_trace_backend(None)


def test_weave_without_an_account_is_refused_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "weave", types.ModuleType("weave"))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="backend=weave has no account here: set WANDB_API_KEY"):
        check_trace_backend("weave")
    monkeypatch.setenv("WANDB_API_KEY", "k")
    check_trace_backend("weave")
