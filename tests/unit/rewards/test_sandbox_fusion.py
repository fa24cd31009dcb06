"""The client of a SandboxFusion server, against a server on this machine that speaks its protocol."""

import asyncio
import json
import pickle
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.reduction import ForkingPickler

import pytest

from verl.config import ConfigWarning, RewardConfig, RunConfig, SandboxFusionConfig, load_config
from verl.rewards.base import RewardInput
from verl.rewards.reward_setup import build_reward
from verl.rewards.sandbox import Limits, SandboxError
from verl.rewards.scorer_lookup import score_row
from verl.rewards.scorers import sandbox_fusion
from verl.utils import reward_score
from verl.utils.errors import ConfigError
from verl.utils.reward_score.sandbox_fusion.utils import check_correctness

DOUBLE = "```python\nprint(int(input()) * 2)\n```"
TRUTH = {"inputs": ["1", "2"], "outputs": ["2", "5"]}


class Server(ThreadingHTTPServer):
    """Runs the trusted programs of this file; `answers` replaces the first answers by (HTTP status, body)."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests, self.answers, self.active, self.most, self.delay_s = [], [], 0, 0, 0.0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/run_code"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.requests.append(body)
            server.active += 1
            server.most = max(server.most, server.active)
            status, answer = server.answers.pop(0) if server.answers else (200, None)
        time.sleep(server.delay_s)
        answer = json.dumps(run(body) if answer is None else answer).encode()
        with server.lock:
            server.active -= 1
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        pass


def run(body):
    assert body["language"] == "python" and body["run_timeout"] == 10 and self_check(body)
    done = subprocess.run([sys.executable, "-c", body["code"]], input=body["stdin"], capture_output=True, text=True)
    result = {
        "status": "Finished", "execution_time": 0.5, "return_code": done.returncode,
        "stdout": done.stdout, "stderr": done.stderr,
    }  # fmt: skip
    status = "Success" if done.returncode == 0 else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": result, "files": {}}


def self_check(body):
    return {"code", "stdin", "language", "compile_timeout", "run_timeout", "memory_limit_MB"} <= body.keys()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(sandbox_fusion, "WAITS_S", (0.0, 0.0, 0.0))
    made = Server()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_programs_and_functions_run_on_the_server_and_are_judged_here(server):
    row = score_row("apps", DOUBLE, TRUTH, sandbox_fusion_url=server.url, memory_limit_mb=99)
    assert (row["passed"], row["tests"]) == (1, 2)
    assert [request["stdin"] for request in server.requests] == ["1", "2"]
    assert {request["memory_limit_MB"] for request in server.requests} == {99}
    truth = {"fn_name": "f", "inputs": [[[1, 2], "a"]], "outputs": [["expected-a", 3]]}
    answer = "```python\ndef f(x: List[int], y):\n    print('noise')\n    return 'expected-' + y, sum(x)\n```"
    assert score_row("taco", answer, truth, sandbox_fusion_url=server.url)["acc"] == 1.0
    assert "expected-a" not in json.dumps(server.requests)
    semaphore = threading.Semaphore(1)
    score, known = reward_score.sandbox_fusion.compute_score(server.url, semaphore, 77, DOUBLE, json.dumps(TRUTH))
    assert score == 0.5 and [one["status"] for one in known] == ["success", "wrong_answer"]
    assert known[1]["stdout"] == "4\n" and server.requests[-1]["memory_limit_MB"] == 77
    found = check_correctness(server.url, TRUTH, "print(int(input()) * 2)", 10, concurrent_semaphore=semaphore)
    assert found[0] == [True, False] and server.requests[-1]["memory_limit_MB"] == 1024


def test_a_busy_server_is_asked_again(server):
    server.answers = [(503, {}), (429, {}), (200, {"status": "SandboxError", "message": "no worker"})]
    assert score_row("apps", DOUBLE, TRUTH, sandbox_fusion_url=server.url)["passed"] == 1
    assert len(server.requests) == 5


@pytest.mark.parametrize(
    ("answer", "message", "num_asked"),
    [
        ((400, {}), "answered 400", 1),
        ((503, {}), "answered 503", 4),
        ((200, {"status": "SandboxError", "message": "broken"}), "could not run the program.*broken", 4),
        ((200, ["what"]), "could not run the program", 4),
    ],
)
def test_a_server_that_fails_is_an_error_not_a_score(server, answer, message, num_asked):
    server.answers = [answer] * 4
    with pytest.raises(SandboxError, match=message):
        score_row("apps", DOUBLE, TRUTH, sandbox_fusion_url=server.url)
    assert len(server.requests) == num_asked


def test_an_absent_server_is_an_error(monkeypatch):
    monkeypatch.setattr(sandbox_fusion, "WAITS_S", ())
    with pytest.raises(SandboxError, match="cannot be reached"):
        score_row("apps", DOUBLE, TRUTH, sandbox_fusion_url="http://127.0.0.1:9/run_code")


@pytest.mark.parametrize(
    ("run_result", "compile_result", "ending", "exit_code"),
    [
        ({"status": "TimeLimitExceeded", "execution_time": 10}, None, "wall", 1),
        ({"status": "Finished", "return_code": 3, "stdout": "x"}, None, "exit", 3),
        ({"status": "Finished", "return_code": 0, "stdout": "x" * 200}, None, "output", 0),
        (None, {"status": "Error", "stderr": "bad syntax"}, "exit", 1),
        (None, None, "exit", 1),
    ],
)
def test_each_way_to_end_is_read(server, run_result, compile_result, ending, exit_code):
    server.answers = [(200, {"status": "Failed", "run_result": run_result, "compile_result": compile_result})]
    result = sandbox_fusion.run_on_server(server.url, {"source": ""}, b"", Limits(output_bytes=100))
    assert (result.ending, result.exit_code) == (ending, exit_code) and not (ending == "exit" and result.is_success)


def test_a_program_that_writes_without_end_is_its_own_fault_and_no_error_of_the_run(server):
    endless = {"status": "Finished", "return_code": 0, "stdout": "\x00" * 1000}
    server.answers = [(200, {"status": "Success", "run_result": endless})]
    result = sandbox_fusion.run_on_server(server.url, {"source": ""}, b"", Limits(output_bytes=100))
    assert (result.ending, result.is_success) == ("output", False)


def score(config, count):
    rows = [RewardInput("apps", DOUBLE, TRUTH, {}) for _ in range(count)]
    return asyncio.run(build_reward(RunConfig(reward=config), None).score(rows))


def test_the_keys_of_the_config_take_effect(server):
    server.delay_s = 0.05
    fusion = SandboxFusionConfig(url=server.url, max_concurrent=2, memory_limit_mb=321)
    assert [one.value for one in score(RewardConfig(sandbox_fusion=fusion), 6)] == [0.5] * 6
    assert server.most == 2 and len(server.requests) == 12
    assert {request["memory_limit_MB"] for request in server.requests} == {321}
    with pytest.raises(ConfigError, match=r"reward.sandbox_fusion.url='localhost:80'; expected http"):
        score(RewardConfig(sandbox_fusion=SandboxFusionConfig(url="localhost:80")), 1)


def test_old_spellings_of_the_keys_are_read():
    overrides = ["sandbox_fusion.url=http://h/run_code", "reward_model.sandbox_fusion.max_concurrent=3"]
    with pytest.warns(ConfigWarning, match="old spelling"):
        config = load_config([*overrides, "reward.sandbox_fusion.memory_limit_mb=5"])
    expected = SandboxFusionConfig(url="http://h/run_code", max_concurrent=3, memory_limit_mb=5)
    assert config.reward.sandbox_fusion == expected


def test_the_arguments_travel_to_the_processes_of_a_remote_manager():
    fusion = SandboxFusionConfig(url="http://127.0.0.1:9/run_code", max_concurrent=3)
    sent = pickle.loads(ForkingPickler.dumps(sandbox_fusion.sandbox_arguments(fusion)))
    limit = sent["concurrent_semaphore"]
    assert [limit.acquire(blocking=False) for _ in range(4)] == [True, True, True, False]


def test_the_memory_limit_holds_in_the_sandbox_of_this_machine_too():
    answer = "```python\nx = bytearray(200 << 20)\nprint(int(input()) * 2)\n```"
    for limit, value in ((100, 0.0), (400, 1.0)):
        config = RunConfig(reward=RewardConfig(sandbox_fusion=SandboxFusionConfig(memory_limit_mb=limit)))
        rows = [RewardInput("apps", answer, {"inputs": ["1"], "outputs": ["2"]}, {})]
        assert asyncio.run(build_reward(config, None).score(rows))[0].value == value
