"""Imports point strictly down, rooms of one layer are strangers, and heavy libraries stay in their adapters."""

import ast
import sys
from pathlib import Path

import pytest

from scripts.layers import RANK, SHIMS, all_imports, covers, module_name, room_of

ROOT = Path(__file__).resolve().parents[3]

# Who may import a heavy library, lazily or not: its adapter.
ADAPTERS = {
    "hydra": {"verl.config"},
    "omegaconf": {"verl.config"},
    "wandb": {"verl.observe.trackers"},
    "mlflow": {"verl.observe.trackers", "verl.observe.tracing.backends"},
    "weave": {"verl.observe.tracing.backends"},
    "trackio": {"verl.observe.hosted_trackers", "verl.observe.tracing.backends"},
    "swanlab": {"verl.observe.hosted_trackers"},
    "clearml": {"verl.observe.hosted_trackers"},
    "opentelemetry": {"verl.observe.tracing.backends"},
    "tensorboard": {"verl.observe.trackers"},
    "ray": {f"verl.runtime.ray_{part}" for part in ("cluster", "group", "objects", "processes", "rank")},
    "vllm": {"verl.plugin.library_versions", "verl.workers.rollout.vllm"},
    "sglang": {"verl.workers.rollout.sglang"},
    "megatron": {"verl.workers.engine.megatron_engine"},
    "veomni": {"verl.workers.engine.veomni_engine"},
    "torch_npu": {"verl.plugin.platform.npu"},
    "flash_attn": {"verl.models.attention.packed"},
}


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


def definitions(root: Path) -> list[str]:
    """What thin modules define, beside the `main` of programs."""
    paths = [path for path in sorted((root / "verl").rglob("*.py")) if covers(SHIMS, module_name(path, root))]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found = ((path, node) for path in paths for node in ast.walk(ast.parse(path.read_text())))
    return [f"{p.relative_to(root)} {n.name}" for p, n in found if isinstance(n, kinds) and n.name != "main"]


def test_a_thin_module_only_passes_on():
    assert definitions(ROOT) == []


def test_a_definition_in_a_thin_module_is_named(tmp_path):
    (tmp_path / "verl" / "tools").mkdir(parents=True)
    (tmp_path / "verl" / "tools" / "x.py").write_text("from verl.doors.y import *\nclass Kind:\n    pass\n")
    assert definitions(tmp_path) == ["verl/tools/x.py Kind"]


def test_every_listed_room_is_there_or_still_to_come():
    files = (p for p in (ROOT / "verl").iterdir() if p.is_dir() or p.suffix == ".py")
    rooms = {p.name.removesuffix(".py") for p in files if p.name[0] != "_" and p.name[0] != "."}
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
        (
            "data/x.py",
            "def f():\n    import verl.trainer.sft.trainer",
            "verl/data/x.py:3 imports verl.trainer.sft.trainer: trainer",
        ),
        ("algorithms/x.py", "from verl.observe import timers", "observe is not below algorithms"),
        ("workers/engine/x.py", "from verl.workers.rollout.base import A", "workers.rollout is not below workers.eng"),
        ("workers/engine/x.py", "from ..actor import Actor", "verl.workers.actor.Actor: workers is not below"),
        ("utils/x.py", "import torch", "utils uses the standard library only"),
        ("trainer/x.py", "import ray", "ray belongs in verl.runtime.ray_cluster or verl.runtime.ray_group or"),
        ("trainer/x.py", "from verl.trainer.ppo.core_algos import agg_loss", "a shim is for other people's code"),
        ("trainer/x.py", "def f():\n    import verl.doors.core_algos", "doors is not below trainer"),
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
        ("doors/x.py", "from verl.algorithms.losses import f\nfrom verl.trainer.ppo.trainer import g"),
        ("data/x.py", "from verl.data import batch\nfrom . import packing\nfrom verl import __version__"),
        ("runtime/ray_group.py", "def start():\n    import ray"),
    ],
)
def test_an_allowed_import_passes(tmp_path, file, line):
    path = tmp_path / "verl" / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert violations(tmp_path) == []
