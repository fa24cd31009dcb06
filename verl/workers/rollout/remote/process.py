"""The process of a rollout server: on this machine, or on another where an object of the driver watches over it."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from verl.plugin.platform import PlatformBase
from verl.runtime.child import Child, finds_verl
from verl.runtime.group import ObjectOnNode
from verl.runtime.rank_observation import Counters, family, waits_for_disk
from verl.utils.errors import VerlError
from verl.workers.rollout.remote.handshake import connect_to_server

_END_S = 15.0  # that the machine of a server may take to say how it ended


class LocalServer:
    """A server on this machine, reached over a private socket pair, or with `address` over a socket that listens there
    for a trainer that knows `secret`. `name` says which process it is."""

    def __init__(
        self, python: str | None, environment: dict[str, str], address: str | None = None, secret: bytes = b""
    ):
        self.address: tuple[str, int] | None = None
        self.socket: socket.socket | None = None  # our end
        if address is None:
            self.socket, theirs = socket.socketpair()
        else:
            theirs = socket.create_server((address, 0))
            self.address = theirs.getsockname()[:2]
        server = [python or sys.executable, "-m", "verl.workers.rollout.remote.server"]
        flag, stdin = ("--descriptor", subprocess.DEVNULL) if address is None else ("--listener", subprocess.PIPE)
        self.child = Child([*server, flag], finds_verl(environment), theirs, stdin, log_prefix="verl-rollout-")
        self.process = self.child.process
        if self.process.stdin is not None:  # which stays open: the server ends with who has started it
            with contextlib.suppress(OSError):  # it has ended
                self.process.stdin.write(secret)
                self.process.stdin.flush()
        self.name = f"its process {self.process.pid}"

    def connect(self) -> socket.socket:
        """The connection to it."""
        assert self.socket is not None, "it listens"
        return self.socket

    def listens_at(self) -> tuple[str, int] | None:
        """Address and port, where it listens."""
        return self.address

    def look(self) -> Counters | None:
        """Counters of the server and all processes below it; None where they are not known."""
        now = Counters.read(self.process.pid)
        used = sum(counters.cpu_s for counters in family({self.process.pid}).values())
        return now and replace(now, cpu_s=used, num_bytes=0)

    def waits_for_disk(self) -> bool:
        """Whether a thread of it waits for a disk."""
        return waits_for_disk(self.process.pid)

    def kill(self) -> None:
        """End it and all that it has started at once."""
        self.child.kill()

    def how_it_ended(self, known: str = "") -> str:
        """`known`, or its exit code, for which it waits; and the last lines of its output."""
        how = self.child.how_it_ended()
        if how is None:
            return "its process closed the connection; start the run again, it resumes from its last checkpoint"
        return f"{known or f'its process ended with {how}'}; {self.child.last_lines()}"

    def stop(self) -> None:
        """Close the connection, which ends it, and delete its output."""
        shut_down(self.socket)
        self.child.close()


@dataclass(frozen=True)
class DriversSettings:
    """Settings that the driver hands to processes on other machines."""

    folder: str
    share_cores: bool  # also those that Ray counts for others
    shown_by: tuple[str, ...]  # variables that show a process its devices
    variables: dict[str, str]

    @classmethod
    def on(cls, platform: PlatformBase) -> "DriversSettings":
        """The settings of this process, which is the driver."""
        shown_by, variables = platform.visible_devices_envvars(), platform.rollout_env_vars()
        return cls(os.getcwd(), "OMP_NUM_THREADS" not in os.environ, shown_by, variables)

    def environment(self, devices: Sequence[str]) -> dict[str, str]:
        """Environment of a child that sees `devices`, if any. Also changes this process's working directory."""
        with contextlib.suppress(OSError):  # paths are relative to the driver's folder, where this node has it
            os.chdir(self.folder)
        shown = {name: ",".join(devices) for name in self.shown_by if devices}
        environment = {**os.environ, **self.variables, **shown}
        if self.share_cores:
            environment.pop("OMP_NUM_THREADS", None)  # Ray sets it to the cores it counts for its actor
        return environment


def start_on_node(
    python: str | None, secret: bytes, settings: DriversSettings, address: str, devices: Sequence[str]
) -> LocalServer:
    """A server on this node for `devices`, which listens at its `address` for a trainer that knows `secret`."""
    return LocalServer(python, settings.environment(devices), address, secret)


class ServerOnNode:
    """A `LocalServer` on another machine, started by `start_on_node` and held by `held` there. TransportError where it
    cannot be connected to within `start_s`; VerlError of `look` where its machine is lost."""

    def __init__(self, held: ObjectOnNode, secret: bytes, start_s: float):
        self.held, self.secret, self.start_s = held, secret, start_s
        self.name = "its process"
        self.socket: socket.socket | None = None

    def connect(self) -> socket.socket:
        host, port = self.held.call("listens_at", limit_s=self.start_s)
        self.name = f"its process on node {host}"
        self.socket = connect_to_server((host, port), self.secret, self.start_s)
        return self.socket

    def look(self) -> Counters | None:
        try:
            return self.held.call("look")
        except TimeoutError:
            return None

    def waits_for_disk(self) -> bool:
        try:
            return bool(self.held.call("waits_for_disk"))
        except TimeoutError:
            return True

    def kill(self) -> None:
        with contextlib.suppress(VerlError, TimeoutError):
            self.held.call("kill")

    def how_it_ended(self, known: str = "") -> str:
        try:
            return str(self.held.call("how_it_ended", known, limit_s=_END_S))
        except (VerlError, TimeoutError) as error:
            return known or str(error)

    def stop(self) -> None:
        shut_down(self.socket)
        if self.socket is not None:  # else it has not started, and ends with who has to start it
            with contextlib.suppress(VerlError, TimeoutError):
                self.held.call("stop", limit_s=_END_S)
        self.held.end()


def shut_down(connection: socket.socket | None) -> None:
    """Close a connection for both ends, if there is one."""
    if connection is not None:
        with contextlib.suppress(OSError):  # already closed
            connection.shutdown(socket.SHUT_RDWR)


Server = LocalServer | ServerOnNode
