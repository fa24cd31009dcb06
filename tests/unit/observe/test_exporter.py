"""The exporter for Prometheus, and the file of its targets."""

import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import yaml

from verl.observe.exporter import Exporter
from verl.observe.prometheus_targets import reload_server, write_targets
from verl.observe.trackers import RunInfo
from verl.utils.errors import ConfigError


@pytest.fixture
def exporter():
    made = Exporter(RunInfo('a "b"\\c', "run"), 0)
    yield made
    made.finish(0)


def lines(exporter) -> dict[str, float]:
    """What it answers: value by series, without the labels of the run."""
    with urlopen(exporter.url) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    run = 'project="a \\"b\\"\\\\c",experiment="run"'
    pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    assert all(run in name for name, _ in pairs)
    return {name.replace(f"{run},", "").replace(f"{{{run}}}", ""): float(value) for name, value in pairs}


def test_the_newest_step_replaces_the_one_before_and_counters_grow(exporter):
    exporter.log({"timing_s/step": 2.0, "timing_s/gen": 1.5, "reward/errors": 1, "old/name": 7}, 1)
    exporter.log({"timing_s/step": 3.0, "reward/errors": 2, "rollout/generated_tokens": 10, "x": float("nan")}, 2)
    found = lines(exporter)
    assert found['verl_metric{name="timing_s/step"}'] == 3.0 and 'verl_metric{name="old/name"}' not in found
    assert found['verl_stage_seconds_total{stage="step"}'] == 5.0
    assert found['verl_stage_seconds_total{stage="gen"}'] == 1.5
    assert found["verl_reward_errors_total"] == 3 and found["verl_generated_tokens_total"] == 10
    assert found["verl_steps_total"] == 2 and found["verl_step"] == 2 and found["verl_restarts_total"] == 0
    assert found['verl_metric{name="x"}'] != found['verl_metric{name="x"}']


def test_it_listens_on_this_machine_alone_and_answers_one_path(exporter):
    assert exporter.address.startswith("127.0.0.1:")
    with pytest.raises(HTTPError, match="404"):
        urlopen(f"http://{exporter.address}/other")
    with pytest.raises(ConfigError, match=r"prometheus_port=\d+ cannot be used at 127.0.0.1"):
        Exporter(RunInfo("a", "b"), int(exporter.address.partition(":")[2]))


def test_targets_replace_those_of_an_earlier_run_and_leave_the_rest(tmp_path):
    file = tmp_path / "prometheus.yml"
    file.write_text("global: {scrape_interval: 3s}\nscrape_configs:\n- {job_name: ray, file_sd_configs: []}\n")
    write_targets(file, {"verl": (["127.0.0.1:1"], {"experiment": "one"}), "verl-rollout": (["127.0.0.1:2"], {})})
    write_targets(file, {"verl": (["127.0.0.1:3"], {"experiment": "two"}), "verl-rollout": ([], {})})
    content = yaml.safe_load(file.read_text())
    assert content["global"] == {"scrape_interval": "3s"}
    assert [job["job_name"] for job in content["scrape_configs"]] == ["ray", "verl"]
    static = [{"targets": ["127.0.0.1:3"], "labels": {"experiment": "two"}}]
    assert content["scrape_configs"][1]["static_configs"] == static
    write_targets(tmp_path / "new" / "prometheus.yml", {"verl": (["127.0.0.1:1"], {})})
    assert "scrape_interval" in (tmp_path / "new" / "prometheus.yml").read_text()


@pytest.mark.parametrize("text", ["[1, 2]", "scrape_configs: 3", "a: [", "scrape_configs: [3]"])
def test_a_file_that_is_no_configuration_of_prometheus_is_left_alone(tmp_path, text):
    (tmp_path / "p.yml").write_text(text)
    with pytest.raises(ConfigError, match=r"p\.yml"):
        write_targets(tmp_path / "p.yml", {"verl": (["127.0.0.1:1"], {})})
    assert (tmp_path / "p.yml").read_text() == text


def test_the_server_is_told_and_one_that_is_not_there_is_a_warning():
    asked = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_): ...

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        Thread(target=server.handle_request, daemon=True).start()
        assert reload_server(server.server_port) is None and asked == ["/-/reload"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert "--web.enable-lifecycle" in (reload_server(port) or "")
