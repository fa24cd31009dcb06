"""Every key of the schema has a reader in the library, or waits for a feature that is still to come."""

import ast
import importlib
from pathlib import Path

import pytest

from verl.config import DPOConfig, RunConfig, SFTConfig, foreign_keys, schema

PACKAGE = Path(__file__).parents[3] / "verl"


CHECKED_BY_CONFIG = ("model_engine", "actor_rollout_ref.rollout.pipeline_model_parallel_size")
CHECKED_BY_CONFIG += ("distillation.teacher_models", "trainer.v1.trainer_mode", "async_training.staleness_threshold")
CHECKED_BY_CONFIG += tuple(f"trainer.v1.{mode}_async.num_warmup_batches" for mode in ("colocate", "separate"))
CHECKED_BY_CONFIG += ("trainer.v1.separate_async.parameter_sync_step", "rollout.total_rollout_steps")
CHECKED_BY_CONFIG += ("async_training.trigger_parameter_sync_step", "async_training.require_batches")
CHECKED_BY_CONFIG += tuple(f"actor_rollout_ref.{role}.router_replay.mode" for role in ("actor", "ref"))
CHECKED_BY_CONFIG += tuple(
    f"{role}.veomni.{name}"
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
    for name in ("enable_fsdp_offload", "enable_full_shard", "ulysses_parallel_size")
)
"""Keys that the loading itself uses up: other defaults, one allowed value, names that it makes into teachers,
and a mode and an age that functions beside them tell."""
CHOSEN_BY_CONFIG = ("fsdp_config", "veomni")  # sections that code outside reaches as `engine`


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


@pytest.mark.parametrize("root", [RunConfig, SFTConfig, DPOConfig])
def test_every_key_has_a_reader_or_waits_for_a_named_feature(root):
    """A name that another section has too would hide that nothing reads its own: so every name of the path counts."""
    read = names_read() | set(CHOSEN_BY_CONFIG)
    followed = {key.follows for key in schema.keys(root).values()}
    without = [
        path
        for path in schema.keys(root)
        if not read.issuperset(path.split(".")) and path not in followed and path not in CHECKED_BY_CONFIG
        if path.rpartition(".")[2] != "extra"  # the keys in it are the user's
    ]
    assert [path for path in without if not foreign_keys.waiting_for(path, root)] == []
