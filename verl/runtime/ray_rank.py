"""A rank as an actor of Ray: messages come in, replies wait, and the calls run in a thread of their own."""

import asyncio
import contextlib
import os
import socket
import threading
import warnings
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, cast

import torch.distributed as dist

from verl.plugin.platform import get_platform
from verl.runtime import rank_server
from verl.runtime.calls import GRACE_S
from verl.runtime.device_collectives import tell_device_waits
from verl.runtime.processes import loopback_interface
from verl.runtime.rank import RankInfo
from verl.runtime.rank_observation import RankProcess, threads_of_this_process
from verl.runtime.rank_reports import RankReports, folder_of_this_node
from verl.runtime.rank_server import CallServer
from verl.runtime.ray_objects import devices_of_this_actor
from verl.runtime.version_consistency import own_versions
from verl.runtime.wire import Packed, pack, unpack

POLL_S = 10.0  # after which a rank without replies says so


class _ActorServer(CallServer):
    """Messages arrive with a number, in any order; replies wait in a queue until the driver asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: RankReports | None = None
        self.replies: SimpleQueue[Packed] = SimpleQueue()
        self._early: dict[int, tuple[Packed, Packed] | None] = {}  # by number; None is the end
        self._next = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._loop = loop
        self._pass_on()

    def deliver(self, number: int, message: tuple[Packed, Packed] | None) -> None:
        with self._lock:
            self._early[number] = message
        self._pass_on()

    def _pass_on(self) -> None:
        with self._lock:
            while self._loop is not None and self._next in self._early:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self.inbox.put_nowait, self._early.pop(self._next))
                self._next += 1

    def unpack(self, packed: Packed) -> Any:
        return unpack(packed)

    def record(self, method: str, error: BaseException) -> None:
        if self.reports is not None:
            self.reports.record(method, error)

    def send(self, reply: tuple[int, bool, Any]) -> None:
        text, arrays = pack(reply)
        self.replies.put((text, [array.copy() for array in arrays]))  # the worker may change its tensors meanwhile


class RankActor:
    """The actor of one rank."""

    def __init__(self, label: str):
        self.label, self.server = label, _ActorServer()
        self.thread: threading.Thread | None = None
        self.store: dist.TCPStore | None = None

    def __repr__(self) -> str:
        return self.label  # Ray writes it before what the rank prints

    def place(self, resource: str) -> tuple[str, str, list[str]]:
        """Id and address of the node, and the devices that Ray gave this rank: ids, or places among the visible."""
        import ray

        context, address = ray.get_runtime_context(), cast(Any, ray.util.get_node_ip_address)
        ids = devices_of_this_actor(resource)
        visible = os.environ.get(get_platform().visible_devices_envvar() or "-", "").split(",")
        if len(visible) > 1:  # Ray leaves them as they are (RAY_EXPERIMENTAL_NOSET_...), and its ids are from that list
            ids = [str(visible.index(device)) for device in ids if device in visible]
        return context.get_node_id(), str(address()), ids

    def device_names(self, resource: str) -> list[str]:
        """Ray's names of the devices that it gave this rank."""
        return devices_of_this_actor(resource)

    def versions(self) -> dict[str, str]:
        """The versions of this rank's environment."""
        return own_versions()

    def open_store(self, address: str) -> int:
        """Open the store where the ranks meet; returns its port."""
        listener = socket.create_server((address, 0))
        port = int(listener.getsockname()[1])
        self.store = dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return port

    def start(
        self, variables: dict[str, str], share_cores: bool, folder: str, reports: str, factory: Callable[[], Any]
    ) -> RankProcess:
        """Join the other ranks and build the worker, in the thread of the calls; the reply says how that ended.

        `variables` are those that torchrun would set. Paths are relative to `folder`, that of the driver; `reports` is
        the name of this node's folder for reports.
        """
        try:
            found = RankReports(folder_of_this_node(reports), int(variables["RANK"]))
            found.open()
            tell_device_waits(found.folder, found.rank)
            self.server.reports = found
        except OSError as error:
            warnings.warn(f"this node has no room for reports: a stall here has no stack: {error}", stacklevel=1)
        try:
            os.chdir(folder)
        except OSError as error:
            warnings.warn(f"this node has not the folder of the run, only whole paths lead on: {error}", stacklevel=1)
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # tensors in the object store
        if share_cores:
            os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the cores it counts for this rank
        os.environ.update(variables)
        address, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
        if address == rank_server.ADDRESS and (interface := loopback_interface()) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)

        def build() -> Any:
            RankInfo.from_environment().init_process_group(
                dist.PrefixStore("ranks", dist.TCPStore(address, port, is_master=False))
            )
            return factory()

        of_ray = threads_of_this_process()
        self.thread = threading.Thread(target=self._serve, args=(build,), name="calls", daemon=True)
        self.thread.start()
        return RankProcess(os.getpid(), self.thread.native_id, frozenset(of_ray))

    def _serve(self, build: Callable[[], Any]) -> None:
        # Ray makes uvloop the default where it is installed; its stacks do not show that a rank waits for its driver
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(self.server.run(build))
        if dist.is_initialized():
            dist.destroy_process_group()

    def deliver(self, number: int, header: Packed, body: Packed) -> None:
        """Take message `number`: calls and their arguments."""
        self.server.deliver(number, (header, body))

    def finish(self, number: int) -> None:
        """End after the messages before `number`."""
        self.server.deliver(number, None)
        if self.thread is not None:
            self.thread.join(GRACE_S)

    def replies(self) -> list[Packed]:
        """The replies since the last time; waits for the first, but not longer than POLL_S."""
        found: list[Packed] = []
        with contextlib.suppress(Empty):
            found.append(self.server.replies.get(timeout=POLL_S))
            while True:
                found.append(self.server.replies.get_nowait())
        return found
