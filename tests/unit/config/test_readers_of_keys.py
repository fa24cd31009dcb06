"""Every key of the schema has a reader in the library, or waits for a feature that is still to come."""

import ast
import fnmatch
import importlib
from pathlib import Path

import pytest

from verl.config import RunConfig, SFTConfig, schema

PACKAGE = Path(__file__).parents[3] / "verl"
WAITING = {
    "further policy losses": "*.policy_loss.* *.tau_neg *.tau_pos",
    "profiling": "*profiler.* trainer.profile_interval",
    "the VeOmni engine": "*.veomni.*",
    "SGLang": "*.rollout.server.* *.rollout.pipeline_model_parallel_size *.rollout.custom",
    "dynamic sampling and rollout correction": "algorithm.filter_groups.* algorithm.rollout_correction.*"
    " data.gen_batch_size",
    "the Ray runtime": "ray_kwargs.*",
}


def names_read() -> set[str]:
    """Every attribute and string in the package outside verl/config, and the key names it imports from there."""
    found: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        if PACKAGE / "config" not in file.parents:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute):
                    found.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
                elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("verl.config"):
                    for name in node.names:
                        value = getattr(importlib.import_module(node.module), name.name, None)
                        found.update(value if isinstance(value, tuple) else ())
    return found


@pytest.mark.parametrize("root", [RunConfig, SFTConfig])
def test_every_key_has_a_reader_or_waits_for_a_named_feature(root):
    read, waiting = names_read(), " ".join(WAITING.values()).split()
    followed = {key.follows for key in schema.keys(root).values()}
    without = [
        path
        for path in schema.keys(root)
        if path.rsplit(".", 1)[-1] not in read and path not in followed and path != "model_engine"
    ]
    assert [path for path in without if not any(fnmatch.fnmatch(path, pattern) for pattern in waiting)] == []
