"""Servers of a reward model: stand-ins of both protocols, and a real vLLM that gives the scores of `transformers`."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from transformers import AutoConfig

from tests.conftest import python_with_vllm
from tests.e2e.serving import serving
from tests.reward_models import oracle_scores, save_reward_model
from tests.rollout_adapters import CONFIG, letters_tokenizer, native_behind, small_model
from tests.standins import FakeSGLangServer
from verl.commands.quickstart.addition_task import CHARACTERS
from verl.commands.quickstart.small_model import make_model
from verl.commands.serve import command
from verl.config import load_config
from verl.config.load import pop_unread_keys
from verl.config.reward import check_reward_model
from verl.rewards import call_retries
from verl.rewards.base import RewardInput
from verl.rewards.function_reward import CallRules
from verl.rewards.model_reward import ModelReward
from verl.rewards.reward_servers import (
    LARGEST_REQUEST,
    RewardServers,
    classifier_command,
    judge_command,
    planned_servers,
    start_servers,
)
from verl.rewards.servers_on_nodes import start_servers_on_nodes
from verl.utils.errors import RewardError, TransportError
from verl.workers.rollout.remote.http_server import HTTPServerProcess, free_port

KEY = "reward.reward_model"
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

port, log, fault = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if fault == "start":
    sys.exit("there is no such model")

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def answer(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        self.answer(200, {})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(log, "a") as file:
            file.write(json.dumps([self.path, body]) + "\\n")
        if fault == "end":
            sys.stderr.write("out of memory\\n"); sys.stderr.flush()
            import os; os._exit(3)
        if self.path == "/classify":
            data = [{"index": i, "probs": [float(len(ids))]} for i, ids in enumerate(body["input"])]
        elif self.path == "/v1/embeddings":
            data = [{"index": i, "embedding": [9.0, float(len(ids))]} for i, ids in enumerate(body["input"])]
        else:
            data = []
        if fault == "once" and not hasattr(Handler, "asked"):
            Handler.asked = True
            return self.answer(503, {"error": "busy"})
        if fault == "refuse":
            return self.answer(400, {"error": "no such model"})
        self.answer(200, {"data": data[::-1] if fault != "short" else data[1:]})

HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def settings(*keys: str):
    return load_config([f"{KEY}.enable=True", f"{KEY}.model_path=m", *keys]).reward


@pytest.fixture
def stand_ins(tmp_path: Path):
    """A function that starts `count` of them; each writes its requests to a file."""
    (tmp_path / "server.py").write_text(SERVER)
    with ExitStack() as started:

        def start(engine: str, count: int = 1, fault: str = "", sleeps: bool = False) -> RewardServers:
            made = []
            for number in range(count):
                port = free_port()
                command = [sys.executable, "server.py", str(port), f"log{number}", fault]
                server = HTTPServerProcess(f"server {number}", [command[0], str(tmp_path / command[1]), *command[2:]],
                                           dict(os.environ) | {"PWD": str(tmp_path)}, port)  # fmt: skip
                started.callback(server.close)
                made.append(server)
            config = settings(f"{KEY}.rollout.name={engine}", f"{KEY}.rollout.server.max_start_wait_time=60")
            return RewardServers(made, config.reward_model, sleeps)

        previous = Path.cwd()
        os.chdir(tmp_path)
        yield start
        os.chdir(previous)


def requests(number: int) -> list:
    return [json.loads(line) for line in Path(f"log{number}").read_text().splitlines()]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_scores_come_in_the_order_of_the_sequences_from_all_servers(stand_ins, engine):
    servers = stand_ins(engine, 2)
    asked = [[7] * (1 + n % 50) for n in range(2 * LARGEST_REQUEST + 9)]
    assert asyncio.run(servers.scores(asked)) == [float(len(ids)) for ids in asked]
    sent = [requests(0), requests(1)]
    assert all(sent) and sum(len(body["input"]) for part in sent for _, body in part) == len(asked)
    path, body = sent[0][0]
    assert path == {"vllm": "/classify", "sglang": "/v1/embeddings"}[engine] and body["model"] == "reward_model"
    assert body.get("use_activation", "none") == {"vllm": False, "sglang": "none"}[engine]  # the head's own output


@pytest.mark.parametrize(
    ("engine", "paths"),
    [
        ("vllm", ["/sleep?level=1", "/wake_up", "/sleep?level=1"]),
        ("sglang", ["/release_memory_occupation", "/resume_memory_occupation", "/release_memory_occupation"]),
    ],
)
def test_on_shared_devices_they_sleep_from_the_start_and_except_between_wake_and_sleep(stand_ins, engine, paths):
    servers = stand_ins(engine, sleeps=True)

    async def one_pass():
        await servers.wake()
        await servers.sleep()

    asyncio.run(one_pass())
    assert [path for path, _ in requests(0)] == paths
    asyncio.run(stand_ins(engine).wake())  # with devices of its own nothing sleeps
    assert len(requests(0)) == 3


@pytest.mark.parametrize(
    ("fault", "said"),
    [("refuse", "400.*no such model"), ("short", "answered 2 sequences with"), ("end", "exit code 3.*out of memory")],
)
def test_a_server_that_gives_no_score_is_an_error_that_says_why(stand_ins, fault, said):
    servers = stand_ins("vllm", fault=fault)
    with pytest.raises(RewardError, match=f"(?s){said}"):
        asyncio.run(servers.scores([[1], [1, 2]]))


def test_a_request_that_fails_once_is_made_again_by_the_rules_of_the_reward(stand_ins, monkeypatch):
    monkeypatch.setattr(call_retries, "FIRST_WAIT_S", 0.0)
    model = ModelReward(SimpleNamespace(read=lambda item: [7, 7]), CallRules(retries=1), False)
    model.backend = stand_ins("vllm", fault="once")
    [score] = asyncio.run(model.score([RewardInput("toy", "x", None, {})]))
    assert (score.value, score.retries, len(requests(0))) == (2.0, 1, 2)


def test_a_server_that_does_not_start_is_an_error_with_its_last_lines(stand_ins):
    with pytest.raises(TransportError, match=r"(?s)server 0 did not start: .*there is no such model"):
        stand_ins("vllm", fault="start")


@pytest.mark.parametrize("killed", ["the program", "the process that watches it"])
def test_a_server_ends_when_whoever_started_it_is_killed(tmp_path: Path, killed: str):
    (tmp_path / "server.py").write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    program = (
        "import os, sys, time\nfrom verl.workers.rollout.remote.http_server import HTTPServerProcess\n"
        "s = HTTPServerProcess('s', [sys.executable, 'server.py'], dict(os.environ), 1)\ntime.sleep(600)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    until, pid = time.monotonic() + 60, tmp_path / "pid"
    while time.monotonic() < until and not (pid.is_file() and pid.read_text()):
        time.sleep(0.05)
    server = int(pid.read_text())
    if killed == "the program":
        starter.kill()
    else:
        (status,) = re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{server}/status").read_text())
        os.kill(int(status), signal.SIGKILL)
    while time.monotonic() < until and Path(f"/proc/{server}").exists():
        time.sleep(0.05)
    ended = not Path(f"/proc/{server}").exists()
    starter.kill()
    starter.wait()
    assert ended


def test_command_lines_have_the_settings():
    keys = [f"{KEY}.rollout.{key}" for key in ("tensor_model_parallel_size=2", "dtype=float16", "max_model_len=99")]
    vllm = classifier_command(settings(*keys, f"{KEY}.rollout.name=vllm", f"+{KEY}.rollout.engine_kwargs.vllm.seed=3")
                              .reward_model, True, "127.0.0.1", 5)  # fmt: skip
    text = " ".join(vllm)
    assert "vllm.entrypoints.openai.api_server --host 127.0.0.1 --port 5" in text and "--runner pooling" in text
    for part in ("--tensor-parallel-size 2", "--dtype float16", "--max-model-len 99", "--enforce-eager", "--seed 3"):
        assert part in text
    assert "--enable-sleep-mode" in text
    sglang = " ".join(
        classifier_command(settings(*keys, f"{KEY}.rollout.name=sglang").reward_model, False, "127.0.0.1", 5)
    )
    assert "--is-embedding" in sglang and "--tp-size 2" in sglang and "--enable-memory-saver" not in sglang
    judge = " ".join(judge_command(settings(*keys).reward_model, "cpu", 3, True, "10.0.0.7", 5))
    assert "rollout.name=native" in judge and "rollout.num_replicas=3" in judge and "--allow-sleep" in judge
    assert "--host 10.0.0.7 --port 5" in judge and "trainer.device=cpu" in judge


def test_a_judge_is_served_by_sglang(tmp_path: Path):
    """The command of the judge, with a server that runs already in place of the one that it starts."""
    small_model().save_pretrained(tmp_path)
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    keys = [f"{KEY}.rollout.{key}" for key in ("name=sglang", "dtype=float32", "prompt_length=16", "response_length=8")]
    keys += [f"{KEY}.model_path={tmp_path}", "reward.custom_reward_function.path=mine.py"]
    config = settings(*keys, f"+{KEY}.rollout.engine_kwargs.sglang.attention_backend=ascend")
    check_reward_model(config)
    _, _, program, *words = judge_command(config.reward_model, "cpu", 1, True, "127.0.0.1", 0)
    options = command._parser().parse_intermixed_args(words)
    assert program == command.__name__ and 'rollout.engine_kwargs.sglang.attention_backend="ascend"' in words
    sglang = FakeSGLangServer(native_behind(small_model(), CONFIG), letters_tokenizer())
    overrides = [word.replace("model=", "model.path=", 1) for word in options.overrides if "device" not in word]
    given = [f"actor_rollout_ref.{word}" for word in (*overrides, f"rollout.server.url={sglang.url}")]
    with serving(command.build_server(load_config(given), options)) as address:
        body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3, "temperature": 0, "stop": ["zzz"]}
        judge = HTTPServerProcess.answer
        asked = SimpleNamespace(url=address.removesuffix("/v1"), name="the judge")
        for path in ("/release_memory_occupation", "/resume_memory_occupation"):  # by turns with the rollout
            assert judge(asked, path, {}, 60) == {}
        said = judge(asked, "/v1/chat/completions", body, 60)["choices"][0]
    sglang.close()
    assert said["finish_reason"] == "length" and len(said["message"]["content"]) == 3
    asked_for = dict(sglang.calls)
    assert asked_for["generate"]["input_ids"] == [0, 1, 2] and {"release", "resume"} <= asked_for.keys()


def test_the_driver_knows_which_keys_servers_of_other_machines_read():
    config = load_config([f"{KEY}.enable=True", f"{KEY}.model_path=m", f"{KEY}.rollout.name=vllm",
                          f"{KEY}.rollout.max_model_len=99"])  # fmt: skip
    planned = planned_servers(config.reward, [(0, ())], False)
    held = Mock(call=Mock(return_value=("server 0", "http://127.0.0.1:1")))
    with ExitStack() as started:
        start_servers_on_nodes(config.reward.reward_model, planned, lambda *_: held, Mock(), started)
    assert f"{KEY}.rollout.max_model_len" not in pop_unread_keys(config)


@pytest.mark.vllm
def test_a_real_vllm_gives_the_scores_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    python = python_with_vllm()
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    make_model(tmp_path / "model", CHARACTERS, 0, hidden=128, layers=1)  # vLLM wants heads of at least 32 on a CPU
    folder = save_reward_model(tmp_path / "rm", AutoConfig.from_pretrained(tmp_path / "model"), tmp_path / "model")
    keys = [f"rollout.{key}" for key in ("name=vllm", "max_model_len=64", "dtype=float32", f"server.python={python}")]
    config = settings(f"{KEY}.model_path={folder}", *(f"{KEY}.{key}" for key in keys))
    asked = [[1 + (n * k) % 12 for k in range(1, 4 + n)] for n in range(9)]
    with ExitStack() as started:
        servers = start_servers(config, [(0, ())], 0, False, started)
        found = asyncio.run(servers.scores(asked))
    assert found == pytest.approx(oracle_scores(folder, asked), abs=1e-4)
    assert max(found) > 1 or min(found) < 0  # not squashed
