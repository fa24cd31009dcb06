"""One small class per place where traces go. Each imports its own library only if a run uses it."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from verl.observe.tracing.spans import CALL, CONVERSATION, GENERATION, REWARD, TOOL, Span
from verl.observe.tracing.writer import TraceBackend
from verl.observe.tracker_checks import wandb_has_account
from verl.observe.trackers import RunInfo
from verl.plugin.installed import has_module
from verl.utils.errors import ConfigError

_MLFLOW_TYPES = {CONVERSATION: "AGENT", GENERATION: "LLM", TOOL: "TOOL", REWARD: "EVALUATOR", CALL: "UNKNOWN"}
_TRACKIO_KINDS = {GENERATION: "generation", TOOL: "tool"}
_OPERATIONS = {CONVERSATION: "invoke_agent", GENERATION: "generate_content", TOOL: "execute_tool"}


class MlflowTraces:
    """Traces of an experiment at $MLFLOW_TRACKING_URI, else in the local SQLite file ./mlruns/mlflow.db."""

    def __init__(self, run: RunInfo):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")  # this is a thread of its own already
        import mlflow

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            folder = Path("mlruns").absolute()
            folder.mkdir(exist_ok=True)
            uri = f"sqlite:///{folder}/mlflow.db"
        mlflow.set_tracking_uri(uri)
        client = mlflow.MlflowClient()
        found = client.get_experiment_by_name(run.project)
        self._mlflow, self._run = mlflow, run
        self._experiment = found.experiment_id if found else client.create_experiment(run.project)

    def write(self, root: Span) -> None:
        with raised_from_log("mlflow.tracing"):
            self._write(root, None)

    def _write(self, span: Span, parent: Any) -> None:
        of_trace: dict[str, Any] = {}
        if parent is None:
            tags = {"experiment": self._run.experiment, **{name: str(v) for name, v in span.attributes.items()}}
            of_trace = {"tags": tags, "experiment_id": self._experiment}
        written = self._mlflow.start_span_no_context(
            span.name,
            _MLFLOW_TYPES[span.kind],
            parent_span=parent,
            inputs=plain(span.inputs),
            attributes=plain(span.attributes),
            start_time_ns=span.start_ns,
            **of_trace,
        )
        for child in span.children:
            self._write(child, written)
        if span.error:
            written.record_exception(span.error)
        status = "ERROR" if span.error else "OK"
        written.end(outputs=plain(span.outputs), status=status, end_time_ns=span.end_ns)

    def close(self) -> None:
        self._mlflow.flush_trace_async_logging()


class OpenTelemetryTraces:
    """One export a trace: OTLP over HTTP, or the console; OTEL_* variables say where, as for any program."""

    def __init__(self, run: RunInfo):
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._exporter, self._good = _exporter(), SpanExportResult.SUCCESS
        facts = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "verl")}
        facts |= {"verl.project": run.project, "verl.experiment": run.experiment}
        self._tracer = TracerProvider(resource=Resource.create(facts)).get_tracer("verl")

    def write(self, root: Span) -> None:
        spans: list[Any] = []
        self._add(root, None, spans)
        if self._exporter.export(spans) is not self._good:
            raise RuntimeError("the exporter could not hand over the spans (see OTEL_EXPORTER_OTLP_ENDPOINT)")

    def _add(self, span: Span, context: Any, spans: list[Any]) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        attributes = {f"verl.{name}": _attribute(value) for name, value in span.attributes.items()}
        attributes |= {"input.value": to_json(span.inputs), "output.value": to_json(span.outputs)}
        if operation := _OPERATIONS.get(span.kind):
            attributes["gen_ai.operation.name"] = operation
        if span.kind == GENERATION:
            attributes["gen_ai.usage.input_tokens"] = span.inputs.get("prompt_tokens", 0)
            attributes["gen_ai.usage.output_tokens"] = span.attributes.get("sampled_tokens", 0)
        made = self._tracer.start_span(span.name, context, attributes=attributes, start_time=span.start_ns)
        for child in span.children:
            self._add(child, set_span_in_context(made), spans)
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error))
        made.end(span.end_ns)
        spans.append(made)

    def close(self) -> None:
        self._exporter.shutdown()


class WeaveTraces:
    """W&B Weave; the account is that of wandb."""

    def __init__(self, run: RunInfo):
        import weave

        entity = os.environ.get("WANDB_ENTITY")
        self._client = weave.init(f"{entity}/{run.project}" if entity else run.project)
        self._run = run

    def write(self, root: Span) -> None:
        self._write(root, None)

    def _write(self, span: Span, parent: Any) -> None:
        attributes = {"kind": span.kind, "experiment": self._run.experiment, **plain(span.attributes)}
        call = self._client.create_call(
            span.name, plain(span.inputs), parent, attributes, use_stack=False, started_at=_moment(span.start_ns)
        )
        for child in span.children:
            self._write(child, call)
        error = RuntimeError(span.error) if span.error else None
        self._client.finish_call(call, plain(span.outputs), error, ended_at=_moment(span.end_ns))

    def close(self) -> None:
        self._client.flush()


class TrackioTraces:
    """Trackio, a local database below $TRACKIO_DIR; traces are of a run of their own, `<experiment>-traces`."""

    def __init__(self, run: RunInfo):
        import trackio

        name = f"{run.experiment}-traces"
        self._trackio = trackio
        self._run = trackio.init(run.project, name, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def write(self, root: Span) -> None:
        spans = [self._span(span, number, parent) for number, (span, parent) in enumerate(numbered(root))]
        metadata = {**plain(root.attributes), **plain(root.outputs), "status": "error" if root.error else "ok"}
        trace = self._trackio.Trace(messages(root), metadata, spans)
        self._run.log({"trace": trace}, step=root.attributes.get("step"))

    def _span(self, span: Span, number: int, parent: int | None) -> dict[str, Any]:
        found = {
            "id": str(number),
            "parent_id": None if parent is None else str(parent),
            "name": span.name,
            "kind": _TRACKIO_KINDS.get(span.kind, "span"),
            "start_time": _moment(span.start_ns).isoformat(),
            "end_time": _moment(span.end_ns).isoformat(),
            "duration_ms": (span.end_ns - span.start_ns) / 1e6,
            "status": "error" if span.error else "ok",
            "error": span.error or None,
            "input": plain(span.inputs),
            "output": plain(span.outputs),
            "metadata": plain(span.attributes),
        }
        if span.kind == GENERATION:
            counts = {"input_tokens": span.inputs.get("prompt_tokens", 0)}
            found["usage"] = counts | {"output_tokens": span.attributes.get("sampled_tokens", 0)}
        return found

    def close(self) -> None:
        self._run.finish()


TRACE_BACKENDS: dict[str, Callable[[RunInfo], TraceBackend]] = {
    "mlflow": MlflowTraces,
    "weave": WeaveTraces,
    "trackio": TrackioTraces,
    "opentelemetry": OpenTelemetryTraces,
}
_INSTALL = {
    "mlflow": "pip install -e '.[trackers]'",
    "weave": "pip install weave",
    "trackio": "pip install -e '.[trackers]'",
    "opentelemetry": "pip install -e '.[traces]'",
}


def check_trace_backend(name: str | None) -> None:
    """ConfigError where the package of the backend is not installed, or its account is not known."""
    module = "opentelemetry.exporter.otlp.proto.http" if name == "opentelemetry" else name
    if module is not None and name is not None and not has_module(module):
        raise ConfigError(
            f"actor_rollout_ref.rollout.trace.backend={name} needs a package that is not installed ({module}); "
            f"{_INSTALL[name]}, or leave the key null"
        )
    if name == "weave" and not wandb_has_account():  # it would ask for one while the run prints
        raise ConfigError(
            "actor_rollout_ref.rollout.trace.backend=weave has no account here: set WANDB_API_KEY, run `wandb login` "
            "once, or leave the key null"
        )


def messages(root: Span) -> list[dict[str, Any]]:
    """The prompt, and what each turn and each tool said, as a conversation."""
    prompt = root.inputs.get("prompt")
    found = [dict(m) for m in prompt] if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
    for child in root.children:
        if child.kind == GENERATION:
            found.append({"role": "assistant", "content": child.outputs.get("text", "")})
        elif child.kind == TOOL:
            found.append({"role": "tool", "name": child.name, "content": str(child.outputs.get("response") or "")})
    return plain(found)


def numbered(root: Span) -> list[tuple[Span, int | None]]:
    """Every span with the number of the one around it, in the order of `walk`."""
    spans = list(root.walk())
    places = {id(span): number for number, span in enumerate(spans)}
    around = {id(child): places[id(span)] for span in spans for child in span.children}
    return [(span, around.get(id(span))) for span in spans]


def plain(value: Any) -> Any:
    """`value` as JSON has it; what it does not know becomes text."""
    return json.loads(to_json(value))


def to_json(value: Any) -> str:
    """`value` as JSON; what it does not know becomes text."""
    return json.dumps(value, default=_as_known)


@contextlib.contextmanager
def raised_from_log(name: str) -> Iterator[None]:
    """Raises at the end what the library logged about failures to `name` and below, and silences it until then."""
    library, said = logging.getLogger(name), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    propagates, library.propagate = library.propagate, False
    library.addHandler(handler)
    try:
        yield
    finally:
        library.propagate = propagates
        library.removeHandler(handler)
    if said:
        raise RuntimeError(said[0])


def _as_known(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "size", 0) == 1 else str(value)


def _attribute(value: Any) -> Any:
    return value if isinstance(value, str | bool | int | float) else to_json(value)


def _moment(time_ns: int) -> datetime:
    return datetime.fromtimestamp(time_ns / 1e9, UTC)


def _exporter() -> Any:
    if os.environ.get("OTEL_TRACES_EXPORTER") == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stdout)  # its default is that of the import
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()
