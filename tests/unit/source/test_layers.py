"""Imports point strictly down, rooms of one layer are strangers, and heavy libraries stay in their adapters."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

LAYERS = (
    ("utils",),
    ("config", "plugin"),
    ("data",),
    ("algorithms", "runtime", "observe"),
    ("models",),
    ("checkpoint_engine",),
    ("workers.engine", "workers.rollout"),
    ("workers",),  # driver-side handles over the two
    ("weight_sync", "agent", "rewards"),
    ("trainer",),
    ("commands",),
    ("experimental", "cli"),
)
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}

# Thin modules at import paths that other people's code uses. They may look anywhere; nothing inside may import one.
SHIMS = {
    "verl.experimental.agent_loop",
    "verl.model_merger",
    "verl.protocol",
    "verl.single_controller",
    "verl.tools",
    "verl.trainer.certify",
    "verl.trainer.config",
    "verl.trainer.main_eval",
    "verl.trainer.main_generation_server",
    "verl.trainer.ppo.core_algos",
    "verl.utils.device",
    "verl.utils.distributed",
    "verl.utils.net_utils",
    "verl.utils.reward_score",
    "verl.workers.config",
    "verl.workers.engine.fsdp",
    "verl.workers.engine.megatron",
}
# Who may import a heavy library, lazily or not: its adapter.
ADAPTERS = {
    "hydra": {"verl.config"},
    "omegaconf": {"verl.config"},
    "wandb": {"verl.observe.trackers"},
    "mlflow": {"verl.observe.trackers"},
    "tensorboard": {"verl.observe.trackers"},
    "ray": {"verl.runtime.ray"},
    "vllm": {"verl.workers.rollout.vllm_engine", "verl.workers.rollout.vllm_worker"},
    "sglang": {"verl.workers.rollout.sglang_engine"},
    "megatron": {"verl.workers.engine.megatron_engine"},
    "veomni": {"verl.workers.engine.veomni_engine"},
    "torch_npu": {"verl.plugin.platform.npu"},
    "flash_attn": {"verl.models.attention.packed"},
}
Import = tuple[str, int, str]  # importing module, line, imported name with dots


def covers(prefixes, module: str) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def room_of(module: str) -> str | None:
    """'verl.workers.engine.base' -> 'workers.engine'; None for `verl` itself."""
    parts = module.split(".")[1:]
    return next((room for room in (".".join(parts[:2]), ".".join(parts[:1])) if room in RANK), None)


def module_name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path, root: Path) -> Iterator[Import]:
    """Every import statement of a file, at any depth of nesting, `from a import b` as a.b, relative ones resolved."""
    module = module_name(path, root)
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((module, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, node.lineno, f"{source}.{alias.name}") for alias in node.names)


def all_imports(root: Path) -> list[tuple[Path, Import]]:
    return [(path, found) for path in sorted((root / "verl").rglob("*.py")) for found in imports_of(path, root)]


def violations(root: Path) -> list[str]:
    """One line 'file:line imports X: why not' per forbidden import."""
    out = []
    for path, (module, line, target) in all_imports(root):
        where = f"{path.relative_to(root)}:{line} imports {target}"
        top = target.split(".")[0]
        here, there = room_of(module), room_of(target) if top == "verl" else None
        if top in ADAPTERS and not covers(ADAPTERS[top], module):
            out.append(f"{where}: {top} belongs in {' or '.join(sorted(ADAPTERS[top]))}")
        if covers(SHIMS, module):
            continue
        if covers(SHIMS, target):
            out.append(f"{where}: a shim is for other people's code; import what is behind it")
        elif there is not None and here is not None and there != here and RANK[there] >= RANK[here]:
            out.append(f"{where}: {there} is not below {here}")
        elif here == "utils" and top != "verl" and top not in sys.stdlib_module_names:
            out.append(f"{where}: utils uses the standard library only")
        elif here is None and module != "verl":
            out.append(f"{path.relative_to(root)}: {module} is in no layer; add it to LAYERS or SHIMS")
    return out


def test_imports_point_strictly_down():
    assert not violations(ROOT), "\n" + "\n".join(violations(ROOT))


def test_every_listed_room_is_there_or_still_to_come():
    rooms = {p.name.removesuffix(".py") for p in (ROOT / "verl").iterdir() if p.name[0] != "_" and p.name[0] != "."}
    known = {room.split(".")[0] for room in RANK} | {shim.split(".")[1] for shim in SHIMS}
    assert rooms <= known, f"no layer for {sorted(rooms - known)}"


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        (
            "data/x.py",
            "from verl.models.head.token_outputs import f",
            "verl/data/x.py:2 imports verl.models.head.token_outputs.f: models is not",
        ),
        ("data/x.py", "def f():\n    import verl.trainer.sft", "verl/data/x.py:3 imports verl.trainer.sft: trainer"),
        ("algorithms/x.py", "from verl.observe import timers", "observe is not below algorithms"),
        ("workers/engine/x.py", "from verl.workers.rollout.base import A", "workers.rollout is not below workers.eng"),
        ("workers/engine/x.py", "from ..actor import Actor", "verl.workers.actor.Actor: workers is not below"),
        ("utils/x.py", "import torch", "utils uses the standard library only"),
        ("trainer/x.py", "import ray", "ray belongs in verl.runtime.ray"),
        ("trainer/x.py", "from verl.trainer.ppo.core_algos import agg_loss", "a shim is for other people's code"),
        ("misc/x.py", "import os", "verl.misc.x is in no layer"),
        ("runtime/x.py", "from verl import trainer", "trainer is not below runtime"),
    ],
)
def test_a_forbidden_import_is_named_with_file_and_line(tmp_path, file, line, message):
    path = tmp_path / "verl" / file
    path.parent.mkdir(parents=True)
    path.write_text(f"# comment\n{line}\n")
    (found,) = violations(tmp_path)
    assert message in found


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("models/x.py", "from verl.data.batch import Batch"),
        ("workers/actor.py", "from verl.workers.engine.base import BaseEngine"),
        ("trainer/ppo/core_algos.py", "import verl.experimental"),
        ("data/x.py", "from verl.data import batch\nfrom . import packing\nfrom verl import __version__"),
        ("runtime/ray.py", "def start():\n    import ray"),
    ],
)
def test_an_allowed_import_passes(tmp_path, file, line):
    path = tmp_path / "verl" / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert violations(tmp_path) == []
