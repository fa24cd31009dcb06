"""Who may connect to `verl serve`, and with which key: no page of another site, no more than descriptors."""

import asyncio
import logging
import os
import resource
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from verl.commands.serve.address import connections_that_fit
from verl.commands.serve.callers import check_origin
from verl.commands.serve.command import KEY_VARIABLE, _parser, check_options, read_api_key
from verl.commands.serve.connections import Listener
from verl.commands.serve.request_body import RequestError
from verl.utils.errors import ConfigError

JSON = {"Content-Type": "application/json; charset=utf-8"}


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost:8000", "LOCALHOST", "[::1]:8000", "10.1.2.3", "gpu-3:8000"]
)
def test_an_address_localhost_and_the_name_that_the_server_was_given_are_answered(host: str):
    check_origin(make_mocked_request("POST", "/v1/completions", {"Host": host, **JSON}), "GPU-3")


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "a@127.0.0.1", "", "x:y", "[::1"]
)
@pytest.mark.parametrize("listens_on", ["127.0.0.1", ""])
def test_a_name_that_somebody_elses_page_may_point_here_is_refused(host: str, listens_on: str):
    for method in ("GET", "POST"):
        with pytest.raises(RequestError, match=r"the Host .* start it with that name as --host") as caught:
            check_origin(make_mocked_request(method, "/health", {"Host": host, **JSON}), listens_on)
        assert caught.value.status == 403


@pytest.mark.parametrize(
    ("host", "origin", "own"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", True),
        ("127.0.0.1:8000", "http://localhost:8000", True),
        ("10.1.2.3", "http://10.1.2.3", True),
        ("127.0.0.1:8000", "http://127.0.0.1:9000", False),
        ("127.0.0.1:8000", "http://evil.example:8000", False),
        ("10.1.2.3:8000", "http://10.9.9.9:8000", False),
        ("127.0.0.1:8000", "http://localhost.evil.example:8000", False),
        ("127.0.0.1", "null", False),
    ],
)
def test_a_page_of_another_site_is_refused(host: str, origin: str, own: bool):
    request = make_mocked_request("POST", "/sleep", {"Host": host, "Origin": origin, **JSON})
    if own:
        return check_origin(request, "127.0.0.1")
    with pytest.raises(RequestError, match=r"the Origin .* is another site"):
        check_origin(request, "127.0.0.1")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_a_form_is_no_request(kind: str | None):
    headers = {"Host": "localhost", **({"Content-Type": kind} if kind else {})}
    check_origin(make_mocked_request("GET", "/v1/models", headers), "")
    with pytest.raises(RequestError, match="send application/json") as caught:
        check_origin(make_mocked_request("POST", "/v1/completions", headers), "")
    assert caught.value.status == 415


def options(*words: str):
    return _parser().parse_args(words)


def test_the_key_comes_from_the_command_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert read_api_key(options()) is None
    monkeypatch.setenv(KEY_VARIABLE, "of the environment")
    assert read_api_key(options()) == "of the environment"
    (tmp_path / "key").write_text("of a file\n")
    assert read_api_key(options("--api-key-file", str(tmp_path / "key"))) == "of a file"
    assert read_api_key(options("--api-key", "given")) == "given"


@pytest.mark.parametrize("empty", ["", "  ", "\n", "a\nb", "k" * 5000])
def test_an_empty_key_is_a_mistake_wherever_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: str):
    (tmp_path / "key").write_text(empty)
    for words in (("--api-key", empty), ("--api-key-file", str(tmp_path / "key")), ()):
        if not words:
            monkeypatch.setenv(KEY_VARIABLE, empty)
        with pytest.raises(ConfigError, match="holds no key, which is one line"):
            check_options(options(*words))


def test_a_key_that_is_no_file_or_stands_twice_is_a_mistake(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, says in (
        ("pipe", "is no file"),
        ("gone", "is no file"),
        (".", "is no file"),
        ("bytes", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_options(options("--api-key-file", str(tmp_path / name)))
    with pytest.raises(ConfigError, match="give one"):
        check_options(options("--api-key", "a", "--api-key-file", "b"))


def test_connections_fit_below_the_limit_of_descriptors(monkeypatch: pytest.MonkeyPatch):
    used = len(os.listdir("/dev/fd"))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (used + 50, used + 50))
    assert 25 <= connections_that_fit() < 50
    monkeypatch.setattr(resource, "getrlimit", lambda which: (10, 10))
    assert connections_that_fit() == 1
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert connections_that_fit() == 1 << 20


def test_more_clients_than_fit_are_closed_with_one_line_and_the_next_is_answered(caplog: pytest.LogCaptureFixture):
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    async def talk() -> None:
        app = web.Application()
        app.add_routes([web.get("/", hello)])
        listener = Listener(app, limit_s=30)
        port = await listener.start("127.0.0.1", 0)
        listener.most = 3
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _, writer in clients:
            writer.write(b"GET / HTTP/1.1\r\n")
        ended = [asyncio.ensure_future(reader.read()) for reader, _ in clients]
        await asyncio.wait(ended, timeout=0.5)
        assert sum(task.done() for task in ended) == 17 and len(listener.connections) == 3
        for _, writer in clients:
            writer.close()
        await asyncio.wait(ended)
        while listener.connections:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"hello" in await reader.read()
        writer.close()
        await listener.stop()

    with caplog.at_level(logging.WARNING):
        asyncio.run(talk())
    assert [r.message for r in caplog.records if "refused" in r.message] == [
        "connections refused: 1; 3 are open, and the descriptors of this process (ulimit -n) allow 3"
    ]
