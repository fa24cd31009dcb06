"""Clients of `verl serve` that send too much, half, or nothing, and those that have no key."""

import gzip
import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from aiohttp.test_utils import make_mocked_request

from tests.e2e import jobs
from tests.e2e.serving import serving
from verl.commands.serve.callers import check_is_near
from verl.commands.serve.request_body import RequestError
from verl.commands.serve.server import OpenAIServer, ServerLimits
from verl.config import load_config
from verl.models.load import load_tokenizer
from verl.trainer.ppo.rollout_setup import build_standalone_engine

ARR = "actor_rollout_ref"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
def server(tmp_path: Path) -> OpenAIServer:
    jobs.prepare(tmp_path)
    config = load_config([f"{ARR}.model.path={tmp_path / 'model'}", f"{ARR}.rollout.dtype=float32"])
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    engine = build_standalone_engine(config, tokenizer)
    engine.eos_token_ids = ()
    limits = ServerLimits("sesame", max_concurrent=2, max_body_bytes=1 << 20, client_timeout_s=0.5)
    return OpenAIServer(engine, tokenizer, "small", 400, limits=limits)


@pytest.fixture
def address(server: OpenAIServer) -> Iterator[str]:
    with serving(server) as address:
        yield address


def connect(address: str, receive_bytes: int | None = None) -> socket.socket:
    host, _, port = address.removeprefix("http://").removesuffix("/v1").partition(":")
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(30)
    connection.connect((host, int(port)))
    return connection


