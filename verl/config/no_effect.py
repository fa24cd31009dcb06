"""Keys of the schema that are set and do not do what they say: aliases, and what waits for a feature still to come."""

from typing import Any

from verl.config import foreign_keys, schema
from verl.config.base import Section
from verl.config.engine import VEOMNI


def no_effect_warnings(config: Any) -> list[str]:
    """One sentence for each key that was set to a value that nothing reads yet, and for other names of the engine."""
    root: type = type(config)
    texts = []
    named = [path for path in config._set if path.endswith((".strategy", "model_engine"))]
    if flat := [path for path in named if value_at(config, path) == "fsdp"]:
        texts.append(f"{', '.join(flat)}: fsdp is an alias of fsdp2, whose checkpoints are the same")
    if veomni := [path for path in named if value_at(config, path) == VEOMNI]:
        texts.append(f"{', '.join(veomni)}: the fsdp2 engine runs, by the keys of {VEOMNI}")
    for path in config._set:
        group, value = foreign_keys.waiting_for(path, root), value_at(config, path)
        if group is None or _is_default(config, path, value):
            continue
        if all(value_at(config, key) in values for key, values in group.only_while.items()):
            why = f"it is for {group.feature}, still to come"
            texts.append(f"{path}={value} has no effect yet: {why} ({config._origins[path]})")
    return texts


def _is_default(config: Any, path: str, value: Any) -> bool:
    root: type = type(config)
    key = schema.keys(root)[path]
    default = value_at(config, key.follows) if key.follows else key.default
    return foreign_keys.same(value, default) or _is_empty(value)


def _is_empty(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_empty(inner) for inner in value.values())
    return value is None or value == []


def value_at(config: Section, path: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
