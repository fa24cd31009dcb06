"""The Ray cluster of a run: joining or starting it, what ranks ask of it, and their environment."""

import contextlib
import importlib.util
import logging
import math
import os
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.plugin.platform import PlatformBase
from verl.utils.errors import ConfigError, VerlError

logger = logging.getLogger(__name__)

NODE_POLL_S = 1.0  # how often missing nodes are looked for
RESERVE_S = 20.0  # until devices that are there, but in use, are given up as taken
CURRENT_CLUSTER = "ray_current_cluster"  # the file where `ray start` leaves its address

OF_A_START = {"num_cpus", "num_gpus", "resources", "object_store_memory", "include_dashboard", "_temp_dir"}
"""Arguments of ray.init that a Ray which runs already refuses."""
# What ranks get unless the launching shell sets it; of the shell's variables those with these PREFIXES go with it.
RANK_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "VLLM_LOGGING_LEVEL": "WARN",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
    "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
    "HSA_NO_SCRATCH_RECLAIM": "1",
}
PREFIXES: tuple[str, ...] = ("VERL_", "HF_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "HCCL_", "VLLM_")
PREFIXES += ("OMP_", "GOMP_", "KMP_", "CUDA_DEVICE_MAX_")


def is_installed() -> bool:
    """Whether Ray can be imported; it is not yet."""
    return importlib.util.find_spec("ray") is not None


def check_installed() -> None:
    """ConfigError without Ray."""
    if not is_installed():
        raise ConfigError("trainer.runtime=ray needs Ray, which is not installed: pip install -e '.[ray]'")


def has_token() -> bool:
    """Whether there is a token to show to a cluster; Ray writes one when it starts for a program."""
    given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(given) or (Path.home() / ".ray" / "auth_token").is_file()


def asked_for_by_environment() -> str | None:
    """The variable that says that this program belongs to a Ray cluster, or None."""
    names = ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR")
    return next((name for name in names if os.environ.get(name)), None)


def local_head() -> str | None:
    """The address of the Ray that `ray start --head` began on this machine, if one listens there."""
    folder = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray"
    with contextlib.suppress(OSError, ValueError):
        address = (folder / CURRENT_CLUSTER).read_text().strip()
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=1.0):
            return address
    return None


@dataclass(frozen=True)
class Cluster:
    """The Ray that this program is connected to."""

    how: str  # "joined ...", "started a Ray on this machine"
    is_ours: bool  # whether `leave` ends the connection
    timeline: str | None = None

    def describe(self, platform: PlatformBase, asked: int) -> str:
        """Describes the cluster: its nodes and devices, and how many devices the run asks for."""
        name, nodes = device_resource(platform), alive_nodes()
        devices = sum(node.get(name, 0.0) for node in nodes)
        return f"Ray: {self.how}; {len(nodes)} node{'s' * (len(nodes) > 1)}, {devices:g} {name}, asked for {asked}"

    def leave(self) -> None:
        """Write the timeline, if one is wanted; disconnect, which ends a Ray that this program started."""
        import ray

        try:
            if self.timeline and ray.is_initialized():
                Path(self.timeline).parent.mkdir(parents=True, exist_ok=True)
                ray.timeline(self.timeline)
        finally:
            if self.is_ours:
                ray.shutdown()


def join_cluster(ray_init: Mapping[str, Any], timeline: str | None = None) -> Cluster:
    """Join RAY_ADDRESS, else the head on this machine, else start a Ray here. `ray_init` are arguments of ray.init.

    A Ray that this program has joined already is used as it is. ConfigError where nothing answers at RAY_ADDRESS.
    """
    check_installed()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a late call must not start another Ray
    if has_token() and "ray" not in sys.modules:  # `ray start` asks for it; Ray reads this variable once, when loaded
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    if ray.is_initialized():
        return Cluster("in the one that this program has joined already", False, timeline)
    settings = {"logging_level": "warning", **_given(ray_init)}
    address, where = settings.pop("address", None), "ray_kwargs.ray_init.address"
    if os.environ.get("RAY_ADDRESS"):
        address, where = os.environ["RAY_ADDRESS"], "RAY_ADDRESS"
    elif address is None and (address := local_head()) is not None:
        where = "the head of this machine"
    if address not in (None, "local"):
        joining = {name: value for name, value in settings.items() if name not in OF_A_START}
        try:
            ray.init(address=address, **joining)
        except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
            text = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"no Ray can be joined at {address} ({where}): {text}; start one there, or name another by RAY_ADDRESS"
            ) from error
        left = ", ".join(sorted(set(settings) & OF_A_START))
        note = f" (ray_kwargs.ray_init: {left} without effect, it runs already)" if left else ""
        return Cluster(f"joined {address} ({where}){note}", True, timeline)
    ray.init(address="local", **{"include_dashboard": False, **settings})
    return Cluster("started on this machine", True, timeline)


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not null, also those of sections."""
    found = {name: _given(value) if isinstance(value, Mapping) else value for name, value in settings.items()}
    return {name: value for name, value in found.items() if value is not None and value != {}}


def device_resource(platform: PlatformBase) -> str:
    """The resource that Ray counts for a rank's device: the platform's, or CPU."""
    return "CPU" if platform.device_name == "cpu" else platform.ray_resource_name()


def alive_nodes() -> list[dict[str, float]]:
    """The resources of every node of the cluster."""
    import ray

    nodes: Any = ray.nodes
    return [node["Resources"] for node in nodes() if node["Alive"]]


def full_store(what: str) -> VerlError:
    """The error where neither this node's object store nor the disk behind it has room for `what`."""
    import ray

    nodes: Any = ray.nodes
    here = ray.get_runtime_context().get_node_id()
    size = next((node["Resources"].get("object_store_memory", 0.0) for node in nodes() if node["NodeID"] == here), 0.0)
    return VerlError(
        f"Ray's object store on this node ({socket.gethostname()}) holds {size / 1e6:.1f} MB, and neither it nor the "
        f"disk to which Ray moves what does not fit has room for {what}; make room on that disk (that of "
        "ray_kwargs.ray_init._temp_dir, or /tmp), or give ray_kwargs.ray_init.object_store_memory=BYTES, or where Ray "
        "runs already ray start --object-store-memory=BYTES"
    )


