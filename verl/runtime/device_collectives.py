"""The collectives in which a rank's device is, for libraries that poll while they wait: torch tells them.

Its flight recorder knows which ones have started and are not finished. Its worker server answers in threads that need
no interpreter, at a socket that only this user reaches.
"""

import http.client
import json
import os
import socket
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from verl.plugin.platform import get_platform

SERVER_SOCKET = "TORCH_WORKER_SERVER_SOCKET"
START_TIMES = "TORCH_NCCL_ENABLE_TIMING"  # else it is not known whether one has started, or stands behind a computation
_ANSWER_S = 1.0
_STARTED = "started"
_SERVERS = ExitStack()  # as long as the process


@dataclass(frozen=True)
class DeviceWait:
    """A collective that has started on a rank's device, and the ranks that have to enter it."""

    group: str
    number: int
    name: str
    members: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} number {self.number} of group {self.group}, on its device,"


def tell_device_waits(folder: Path, rank: int) -> None:
    """From now on this process answers `read_device_waits`, if its device's library polls. Before ranks join."""
    if (handler := get_platform().collectives_handler()) is None:
        return
    from torch.distributed.elastic.control_plane import worker_main

    os.environ.setdefault(START_TIMES, "1")
    os.environ[SERVER_SOCKET] = str(folder / f"rank_{rank}.waits.{handler}")
    server = worker_main()
    assert server is not None  # its decorator declares that it may be
    try:
        _SERVERS.enter_context(server)
    except RuntimeError as error:  # the path is too long for a socket, for instance
        warnings.warn(f"a stall on this rank's device will not be seen: {error}; set a shorter TMPDIR", stacklevel=2)
    finally:
        del os.environ[SERVER_SOCKET]  # processes that it starts have none


def read_device_waits(folder: Path, rank: int) -> tuple[DeviceWait, ...]:
    """The device waits of a rank of this machine, in the order of their start; empty where it reports none."""
    for path in folder.glob(f"rank_{rank}.waits.*"):
        server = _UnixConnection(path)
        try:
            server.request("POST", f"/handler{path.suffix.replace('.', '/')}?onlyactive=true")
            return _parse(server.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return ()  # it has ended, or torch tells something else
        finally:
            server.close()
    return ()


def are_complete(waits: Iterable[DeviceWait], waits_of_ranks: dict[int, tuple[DeviceWait, ...]]) -> bool:
    """Whether all members of one of these collectives have entered it: bytes may flow, which nobody counts."""
    return any(all(one in waits_of_ranks.get(rank, ()) for rank in one.members) for one in waits)


def _parse(answer: bytes) -> tuple[DeviceWait, ...]:
    trace = json.loads(answer)
    found = []
    for entry in trace["entries"]:
        if entry["state"] == _STARTED and not entry["retired"]:
            group, description = entry["process_group"]
            members = json.loads(trace["pg_config"][group]["ranks"])
            number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
            name = f"{group} ({description})"
            found.append(DeviceWait(name, int(number), str(entry["profiling_name"]), tuple(map(int, members))))
    return tuple(found)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path):
        super().__init__("localhost", timeout=_ANSWER_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))
