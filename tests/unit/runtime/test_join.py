"""Ranks that cannot find each other at MASTER_ADDR say why, within a limit."""

import re
import socket
import threading

import pytest

from verl.runtime import rank
from verl.runtime.rank import RankInfo
from verl.utils.errors import WorkerError


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port, which all ranks are told is that of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = int(free.getsockname()[1])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    monkeypatch.setattr(rank, "JOIN_TIMEOUT", 1e-3 * rank.JOIN_TIMEOUT)  # 0.6 s
    return number


def join(number: int, world_size: int = 2) -> None:
    RankInfo(number, world_size)._store_at_master()


def join_a_silent_server() -> None:
    with pytest.raises(WorkerError):
        join(1)


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (0, r"not all of the 2 ranks of WORLD_SIZE came to .* within 0.6 s: .*1/2 clients joined; look at what the"),
        (
            1,
            r"rank 0 did not answer at MASTER_ADDR=127.0.0.1, MASTER_PORT=<port> within 0.6 s: .*this machine's",
        ),
    ],
)
def test_a_rank_that_stays_alone_says_who_is_missing(port: int, number: int, says: str):
    with pytest.raises(WorkerError, match=f"rank {number} failed .*" + says.replace("<port>", str(port))):
        join(number)


def test_a_port_that_is_taken_is_said_by_rank_0(port: int):
    with (
        socket.create_server(("", port)),
        pytest.raises(WorkerError, match=rf"MASTER_PORT={port}: another program listens there; set MASTER_PORT"),
    ):
        join(0)


def test_a_rank_that_reaches_another_program_ends(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ended, timer = threading.Event(), threading.Timer
    monkeypatch.setattr(rank, "exit_now", lambda status: ended.set())
    monkeypatch.setattr(threading, "Timer", lambda seconds, *rest: timer(seconds - 5.0, *rest))
    with socket.create_server(("127.0.0.1", port)) as other:
        thread = threading.Thread(target=join_a_silent_server, daemon=True)
        thread.start()
        connection, _ = other.accept()
        assert ended.wait(60)
    connection.close()
    thread.join(60)
    assert re.search(rf"error: rank 1: no rank 0 at .*MASTER_PORT={port}; another program", capsys.readouterr().err)


def test_a_rank_that_still_tries_to_reach_an_address_blames_no_other_program(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As where a network drops what is sent there: torch then tries beyond its limit."""
    statuses: list[int] = []
    monkeypatch.setattr(rank, "exit_now", statuses.append)
    rank._end_unanswered(1, f"MASTER_PORT={port}", 600.0)
    said = capsys.readouterr().err
    assert statuses == [1] and said.startswith(
        f"error: rank 1: rank 0 did not answer at MASTER_PORT={port} within 600 s"
    )
    assert "another program" not in said and said.endswith("whether this machine's network reaches that address\n")


def test_ranks_that_are_all_there_share_one_store(port: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank, "JOIN_TIMEOUT", 100 * rank.JOIN_TIMEOUT)
    stores = {}

    def share(number: int) -> None:
        stores[number] = RankInfo(number, 2)._store_at_master()

    threads = [threading.Thread(target=share, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    assert stores[1].timeout == rank.COLLECTIVE_TIMEOUT
