"""The address that the server listens on, and how many connections this process has room for."""

import os
import resource
import socket

from verl.utils.errors import ConfigError

_SPARE_DESCRIPTORS = 16  # for files and pipes that are opened while the server runs


def check_address(host: str, port: int) -> None:
    """ConfigError where nothing can listen on the address, such as where another program does."""
    try:
        for bound in bound_sockets(host, port):
            bound.close()
    except (OSError, OverflowError) as error:
        raise cannot_listen(host, port, error) from error


def cannot_listen(host: str, port: int, error: Exception) -> ConfigError:
    move = "--port 0 takes a free port" if 0 <= port < 1 << 16 else "a port is a number from 0 to 65535"
    return ConfigError(f"cannot listen on --host {host} --port {port}: {error}; {move}")


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of `host`, bound to `port` (0: a free one); OSError where an address cannot be had."""
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            sockets.append(listening := socket.socket(family, kind, protocol))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind((address[0], port or sockets[0].getsockname()[1], *address[2:]))
    except (OSError, OverflowError):
        for listening in sockets:
            listening.close()
        raise
    return sockets


def connections_that_fit() -> int:
    """How many more descriptors this process may have open, less `_SPARE_DESCRIPTORS`."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if not 0 < limit < 1 << 20:
        return 1 << 20
    return max(1, limit - len(os.listdir("/dev/fd")) - _SPARE_DESCRIPTORS)
