"""Objects of the driver on the nodes of its ranks, each in a small actor of Ray."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from verl.runtime.group import ANSWER_S, ObjectOnNode
from verl.runtime.rank_observation import Counters, helpers_of
from verl.runtime.ray_cluster import alive_nodes
from verl.utils.errors import VerlError

LOOPBACK = "127.0.0.1"
CALLS_AT_ONCE = 8  # of one object
Factory = Callable[[str, list[str]], Any]  # of the address at which the driver reaches the node, and device names


def devices_of_this_actor(resource: str) -> list[str]:
    """The names that Ray gives the devices of this actor."""
    import ray

    return list(ray.get_runtime_context().get_accelerator_ids().get(resource, []))


class _Holder:
    """The actor: it builds the object and calls its methods."""

    def __init__(self, factory: Factory, resource: str, devices: list[str], near: str):
        import ray

        address = cast(Any, ray.util.get_node_ip_address)
        self.node, is_near = str(address()), ray.get_runtime_context().get_node_id() == near
        self.item = factory(LOOPBACK if is_near else self.node, devices or devices_of_this_actor(resource))

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self.item, method)(*arguments)

    def versions(self) -> tuple[str, dict[str, str]]:
        from verl.runtime.version_consistency import own_versions  # loads torch, as the object need not

        return self.node, own_versions()

    def look_at_helpers(self) -> dict[tuple[str, int], Counters]:
        return helpers_of([os.getpid()])


class ObjectOnRay(ObjectOnNode):
    """An object that `factory` builds in `placement`: a placement group and the number of a bundle.

    It is for the devices named, or for those that Ray gives its actor, with `options`, as `resource`. `has_ranks`: the
    node's versions are known to be the driver's. `for_all`: it is told an address that every machine reaches.
    """

    def __init__(
        self,
        factory: Factory,
        placement: tuple[Any, int],
        options: dict[str, Any],
        resource: str,
        devices: Sequence[str] = (),
        has_ranks: bool = True,
        for_all: bool = False,
    ):
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote, drivers_node = cast(Any, ray.remote), ray.get_runtime_context().get_node_id()
        there = {"scheduling_strategy": PlacementGroupSchedulingStrategy(*placement), "max_restarts": 0}
        actor_class = remote(_Holder).options(max_concurrency=CALLS_AT_ONCE, **there, **options)
        near = "" if for_all and len(alive_nodes()) > 1 else drivers_node  # where loopback is enough
        self.actor = actor_class.remote(factory, resource, list(devices), near)
        self.is_checked = has_ranks

    def call(self, method: str, *args: Any, limit_s: float = ANSWER_S) -> Any:
        if not self.is_checked:
            from verl.runtime.version_consistency import check_same, own_versions

            node, versions = self._answer(self.actor.versions.remote(), limit_s)
            check_same({"the driver's node": own_versions(), f"node {node}": versions})
            self.is_checked = True
        return self._answer(self.actor.call.remote(method, args), limit_s)

    def _answer(self, answer: Any, limit_s: float) -> Any:
        import ray

        try:
            return ray.get(answer, timeout=limit_s)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"its node has not answered for {limit_s:g} s") from None
        except Exception as error:  # its own, or Ray's, which may have ended
            if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, VerlError):
                raise error.cause from None
            raise VerlError(plain(error)) from error

    def end(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # Ray may have ended
            ray.kill(self.actor)


class FreeActor:
    """`factory(*arguments)` in an actor of Ray on any node; it takes no core. VerlError where that fails."""

    def __init__(self, factory: Callable[..., Any], *arguments: Any):
        import ray

        remote = cast(Any, ray.remote)
        self._actor = (
            remote(factory).options(num_cpus=0, max_restarts=0, scheduling_strategy="SPREAD").remote(*arguments)
        )
        try:
            ray.get(self._actor.__ray_ready__.remote())
        except ray.exceptions.RayError as error:
            raise VerlError(plain(error)) from error

    def call(self, method: str, *arguments: Any, limit_s: float | None) -> Any:
        """TimeoutError after `limit_s`, EOFError where the actor is gone."""
        import ray

        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=limit_s)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"no answer in {limit_s:g} s") from None
        except ray.exceptions.RayActorError as error:
            raise EOFError(plain(error)) from error

    def end(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # Ray may have ended
            ray.kill(self._actor)


def is_joined() -> bool:
    """Whether this program has joined a Ray; it is not loaded for that."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def plain(error: Exception) -> str:
    """The text of an error of Ray without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