@dataclass(frozen=True)
class Devices:
    """A group's request to Ray: equally many ranks on each of `num_nodes` machines, with a share of a device each."""

    platform: PlatformBase
    num_nodes: int = 1
    share: float = 1.0  # of a device, or of a core on CPUs; (0, 1]
    group_name: str = "verl"  # begins the name of the placement group
    wait_s: float = 0.0  # how long nodes that are missing are waited for
    first_node: int = 0  # the number of its first bundle

    @property
    def ranks_per_device(self) -> int:
        return int(1 / self.share + 1e-9)

    def of_ranks(self, count: int) -> dict[str, float]:
        """Ray's resources for `count` ranks of a node: parts of one device, or whole devices."""
        name, together = device_resource(self.platform), self.ranks_per_device
        amount = count * self.share if count <= together else float(math.ceil(count / together))
        return ({} if name == "CPU" else {"CPU": float(count)}) | {name: amount}

    def of_devices(self, count: int) -> dict[str, float]:
        """Ray's resources for `count` whole devices of a node, with a core each."""
        return {"CPU": float(count)} | {device_resource(self.platform): float(count)}

    def options_of(self, count: int) -> dict[str, Any]:
        """Options of an actor with `count` whole devices."""
        name = device_resource(self.platform)
        return {"num_cpus": count, **({} if name == "CPU" else self.platform.ray_resource_options(count))}

    def ranks_within(self, resources: Mapping[str, float]) -> int:
        """How many ranks such a node can hold."""
        name = device_resource(self.platform)
        held = int(resources.get(name, 0.0)) * self.ranks_per_device
        return held if name == "CPU" else min(held, int(resources.get("CPU", 0.0)))

    def actor_options(self) -> dict[str, Any]:
        if device_resource(self.platform) == "CPU":
            return {"num_cpus": self.share}
        return {"num_cpus": 1, **self.platform.ray_resource_options(self.share)}

    def check_apart(self, places: Sequence[tuple[str, str, list[str]]]) -> None:
        """ConfigError where two ranks of a group, at (node, address, devices), share one and cannot join there."""
        backend, first = self.platform.communication_backend_name(), dict[Any, int]()
        for rank, (node, address, ids) in enumerate(places):
            if backend != "gloo" and ids and (other := first.setdefault((node, *ids), rank)) != rank:
                raise ConfigError(
                    f"ranks {other} and {rank} of one pool got {device_resource(self.platform)} {ids[0]} of node "
                    f"{address}, and {backend} joins one rank a device; ray_kwargs.devices_per_rank={self.share:g} "
                    "shares devices between runs and pools of one rank a node: set it to 1, or lower n_gpus_per_node"
                )


