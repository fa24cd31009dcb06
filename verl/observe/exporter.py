"""Metrics for Prometheus: the newest step, counters over all steps, and what the run does now, at `/metrics`."""

import math
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from verl.observe.trackers import RunInfo, Sample
from verl.utils.errors import ConfigError

NAME = "prometheus"  # among the trackers of a run
LOOPBACK = "127.0.0.1"
_CONTENT = "text/plain; version=0.0.4; charset=utf-8"
_HELP = {
    "verl_metric": ("gauge", "Metric `name` of the newest step, as the file tracker writes it."),
    "verl_step": ("gauge", "The newest step."),
    "verl_last_step_timestamp_seconds": ("gauge", "When it ended, in seconds since the epoch."),
    "verl_started_timestamp_seconds": ("gauge", "When this process began to export."),
    "verl_stage_seconds": ("gauge", "Seconds of a stage in the newest step."),
    "verl_stage_seconds_total": ("counter", "Seconds of a stage over all steps of this process."),
    "verl_steps_total": ("counter", "Steps of this process."),
    "verl_generated_tokens_total": ("counter", "Tokens that the rollout has sampled for training."),
    "verl_reward_errors_total": ("counter", "Answers whose reward failed."),
    "verl_restarts_total": ("counter", "Times the run was started again after it lost a rank."),
    "verl_replica_count_total": (
        "counter",
        "What a rollout replica, or a rank that samples, has counted: `count` names it.",
    ),
    "verl_replica_value": ("gauge", "How it stands now."),
    "verl_replicas_lost": ("gauge", "Rollout replicas that are lost and not replaced."),
    "verl_answers": ("gauge", "Answers of the batch being collected, by state: asked, answered, scored."),
    "verl_sampled_tokens": ("gauge", "Tokens sampled so far for the batch being collected."),
}
_COUNTED = {  # metric of a step -> the counter that adds it up
    "rollout/generated_tokens": "verl_generated_tokens_total",
    "reward/errors": "verl_reward_errors_total",
}
Key = tuple[str, tuple[tuple[str, str], ...]]  # name of a family, and its labels


class Exporter:
    """A tracker that keeps the newest step for whoever asks `url`. ConfigError where it cannot listen there."""

    def __init__(self, run: RunInfo, port: int, address: str = LOOPBACK):
        self.labels = {"project": run.project, "experiment": run.experiment}
        self.values: dict[Key, float] = {}
        self._lock = threading.Lock()
        try:
            self._server = _Server((address, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"trainer.prometheus_port={port} cannot be used at {address}: {error}; choose another, or 0 for any"
            ) from error
        self._server.exporter = self
        self.address = f"{address}:{self._server.server_address[1]}"
        self.url = f"http://{self.address}/metrics"
        self.gauge("verl_started_timestamp_seconds", time.time())
        for name in ("verl_steps_total", "verl_restarts_total", *_COUNTED.values()):
            self.gauge(name, 0.0)
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def gauge(self, family: str, value: float, **labels: str) -> None:
        """Set one value."""
        with self._lock:
            self.values[family, tuple(labels.items())] = value

    def log(self, data: dict[str, float], step: int) -> None:
        """Replace the metrics of the step before; whoever asks gets those of one step."""
        with self._lock:
            for key in [key for key in self.values if key[0] in ("verl_metric", "verl_stage_seconds")]:
                del self.values[key]
            for name, value in data.items():
                self.values["verl_metric", (("name", name),)] = float(value)
                if name.startswith("timing_s/"):
                    stage = (("stage", name.removeprefix("timing_s/")),)
                    self.values["verl_stage_seconds", stage] = float(value)
                    self._add("verl_stage_seconds_total", stage, value)
                if name in _COUNTED:
                    self._add(_COUNTED[name], (), value)
            if "timing_s/step" in data:  # a validation before the first step is none
                self._add("verl_steps_total", (), 1)
            self.values["verl_step", ()] = step
            self.values["verl_last_step_timestamp_seconds", ()] = time.time()

    def _add(self, family: str, labels: tuple[tuple[str, str], ...], value: float) -> None:
        self.values[family, labels] = self.values.get((family, labels), 0.0) + max(0.0, float(value))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Texts are not for Prometheus."""

    def rewind(self, step: int) -> None:
        """Prometheus keeps what it has read."""

    def finish(self, exit_code: int) -> None:
        """Stop to answer."""
        self._server.shutdown()
        self._server.server_close()

    def text(self) -> str:
        """Everything, in Prometheus's text format."""
        with self._lock:
            values = dict(self.values)
        lines: list[str] = []
        for family, (kind, meaning) in _HELP.items():
            found = [(labels, value) for (name, labels), value in values.items() if name == family]
            if found:
                lines += [f"# HELP {family} {meaning}", f"# TYPE {family} {kind}"]
            for labels, value in found:
                shown = ",".join(f'{name}="{_escaped(text)}"' for name, text in {**self.labels, **dict(labels)}.items())
                lines.append(f"{family}{{{shown}}} {_number(value)}")
        return "\n".join(lines) + "\n"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    exporter: Exporter


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0  # s for a client to send its request

    def do_GET(self) -> None:
        is_there = self.path.split("?")[0] == "/metrics"
        server = self.server
        assert isinstance(server, _Server)
        body = server.exporter.text().encode() if is_there else b"metrics are at /metrics\n"
        self.send_response(200 if is_there else 404)
        self.send_header("Content-Type", _CONTENT if is_there else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not printed."""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(float(value)) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")
