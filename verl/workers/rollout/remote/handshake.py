"""How a rollout server and its trainer recognise each other on a socket that others can reach.

Each sends a nonce, and HMAC-SHA256 of both nonces by a secret that the launcher gave both. What follows is neither
encrypted nor signed.
"""

import asyncio
import hmac
import secrets
import socket
import time

from verl.utils.errors import TransportError

SECRET_BYTES = NONCE_BYTES = DIGEST_BYTES = 32
HANDSHAKE_S = 10.0  # which a peer may take for all of it
_MAX_PEERS = 64  # that are heard at once
_GREETING = b"verl rollout 1\n"


def new_secret() -> bytes:
    """A secret for one server."""
    return secrets.token_bytes(SECRET_BYTES)


def _proof(secret: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, _GREETING + who + nonces, "sha256")


async def accept_trainer(
    listener: socket.socket, secret: bytes, limit_s: float = HANDSHAKE_S
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The first connection whose peer knows `secret`; then the listener and all others are closed. One that does not
    prove it within `limit_s` is closed before."""
    found: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()
    peers: set[asyncio.StreamWriter] = set()

    async def knows_secret(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        ours = secrets.token_bytes(NONCE_BYTES)
        writer.write(_GREETING + ours)
        theirs = await reader.readexactly(NONCE_BYTES)
        proof = await reader.readexactly(DIGEST_BYTES)
        if not hmac.compare_digest(proof, _proof(secret, b"trainer", ours + theirs)):
            return False
        writer.write(_proof(secret, b"server", ours + theirs))
        await writer.drain()
        return True

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.add(writer)
        try:
            async with asyncio.timeout(limit_s):
                is_trainer = len(peers) <= _MAX_PEERS and await knows_secret(reader, writer)
        except (OSError, EOFError, TimeoutError):
            is_trainer = False
        peers.discard(writer)
        if is_trainer and not found.done():
            found.set_result((reader, writer))
        else:
            writer.close()

    server = await asyncio.start_server(meet, sock=listener)
    try:
        return await found
    finally:
        server.close()
        for other in peers:
            other.close()


def connect_to_server(address: tuple[str, int], secret: bytes, limit_s: float = HANDSHAKE_S) -> socket.socket:
    """A connection to the server that listens at `address` and knows `secret`; TransportError where it does not answer
    so within `limit_s`."""
    where = f"the rollout server at {address[0]}:{address[1]}"
    try:
        connection = socket.create_connection(address, limit_s)
    except OSError as error:
        raise TransportError(
            f"{where} cannot be reached from the driver: {error}; the machines of a run must reach each other's ports"
        ) from error
    ends = time.monotonic() + limit_s

    def read(count: int) -> bytes:
        data = b""
        while len(data) < count:
            connection.settimeout(max(ends - time.monotonic(), 0.001))
            if not (part := connection.recv(count - len(data))):
                raise EOFError("it closed the connection")
            data += part
        return data

    try:
        if read(len(_GREETING)) != _GREETING:
            raise EOFError("it is another program, or another version of this package")
        theirs, ours = read(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        connection.sendall(ours + _proof(secret, b"trainer", theirs + ours))
        if not hmac.compare_digest(read(DIGEST_BYTES), _proof(secret, b"server", theirs + ours)):
            raise EOFError("it does not know the secret")
    except (OSError, EOFError) as error:
        connection.close()
        raise TransportError(f"{where} did not prove that it belongs to this run: {error}") from error
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # calls are short
    return connection
