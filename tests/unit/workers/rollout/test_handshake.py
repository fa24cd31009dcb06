"""Only who knows the secret gets to a rollout server that listens, and no other peer keeps it waiting."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verl.utils.errors import TransportError
from verl.workers.rollout.remote import server as engine_server
from verl.workers.rollout.remote.handshake import accept_trainer, connect_to_server, new_secret

SECRET = new_secret()
Address = tuple[str, int]


@pytest.fixture
def server() -> Iterator[Address]:
    """The address of a server that gives 0.5 s to each peer, and then returns what its trainer sends."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()

    async def serve() -> None:
        reader, writer = await accept_trainer(listener, SECRET, limit_s=0.5)
        writer.write(await reader.readexactly(5))
        await writer.drain()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    yield address
    with contextlib.suppress(TransportError), connect_to_server(address, SECRET, 5.0) as connection:
        connection.sendall(b"hello")
    thread.join(30)
    assert not thread.is_alive()


def check_serves(address: Address) -> None:
    with connect_to_server(address, SECRET, 30.0) as connection:
        connection.sendall(b"hello")
        assert connection.recv(5, socket.MSG_WAITALL) == b"hello"
    with pytest.raises(TransportError, match="cannot be reached"):  # one trainer, and nobody after it
        connect_to_server(address, SECRET, 5.0)


def closes(connection: socket.socket) -> bool:
    """Whether the peer ends the connection; its greeting may come before."""
    connection.settimeout(30)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(100):
            pass
    return True


def test_a_wrong_secret_is_refused_and_the_right_one_is_served(server: Address):
    with pytest.raises(TransportError, match="did not prove that it belongs to this run: it closed the connection"):
        connect_to_server(server, new_secret(), 5.0)
    check_serves(server)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0" * 10_000])
def test_peers_that_send_nothing_or_garbage_are_closed_and_hold_up_nobody(server: Address, sent: bytes):
    peers = [socket.create_connection(server) for _ in range(8)]
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.sendall(sent)
    check_serves(server)
    for peer in peers:
        assert closes(peer)
        peer.close()


def test_an_answer_cannot_be_used_again(server: Address):
    """What another connection has proved proves nothing here, where the server's nonce is another."""
    heard: list[bytes] = []

    def record(listener: socket.socket) -> None:
        with listener.accept()[0] as trainer, socket.create_connection(server) as real:
            trainer.sendall(real.recv(47, socket.MSG_WAITALL))
            heard.append(trainer.recv(64, socket.MSG_WAITALL))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=record, args=(listener,))
        thread.start()
        with pytest.raises(TransportError):
            connect_to_server(listener.getsockname(), SECRET, 5.0)
        thread.join(30)
    with socket.create_connection(server) as again:
        again.sendall(heard[0])
        assert closes(again)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda peer: peer.sendall(b"220 mail.example ESMTP\r\n"), "another program"),
        (lambda peer: (peer.sendall(b"verl rollout 1\n" + b"\0" * 64), peer.recv(64)), "does not know the secret"),
        (lambda peer: peer.recv(1), "timed out"),
    ],
)
def test_a_trainer_gives_nothing_to_a_server_without_the_secret(answer: Callable[[socket.socket], object], said: str):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as peer:
                answer(peer)
                with contextlib.suppress(OSError):
                    peer.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(TransportError, match=said):
            connect_to_server(listener.getsockname(), SECRET, 0.5)
        thread.join(30)


def test_a_frame_that_is_too_large_is_refused_before_it_is_read():
    async def serve() -> None:
        ours, theirs = socket.socketpair()
        with ours:
            reader, writer = await asyncio.open_connection(sock=theirs)
            ours.sendall((1 << 40).to_bytes(8, "little"))
            try:
                await engine_server.RolloutServer(reader, writer).run()
            finally:
                writer.close()

    with pytest.raises(TransportError, match="1099511627776 bytes"):
        asyncio.run(serve())


def test_the_secret_comes_over_the_standard_input_and_the_server_ends_with_who_has_started_it(tmp_path: Path):
    program = "import time; from verl.workers.rollout.remote.server import read_secret\n"
    program += "print(read_secret().hex(), flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(SECRET)
    process.stdin.flush()
    assert process.stdout.readline().decode().strip() == SECRET.hex()
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(30) == -9
    process.stdout.close()
