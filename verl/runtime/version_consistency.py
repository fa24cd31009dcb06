"""Versions of Python and the libraries that a run needs, which its nodes must share: compared before the first step.

An error: what computes or travels between ranks (Python, torch with its build and NCCL, transformers, a rollout engine,
this package), because ranks that differ compute different numbers, wait for each other without end, or cannot read each
other's messages. A warning: the rest, and NCCL or an engine that only some nodes have; it matters where it is to run.
"""

import hashlib
import json
import logging
import platform
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch.distributed as dist

import verl
from verl.plugin.installed import version_of
from verl.plugin.platform import get_platform
from verl.utils.errors import ConfigError, VerlError, WorkerError

logger = logging.getLogger(__name__)

MUST_AGREE = ("torch", "transformers")
ENGINES = ("vllm", "sglang")
SHOULD_AGREE = ("numpy", "safetensors", "tokenizers", "triton", "flash-attn", "peft")
ABSENT = "not installed"
ANSWER = timedelta(minutes=2)  # until every rank has said its versions: all have joined the store already
FAREWELL = timedelta(seconds=10)  # for the other ranks to read why the run ends, before the store goes

Versions = Mapping[str, str]


@cache
def own_versions() -> dict[str, str]:
    """The version of each package in this process's environment; of this package also a digest of its files."""
    digest = hashlib.sha256()
    root = Path(verl.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):  # as an editor's copies and locks
            digest.update(f"{name}\n".encode() + path.read_bytes())
    major, minor, patch = platform.python_version_tuple()
    return {
        "verl": f"{verl.__version__} (files {digest.hexdigest()[:8]})",
        "Python": f"{major}.{minor}",
        "Python's patch": f"{major}.{minor}.{patch}",
        "NCCL": _nccl_version(),
        **{name: version_of(name) or ABSENT for name in (*MUST_AGREE, *ENGINES, *SHOULD_AGREE)},
    }


def _nccl_version() -> str:
    """The version of NCCL that torch has loaded, where ranks join by it."""
    platform = get_platform()
    if platform.communication_backend_name() != "nccl" or not dist.is_nccl_available():
        return ABSENT
    return ".".join(map(str, platform.device_module.nccl.version()))


def check_same(by_node: Mapping[str, Versions]) -> None:
    """ConfigError that names node, package and both versions of what must be the same; warnings are logged.

    `by_node` are nodes in words; the others are compared with the first.
    """
    (first, wanted), *others = by_node.items()
    errors = []
    for name, version in wanted.items():
        different = {node: found.get(name, ABSENT) for node, found in others if found.get(name, ABSENT) != version}
        if not different:
            continue
        nodes = ", ".join(f"{found} on {node}" for node, found in [*different.items()][:4])
        more = f" and {len(different) - 4} nodes more" if len(different) > 4 else ""
        text = f"{name} is {version} on {first}, but {nodes}{more}"
        is_missing = ABSENT in (version, *different.values())
        if name in ("verl", "Python", *MUST_AGREE) or (name in ("NCCL", *ENGINES) and not is_missing):
            errors.append(text)
        else:
            logger.warning(text)
    if errors:
        raise ConfigError(f"{'; '.join(errors)}; install the same on every node")


def check_ranks(store: dist.Store, rank: int, world_size: int, limit: timedelta = ANSWER) -> None:
    """`check_same` of all ranks, which meet in `store`: ConfigError on every rank, warnings on rank 0.

    WorkerError names the ranks that have not said their versions after `limit`.
    """
    store.set(f"of/{rank}", json.dumps([socket.gethostname(), own_versions()]))
    if rank:
        _await_ranks(store, {0: "verdict"}, 2 * limit)
        verdict = json.loads(store.get("verdict"))
        store.set(f"read/{rank}", "yes")
        if verdict is not None:
            raise ConfigError(verdict)
        return
    by_node: dict[str, Versions] = {}
    keys = {other: f"of/{other}" for other in range(world_size)}
    verdict = None
    try:
        _await_ranks(store, keys, limit)
        for other, text in enumerate(store.multi_get([*keys.values()])):
            host, versions = json.loads(text)
            name = f"node {host}"
            by_node[name if by_node.get(name, versions) == versions else f"{name} (rank {other})"] = versions
        check_same(by_node)
    except VerlError as error:
        verdict = str(error)
        raise
    finally:
        store.set("verdict", json.dumps(verdict))
        if verdict is not None:
            with suppress(dist.DistStoreError):
                store.wait([f"read/{other}" for other in range(1, world_size)], FAREWELL)


def _await_ranks(store: dist.Store, keys: Mapping[int, str], limit: timedelta) -> None:
    """Until each of these ranks has set its key."""
    try:
        store.wait([*keys.values()], limit)
    except dist.DistNetworkError as error:
        what = "it has ended, and the store with it, before all ranks had compared their versions: look at what it says"
        raise WorkerError(0, "init_process_group", what) from error
    except dist.DistError as error:
        silent = [rank for rank, key in keys.items() if len(keys) == 1 or not store.check([key])] or [*keys]
        what = f"no versions were said within {limit.total_seconds():g} s by rank {', '.join(map(str, silent))}: "
        what += str(error).strip().partition("\n")[0].rstrip(".")
        what += "; is an older version of this package there?"
        raise WorkerError(silent[0], "init_process_group", what) from error
