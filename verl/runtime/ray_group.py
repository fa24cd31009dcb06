"""Ranks as Ray's actors, on one machine or several.

Calls are those of `processes.py`; only the carrier differs. Arguments travel as JSON with the bytes of their tensors;
large ones lie in Ray's object store once, where the ranks of a node read them without a copy. The driver always has one
request for replies with each rank, and so hears of its death.
"""

import atexit
import contextlib
import os
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any

from verl.runtime import rank_server
from verl.runtime.calls import GRACE_S, RemoteGroup
from verl.runtime.group import Layout, ObjectOnNode
from verl.runtime.rank import RankInfo
from verl.runtime.rank_reports import blame_earliest
from verl.runtime.ray_cluster import Devices, device_resource, full_store, rank_environment, release, reserve
from verl.runtime.ray_objects import Factory, ObjectOnRay, plain
from verl.runtime.ray_processes import RanksOnRay
from verl.runtime.ray_rank import POLL_S, RankActor
from verl.runtime.stall_watch import STALL_TIMEOUT_S, StallWatch, describe_stuck
from verl.runtime.version_consistency import check_same, own_versions
from verl.runtime.wire import pack, unpack
from verl.utils.errors import VerlError, WorkerError

START_S = 180.0  # until every actor of a group has started
INLINE_BYTES = 65536  # what is smaller travels in the message itself


