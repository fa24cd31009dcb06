"""Versions of Python and the libraries that a run needs, which its nodes must share: compared before the first step.

An error: what computes or travels between ranks (Python, torch with its build and NCCL, transformers, a rollout engine,
this package), because ranks that differ compute different numbers, wait for each other without end, or cannot read each
other's messages. A warning: the rest, and an engine that only some nodes have, which matters where it is to run.
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
from verl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

MUST_AGREE = {"torch": ("torch",), "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"), "transformers": ("transformers",)}
ENGINES = ("vllm", "sglang")
SHOULD_AGREE = ("numpy", "safetensors", "tokenizers", "triton", "flash-attn", "peft")
ABSENT = "not installed"
FAREWELL = timedelta(seconds=10)  # for the other ranks to read why the run ends, before the store goes

Versions = Mapping[str, str]


@cache
def own_versions() -> dict[str, str]:
    """By package, the version in this process's environment; of this package also a digest of its files."""
    digest = hashlib.sha256()
    root = Path(verl.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    major, minor, patch = platform.python_version_tuple()
    named = {**MUST_AGREE, **{name: (name,) for name in (*ENGINES, *SHOULD_AGREE)}}
    return {
        "verl": f"{verl.__version__} (files {digest.hexdigest()[:8]})",
        "Python": f"{major}.{minor}",
        "Python's patch": f"{major}.{minor}.{patch}",
        **{name: version_of(*distributions) or ABSENT for name, distributions in named.items()},
    }


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
        if name in ("verl", "Python", *MUST_AGREE) or (name in ENGINES and not is_missing):
            errors.append(text)
        else:
            logger.warning(text)
    if errors:
        raise ConfigError(f"{'; '.join(errors)}; install the same on every node")


def check_ranks(store: dist.Store, rank: int, world_size: int) -> None:
    """`check_same` of all ranks, which meet in `store`: ConfigError on every rank, warnings on rank 0."""
    store.set(f"of/{rank}", json.dumps([socket.gethostname(), own_versions()]))
    if rank:
        verdict = json.loads(store.get("verdict"))
        store.set(f"read/{rank}", "yes")
        if verdict is not None:
            raise ConfigError(verdict)
        return
    by_node: dict[str, Versions] = {}
    for other, text in enumerate(store.multi_get([f"of/{other}" for other in range(world_size)])):
        host, versions = json.loads(text)
        name = f"node {host}"
        by_node[name if by_node.get(name, versions) == versions else f"{name} (rank {other})"] = versions
    verdict = None
    try:
        check_same(by_node)
    except ConfigError as error:
        verdict = str(error)
        raise
    finally:
        store.set("verdict", json.dumps(verdict))
        if verdict is not None:
            with suppress(dist.DistStoreError):
                store.wait([f"read/{other}" for other in range(1, world_size)], FAREWELL)
