"""The layers of `verl/` and who imports whom: what the layer test checks and the architecture page draws."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

LAYERS = (
    ("utils",),
    ("config", "plugin"),
    ("data",),
    ("algorithms", "runtime", "observe"),
    ("models",),
    ("checkpoint_engine",),
    ("workers.engine", "workers.rollout"),
    ("workers",),  # driver-side handles over the two
    ("weight_sync", "agent", "rewards", "placement"),
    ("checks",),
    ("trainer",),
    ("commands",),
    ("experimental", "cli", "doors"),
)
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}

# Thin modules at import paths that other people's code uses, and programs. They may look anywhere, and what they define
# is in `verl.doors` or in the room it is about; nothing inside imports one.
SHIMS = {
    "verl.__main__",
    "verl.agent.llm_server",
    "verl.experimental.agent_loop",
    "verl.experimental.fully_async_policy",
    "verl.experimental.one_step_off_policy",
    "verl.experimental.reward_loop",
    "verl.interactions",
    "verl.model_merger",
    "verl.protocol",
    "verl.single_controller",
    "verl.tools",
    "verl.trainer.certify",
    "verl.trainer.config",
    "verl.trainer.distillation",
    "verl.trainer.main_eval",
    "verl.trainer.main_generation_server",
    "verl.trainer.ppo.core_algos",
    "verl.trainer.ppo.v1",
    "verl.trainer.validation_metrics",
    "verl.utils.dataset",
    "verl.utils.device",
    "verl.utils.distributed",
    "verl.utils.fs",
    "verl.utils.hdfs_io",
    "verl.utils.metric",
    "verl.utils.net_utils",
    "verl.utils.profiler",
    "verl.utils.py_functional",
    "verl.utils.ray_utils",
    "verl.utils.reward_score",
    "verl.utils.rollout_trace",
    "verl.utils.tensordict_utils",
    "verl.utils.tokenizer",
    "verl.utils.torch_functional",
    "verl.utils.tracking",
    "verl.workers.config",
    "verl.workers.engine.fsdp",
    "verl.workers.engine.megatron",
}

Import = tuple[str, int, str]  # importing module, line, imported name with dots


def covers(prefixes: Iterable[str], module: str) -> bool:
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