def read_all(connection: socket.socket) -> bytes:
    """What the server sends until it ends the connection."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"", b""),
        (HEAD, b""),
        (HEAD + b"Authorization: Bearer sesame\r\nContent-Length: 100\r\n\r\n{", b" 408 "),
    ],
    ids=["nothing", "half a head", "half a body"],
)
def test_a_client_that_sends_half_is_let_go(address: str, sent: bytes, says: bytes):
    with connect(address) as connection:
        connection.sendall(sent)
        assert says in read_all(connection)  # returns when the server has let go


def test_a_client_that_reads_nothing_is_let_go_and_its_rows_are_free(server: OpenAIServer, address: str):
    body = json.dumps({"prompt": "1", "max_tokens": 390, "n": 32, "stream": True, "logprobs": 20}).encode()
    with connect(address, receive_bytes=1 << 12) as connection:
        connection.sendall(HEAD + b"Authorization: Bearer sesame\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        until = time.monotonic() + 60
        while not server.num_running and time.monotonic() < until:
            time.sleep(0.01)
        while (server.num_running or server.engine.core.busy) and time.monotonic() < until:
            time.sleep(0.01)
        assert not server.num_running and not server.engine.core.busy
        assert b"[DONE]" not in read_all(connection)


def ask(address: str, data: bytes, **headers: str) -> tuple[int, str]:
    given = {"Content-Type": "application/json", "Authorization": "Bearer sesame"} | headers
    try:
        request = urllib.request.Request(f"{address}/completions", data, given)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_who_has_no_key_is_refused(address: str):
    asked = json.dumps({"prompt": "1", "max_tokens": 2}).encode()
    assert ask(address, asked)[0] == 200
    for wrong in ("Bearer open", "", "sesam\u00e9"):
        code, text = ask(address, asked, Authorization=wrong)
        assert code == 401 and "API key" in json.loads(text)["error"]["message"]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=address, api_key="none", max_retries=0).models.list()
    assert health(address) == (200, {"status": "ok"})


def test_a_foreign_host_origin_or_body_is_refused_before_it_is_read(address: str):
    asked = json.dumps({"prompt": "1", "max_tokens": 2}).encode()
    for headers, status in (
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Host": "localhost:1"}, 200),
    ):
        assert ask(address, asked, **headers)[0] == status, headers


def health(address: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(address.replace("/v1", "/health")) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(("peer", "own"), [("127.0.0.1", "127.0.0.2"), ("10.0.0.7", "10.0.0.7")])
def test_sleeping_is_for_the_machine_of_the_server(peer: str, own: str):
    def request(**ends: str) -> Any:
        transport = SimpleNamespace(
            get_extra_info=lambda name, default=None: (ends[name], 1) if name in ends else default
        )
        return make_mocked_request("POST", "/sleep", transport=transport)

    check_is_near(request(peername=peer, sockname=own))
    with pytest.raises(RequestError, match="is another"):
        check_is_near(request(peername="10.0.0.8", sockname=own))


def test_health_names_the_lost_replicas(server: OpenAIServer, address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server.engine, "lost_replicas", (1,))
    assert health(address) == (200, {"status": "degraded", "lost_replicas": [1]})
    monkeypatch.setattr(server.engine, "lost", "its process ended")
    assert health(address) == (503, {"status": "lost", "lost_replicas": [1]})


def test_a_body_is_limited_after_it_is_unpacked(address: str):
    asked = json.dumps({"prompt": "1", "max_tokens": 2}).encode()
    assert ask(address, gzip.compress(asked), **{"Content-Encoding": "gzip"})[0] == 200
    for size in (1 << 21, 1 << 28):
        code, text = ask(address, gzip.compress(b" " * size + asked), **{"Content-Encoding": "gzip"})
        assert code == 413 and "1048576 bytes" in text
    assert ask(address, gzip.compress(asked)[:-9], **{"Content-Encoding": "gzip"})[0] == 400
    assert ask(address, b"nothing packed", **{"Content-Encoding": "gzip"})[0] == 400
    assert ask(address, asked, **{"Content-Encoding": "br"})[0] == 415
    assert ask(address, b" " * ((1 << 20) + 1))[0] == 413


def test_more_requests_than_allowed_at_once_are_sent_away(server: OpenAIServer, address: str):
    client = openai.OpenAI(base_url=address, api_key="sesame", max_retries=0, timeout=60)
    step, go_on = server.engine.core.step, threading.Event()
    server.engine.core.step = lambda: step() if go_on.is_set() else time.sleep(0.001) or []
    answers = []

    def ask_one() -> None:
        answers.append(client.completions.create(model="small", prompt="1", max_tokens=2))

    threads = [threading.Thread(target=ask_one) for _ in range(2)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 30
    while server.num_running < 2 and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(openai.RateLimitError, match="--max-concurrent"):
        client.completions.create(model="small", prompt="1", max_tokens=2)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 2
    assert client.completions.create(model="small", prompt="1", max_tokens=2).choices


class Counting:
    """A tokenizer that notes how many characters it is given."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.characters = tokenizer, 0

    def __call__(self, text: Any, **kwargs: Any) -> Any:
        self.characters += len(text) if isinstance(text, str) else sum(map(len, text))
        return self.tokenizer(text, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("longest", [None, 1000])  # characters of the longest token, if not the tokenizer's own
def test_a_text_too_long_for_the_model_is_refused_before_it_is_tokenised(
    server: OpenAIServer, chat: bool, longest: int | None
):
    counting = server.prompts.tokenizer = Counting(server.tokenizer)
    if longest:
        server.prompts.longest_token = longest
    text = "1" * 390_000
    body = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    with pytest.raises(Exception, match="prompt tokens exceed the 400 tokens one conversation may hold"):
        server.read_job(json.dumps(body).encode(), chat)
    assert counting.characters <= (1 << 16 if longest else 0)


@pytest.mark.parametrize("length", [399, 400, 401, 1000])
def test_a_prompt_that_leaves_no_room_is_refused_in_words_of_the_client(server: OpenAIServer, length: int):
    for chat, field in ((True, "messages"), (False, "prompt")):
        text = "1" * length
        body = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        if length < 400:
            assert server.read_job(json.dumps(body).encode(), chat).requests[0].sampling.max_tokens == 1
            continue
        with pytest.raises(RequestError, match=f"{length} prompt tokens leave no room .* in the 400 tokens") as caught:
            server.read_job(json.dumps(body).encode(), chat)
        assert caught.value.field == field and caught.value.code == "context_length_exceeded"
        assert "data." not in str(caught.value) and "rollout" not in str(caught.value)


def test_the_command_answers_says_a_line_a_request_and_stops_at_once(tmp_path: Path):
    jobs.prepare(tmp_path / "run")
    folder = tmp_path / "checkpoints" / "project" / "sums" / "global_step_7" / "actor" / "huggingface"
    folder.parent.mkdir(parents=True)
    (tmp_path / "run" / "model").rename(folder)
    command = [
        sys.executable,
        "-m",
        "verl.cli",
        "serve",
        f"model={folder}",
        "--port",
        "0",
        "rollout.response_length=64",
    ]
    environment = {**os.environ, "VERL_API_KEY": "sesame"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("serving"):
            break
    assert lines[-1].startswith("serving sums-step-7 on http://127.0.0.1:"), lines
    address = lines[-1].split()[-1]
    trial = process.stdout.readline()
    assert trial.startswith("try it:  curl ") and "sesame" not in trial
    url, *words = shlex.split(trial.removeprefix("try it:  curl ").replace("$VERL_API_KEY", "sesame"))
    headers = dict(value.split(": ") for flag, value in itertools.pairwise(words) if flag == "-H")
    asked = urllib.request.Request(url, words[words.index("-d") + 1].encode(), headers)
    with urllib.request.urlopen(asked, timeout=60) as reply:
        assert json.load(reply)["usage"]["prompt_tokens"] == 6
    client = openai.OpenAI(base_url=address, api_key="sesame", max_retries=0, timeout=60)
    chat = client.chat.completions.create(
        model="sums-step-7",
        messages=[{"role": "user", "content": "1+1="}],
        max_tokens=3,
        extra_body={"ignore_eos": True},
    )
    assert chat.model == "sums-step-7"
    with connect(address) as half, connect(address) as nothing:
        half.sendall(HEAD + b"Authorization: Bearer sesame\r\nContent-Length: 100\r\n\r\n{")
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
        assert process.returncode == 0 and time.monotonic() - started < 25, said
        nothing.close()
    assert "POST /v1/chat/completions: 200 in" in said and "4 prompt + 3 answer tokens" in said
