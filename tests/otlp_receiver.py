"""A receiver of OpenTelemetry's protocol over HTTP, as small as one can be: it keeps the spans that it gets."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver(ThreadingHTTPServer):
    """`spans` in the order of their arrival, and the number of requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"

    def roots(self) -> list[Any]:
        return [span for span in self.spans if not span.parent_span_id]

    def below(self, parent: Any) -> list[Any]:
        """Its children by the time they began."""
        found = [s for s in self.spans if (s.trace_id, s.parent_span_id) == (parent.trace_id, parent.span_id)]
        return sorted(found, key=lambda span: span.start_time_unix_nano)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in request.resource_spans:
            self.server.resources.append(attributes(resource.resource))
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not printed."""


def attributes(holder: Any) -> dict[str, Any]:
    """The attributes of a span or resource; what is JSON is read."""
    found = {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in holder.attributes}
    return {key: json.loads(value) if key in ("input.value", "output.value") else value for key, value in found.items()}


@contextmanager
def receiving(patch: Any) -> Iterator[Receiver]:
    """A receiver, to which exporters of this process send."""
    receiver = Receiver()
    threading.Thread(target=receiver.serve_forever, args=(0.02,), daemon=True).start()
    patch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", receiver.endpoint)
    try:
        yield receiver
    finally:
        receiver.shutdown()
        receiver.server_close()