class RayGroup(RemoteGroup):
    """`layout.world_size` actors of Ray, each with a worker built by `factory()`, equally many in each bundle of the
    placement group `reserved`, or of one of their own.

    Ray must be joined (`join_cluster`), and this package must be importable on every node. Raises ConfigError where the
    cluster has not enough devices, and WorkerError when a rank fails, dies or stalls (inside a call, `stall_timeout_s`
    without CPU time or bytes; 0: never); after a death or a stall the group is unusable. With `nsight`, Ray starts the
    actors under `nsys profile` with these options.
    """

    actor_class: type = RankActor

    def __init__(
        self,
        factory: Callable[[], Any],
        layout: Layout,
        devices: Devices,
        name: str = "",
        ranks_on_machine: int | None = None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        reserved: Any = None,
        nsight: dict[str, str] | None = None,
    ):
        super().__init__(layout, name)
        self.nsight = nsight
        self.devices = devices
        self._reports = f"verl-ranks-{uuid.uuid4().hex}"  # a folder of each node's own for temporary files
        self._ranks: RanksOnRay | None = None
        self._stall_watch: StallWatch | None = None
        self._actors: list[Any] = []
        self._addresses: list[str] = []  # of the node of each rank
        self._sent: SimpleQueue[tuple[Any, int]] = SimpleQueue()  # messages of which it is not known that they arrived
        self._messages = [0] * layout.world_size  # sent to each rank
        self._owns_group = reserved is None
        self._group: Any = reserve(devices, layout.world_size, "the run") if reserved is None else reserved
        atexit.register(self.close)  # before Ray's own, so that nothing still waits for a rank
        try:
            self._start(factory, ranks_on_machine or layout.world_size)
            _, building = self._register_call("__init__", range(layout.world_size))
            threading.Thread(target=self._watch, name="ray replies", daemon=True).start()
            if self._ranks is not None:
                self._stall_watch = StallWatch(
                    self._ranks, layout.world_size, self._open_calls, self._fail_and_kill, stall_timeout_s
                ).start()
            self._wait_for_results(building)
        except BaseException:
            self.close()
            raise

    def _start(self, factory: Callable[[], Any], ranks_on_machine: int) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote: Any = ray.remote
        actor_class = remote(concurrency_groups={"replies": 1})(self.actor_class)
        environment = rank_environment(self.devices.platform)
        if self.nsight:  # Ray then starts `python`, which must be this one
            environment["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}${{PATH}}"
        for rank in range(self.layout.world_size):
            bundle = self.devices.first_node + rank * self.devices.num_nodes // self.layout.world_size
            options = {
                **self.devices.actor_options(),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, bundle),
                "runtime_env": {"env_vars": environment, **({"nsight": self.nsight} if self.nsight else {})},
                "max_restarts": 0,
            }
            self._actors.append(actor_class.options(**options).remote(self._label(rank)))
        resource = device_resource(self.devices.platform)
        places = self._ask([actor.place.remote(resource) for actor in self._actors])
        nodes = [node for node, _, _ in places]
        self.devices.check_apart(places)
        self._addresses = [address for _, address, _ in places]
        firsts = [nodes.index(node) for node in dict.fromkeys(nodes)]
        older = "\nhas a node an older version of this package? install the same on every node"
        found = self._ask([self._actors[rank].versions.remote() for rank in firsts], older)
        names = [f"node {places[rank][1]} (ranks from {rank})" for rank in firsts]
        check_same({"the driver's node": own_versions(), **dict(zip(names, found, strict=True))})
        address = rank_server.ADDRESS if len(set(nodes)) == 1 else places[0][1]
        [port] = self._ask([self._actors[0].open_store.remote(address)])
        started = []
        for rank, (node, _, ids) in enumerate(places):
            local = [other for other in range(len(nodes)) if nodes[other] == node]
            device = int(ids[0]) if ids and str(ids[0]).isdigit() else local.index(rank)
            on_machine = ranks_on_machine if len(set(nodes)) == 1 else len(local)
            info = RankInfo(rank, len(nodes), device, on_machine)
            variables, share_cores = info.env_variables(address, port), "OMP_NUM_THREADS" not in environment
            start = self._actors[rank].start
            started.append(start.remote(variables, share_cores, os.getcwd(), self._reports, factory))
        processes = self._ask(started)  # fails where a node cannot import the worker
        if all(processes):
            self._ranks = RanksOnRay(nodes, processes, self._reports)

    def _ask(self, refs: list[Any], advice: str = "") -> list[Any]:
        """The results; VerlError with `advice` where an actor does not start."""
        import ray

        try:
            return list(ray.get(refs, timeout=START_S))
        except ray.exceptions.RayError as error:
            raise VerlError(f"Ray could not start the ranks: {plain(error)}{advice}") from error

    def hold(
        self, factory: Factory, node: int, ranks: Sequence[int] = (), num_devices: int = 0, for_all: bool = False
    ) -> ObjectOnNode:
        options = {
            **(self.devices.options_of(num_devices) if num_devices else {"num_cpus": 0}),
            "runtime_env": {"env_vars": rank_environment(self.devices.platform)},
        }
        names = [name for rank in ranks for name in self._device_names[rank]]
        resource, has_ranks = device_resource(self.devices.platform), node < self.devices.num_nodes
        held = ObjectOnRay(factory, (self._group, node), options, resource, names, has_ranks, for_all)
        if self._ranks is not None:
            self._ranks.holders.append(held.actor)
        return held

    @cached_property
    def _device_names(self) -> list[list[str]]:
        """Ray's names of each rank's devices."""
        resource = device_resource(self.devices.platform)
        return self._ask([actor.device_names.remote(resource) for actor in self._actors])

    @property
    def address(self) -> str:
        return self._addresses[0]

    # --- messages ------------------------------------------------------------------------------------------------

    def _pack(self, arguments: list[tuple[Any, ...]]) -> Any:
        """One object: in the object store if it is large, once for all ranks that get it."""
        import ray

        packed = pack(arguments)
        size = len(packed[0]) + sum(array.nbytes for array in packed[1])
        if size < INLINE_BYTES:
            return packed
        try:
            return ray.put(packed)
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            raise full_store(f"{size / 1e6:.1f} MB of a call's arguments") from error

    def _send(self, rank: int, calls: list[tuple[int, str]], body: Any) -> None:
        sent = self._actors[rank].deliver.remote(self._messages[rank], pack(calls), body)
        self._sent.put((sent, rank))
        self._messages[rank] += 1

    def _poll(self, rank: int) -> Any:
        return self._actors[rank].replies.options(concurrency_group="replies").remote()

    def _watch(self) -> None:
        """Receive the replies, and hear of the death of a rank, until all have ended."""
        import ray

        polls = {self._poll(rank): rank for rank in range(self.layout.world_size)}
        sent: dict[Any, int] = {}
        while polls:
            with contextlib.suppress(Empty):
                while True:
                    sent.update([self._sent.get_nowait()])
            try:
                ready, _ = ray.wait([*polls, *sent], timeout=POLL_S)
            except Exception as error:  # Ray itself has ended
                for rank in polls.values():
                    self._on_death(rank, f"Ray has ended ({error})")
                return
            for ref in ready:
                rank = sent.pop(ref) if ref in sent else polls[ref]
                try:
                    replies = ray.get(ref) or ()
                    if polls.pop(ref, None) is not None:
                        polls[self._poll(rank)] = rank
                except Exception as error:
                    polls.pop(ref, None)
                    self._on_death(rank, f"its actor on node {self._addresses[rank]} has ended: {plain(error)}")
                    continue
                for text, arrays in replies:  # copied, so that the object store is free again
                    self._resolve(rank, *unpack((text, [array.copy() for array in arrays])))

    def _on_death(self, rank: int, reason: str) -> None:
        if not self._is_ending(rank):
            self._report_death(rank, reason)

    def _find_cause(self, error: WorkerError, since: float, stuck: Sequence[int] = ()) -> WorkerError:
        if self._ranks is None:
            return error
        texts = self._ranks.ask_for_stacks(stuck) if stuck else {}
        return blame_earliest(
            error, since, self._ranks.read_errors(), [describe_stuck(*item) for item in texts.items()]
        )

    def _kill_ranks(self) -> None:
        import ray

        if self._ranks is not None and self._failure is not None:
            self._ranks.kill()  # Ray waits for those that are stopped
        with contextlib.suppress(Exception):  # Ray may have ended
            for actor in self._actors:
                ray.kill(actor)
            if self._owns_group:
                release(self._group)

    def close(self) -> None:
        """Ask the ranks to end; kill those still running after GRACE_S. Calls of other threads then fail."""
        if self._closing:
            return
        self._closing = True
        if self._stall_watch is not None:
            self._stall_watch.end()
        atexit.unregister(self.close)
        import ray

        if ray.is_initialized():
            if self._failure is None:
                refs = [actor.finish.remote(n) for actor, n in zip(self._actors, self._messages, strict=False)]
                if refs:
                    ray.wait(refs, num_returns=len(refs), timeout=GRACE_S)
            self._kill_ranks()
            if self._ranks is not None:
                self._ranks.close()