def reserve(devices: Devices, ranks: int, who: str, beside: int = 0, apart: Sequence[int] = ()) -> Any:
    """A placement group for `ranks`, one bundle a node, `beside` of a node's ranks not being trainer.n_gpus_per_node's,
    and for `apart[node]` whole devices on each node, or on more nodes.

    ConfigError, with the numbers and the nearest that fits, where it cannot be had.
    """
    nodes = devices.num_nodes
    if ranks % nodes:
        raise ConfigError(f"{ranks} ranks cannot be shared evenly by {nodes} machines")
    bundles = [devices.of_ranks(ranks // nodes) for _ in range(nodes)] + [{} for _ in apart[nodes:]]
    for bundle, count in zip(bundles, apart, strict=False):
        if count:
            bundle |= {name: bundle.get(name, 0.0) + amount for name, amount in devices.of_devices(count).items()}
    there, fit = await_nodes(devices, bundles)
    kinds = [bundle for number, bundle in enumerate(bundles) if bundle not in bundles[:number]]
    need = f"{who} needs " + " and ".join(_nodes_with(bundles.count(bundle), bundle) for bundle in kinds)
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    have = " and ".join(_amounts({name: node.get(name, 0.0) for name in names}) for node in there[:8])
    more = f" and {len(there) - 8} nodes more" if len(there) > 8 else ""
    advice = "lower trainer.n_gpus_per_node or trainer.nnodes, or add nodes (ray start --address=HEAD)"
    if {*names} == {"CPU"}:
        advice += "; ray_kwargs.ray_init.num_cpus=N counts more cores on a Ray that the run starts"
    if fit < len(bundles):
        other = max(apart, default=0)
        nearest = "" if len(bundles) > nodes else _nearest(devices, ranks // nodes + other, beside + other, there)
        raise ConfigError(
            f"{need}, but {fit} of the cluster's {len(there)} can hold that ({have}{more}); {nearest}{advice}"
        )
    from ray.util.placement_group import placement_group, remove_placement_group

    name = f"{devices.group_name}-{uuid.uuid4().hex[:8]}"  # Ray refuses one that is in use
    group = placement_group(bundles, "STRICT_SPREAD" if len(bundles) > 1 else "PACK", name)
    limit_s = max(RESERVE_S, devices.wait_s)  # Ray counts a lost node for a while
    if not group.wait(limit_s):
        remove_placement_group(group)
        free = {name: _free().get(name, 0.0) for name in names}
        raise ConfigError(
            f"{need}, but after {limit_s:g} s only {_amounts(free)} of the cluster are free; wait for the other jobs "
            f"(ray status), or {advice}"
        )
    return group


def await_nodes(devices: Devices, bundles: Sequence[Mapping[str, float]]) -> tuple[list[dict[str, float]], int]:
    """The cluster's nodes, and how many of `bundles` they can hold, one each: when that is all, or after `wait_s`."""
    deadline, has_warned = time.monotonic() + devices.wait_s, False
    while True:
        there = alive_nodes()
        fit = _count_fitting(there, bundles, (device_resource(devices.platform), "CPU"))
        if fit >= len(bundles) or time.monotonic() >= deadline:
            return there, fit
        if not has_warned:
            logger.warning(
                "%d of %d nodes are there; waiting for the others for %g s (trainer.node_wait_s)",
                fit, len(bundles), devices.wait_s,
            )  # fmt: skip
        has_warned = True
        time.sleep(NODE_POLL_S)


def _count_fitting(
    nodes: Sequence[Mapping[str, float]], bundles: Sequence[Mapping[str, float]], names: Sequence[str]
) -> int:
    """How many bundles have a node each: the largest first, on the smallest node that can hold it."""

    def size(one: Mapping[str, float]) -> list[float]:
        return [one.get(name, 0.0) for name in names]

    free, count = sorted(nodes, key=size), 0
    for bundle in sorted(bundles, key=size, reverse=True):
        for node in free:
            if all(node.get(name, 0.0) >= amount for name, amount in bundle.items()):
                free.remove(node)
                count += 1
                break
    return count


def _nodes_with(count: int, bundle: dict[str, float]) -> str:
    return f"{count} node{'s' * (count > 1)} with {_amounts(bundle)} each"


def release(group: Any) -> None:
    """Give the devices of a placement group back; a Ray that has ended, or has lost its head, has done so."""
    import ray
    from ray.util.placement_group import remove_placement_group

    if ray.is_initialized():
        with contextlib.suppress(Exception):
            remove_placement_group(group)


def _nearest(devices: Devices, per_node: int, beside: int, there: list[dict[str, float]]) -> str:
    """The largest plan that this cluster can hold, with no more ranks than are asked for."""
    room = sorted((devices.ranks_within(node) - beside for node in there), reverse=True)
    asked, best = devices.num_nodes * (per_node - beside), (0, 0, 0)
    for nodes, ranks in enumerate(room, 1):
        count = min(ranks, asked // nodes)
        best = max(best, (nodes * count, -nodes, count))
    total, nodes, count = best
    return f"the nearest that fits is trainer.nnodes={-nodes} trainer.n_gpus_per_node={count}; " if total > 0 else ""


def _free() -> dict[str, float]:
    import ray

    available: Any = ray.available_resources
    return dict(available())


def rank_environment(platform: PlatformBase) -> dict[str, str]:
    """Variables of the ranks: the shell's by prefix, over the defaults, and what keeps Ray from hiding devices."""
    own = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    defaults = RANK_ENVIRONMENT | ({"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"} if platform.vendor_name == "amd" else {})
    known = {name: os.environ.get(name, value) for name, value in defaults.items()}
    visible = {name: os.environ[name] for name in platform.ray_noset_envvars() if name in os.environ}
    return {**known, **own, **visible}


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
