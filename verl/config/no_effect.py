"""Keys of the schema that are set, but wait for a feature that is still to come."""

from typing import Any

from verl.config import foreign_keys, schema
from verl.config.base import Section


def no_effect_warnings(config: Any) -> list[str]:
    """One sentence for each key that was set to a value that nothing reads yet."""
    root: type = type(config)
    texts = []
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
