"""Servers of a reward model or a judge on the machines of a cluster, each beside an object of the driver there.

The driver asks a server through that object, so that the server listens at loopback. A judge is asked by the reward
function, and listens where that reaches it.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from verl.config.reward import ScoringModelConfig
from verl.rewards.reward_servers import PlannedServer, RewardServers, Server
from verl.runtime.group import ANSWER_S, ObjectOnNode
from verl.utils.errors import TransportError, VerlError
from verl.workers.rollout.remote.http_server import HOST, HTTPServerProcess, free_port
from verl.workers.rollout.remote.process import DriversSettings

START_S = 180.0  # until the object is there
END_S = 15.0  # until the server has ended

Factory = Callable[[str, list[str]], "ServerHere"]  # of the machine's address and the names of its devices


class ServerHere:
    """A server on this machine, for `devices`. It ends with this process."""

    def __init__(self, planned: PlannedServer, settings: DriversSettings, address: str, devices: Sequence[str]):
        host = address if planned.is_judge else HOST
        command, port = planned.command, free_port(host)
        environment = planned.environment(settings.environment(devices))
        name = f"{planned.name} on node {address}"
        self.process = HTTPServerProcess(name, command(host, port), environment, port, host)

    def wait_until_ready(self, limit_s: float, key: str) -> tuple[str, str]:
        """Waits until the server answers; returns its name and address."""
        self.process.wait_until_ready(limit_s, key)
        return self.process.name, self.process.address

    def answer(self, path: str, body: Any, limit_s: float) -> Any:
        """The server's answer to POST `path`."""
        return self.process.answer(path, body, limit_s)

    def close(self) -> None:
        """End the server."""
        self.process.close()


class HTTPServerOnNode:
    """A `ServerHere` on another machine, held by `held` there."""

    def __init__(self, name: str, held: ObjectOnNode):
        self.name, self.address, self.held = name, "", held

    def wait_until_ready(self, limit_s: float, key: str) -> None:
        self.name, self.address = self._call("wait_until_ready", limit_s, key, limit_s=limit_s + START_S)

    async def ask(self, path: str, body: Any, limit_s: float) -> Any:
        return await asyncio.to_thread(self._call, "answer", path, body, limit_s, limit_s=limit_s + ANSWER_S)

    def _call(self, method: str, *arguments: Any, limit_s: float) -> Any:
        try:
            return self.held.call(method, *arguments, limit_s=limit_s)
        except TimeoutError as error:
            raise TransportError(f"{self.name}: {error}") from error
        except VerlError as error:
            if type(error) is not VerlError:  # which the server's machine has raised
                raise
            raise TransportError(f"{self.name} is lost: {error}") from error

    def close(self) -> None:
        with suppress(VerlError, TimeoutError):  # its machine is lost
            self.held.call("close", limit_s=END_S)
        self.held.end()


def start_servers_on_nodes(
    settings: ScoringModelConfig,
    planned: Sequence[PlannedServer],
    hold: Callable[[PlannedServer, Factory], ObjectOnNode],
    of_driver: DriversSettings,
    started: ExitStack,
) -> RewardServers:
    """The servers, each where `hold` builds its object. `started` closes them; TransportError where one does not start,
    and ConfigError where its machine has other versions."""
    servers: list[Server] = []
    for one in planned:
        one.command(HOST, 0)  # reads its keys in this process, too, which reports those that nothing reads
        servers.append(HTTPServerOnNode(one.name, hold(one, partial(ServerHere, one, of_driver))))
        started.callback(servers[-1].close)
    return RewardServers(servers, settings, any(one.sleeps for one in planned))
