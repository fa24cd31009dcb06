"""Ports and addresses; stdlib only. Published transports import this path."""

import ipaddress
import socket


def is_valid_ipv6_address(address: str) -> bool:
    """Whether `address` is an IPv6 address, without brackets; a zone ("%eth0") is allowed."""
    try:
        ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return False
    return True


def get_free_port(address: str = "", with_alive_sock: bool = False) -> tuple[int, socket.socket | None]:
    """A TCP port that nobody listens on at `address`, and the bound socket that holds it when `with_alive_sock`.

    Without the socket, the port is free at the time of the call, and another process may take it afterwards.
    """
    family = socket.AF_INET6 if is_valid_ipv6_address(address) else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, 0))
    except OSError:
        sock.close()
        raise
    port = sock.getsockname()[1]
    if with_alive_sock:
        return port, sock
    sock.close()
    return port, None
