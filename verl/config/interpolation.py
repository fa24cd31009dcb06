"""References from one value to another key: `${a.b}`, `${.sibling}` and `${oc.select:a.b,otherwise}`."""

import re
from collections.abc import Callable
from typing import Any

from verl.config.overrides import parse_value
from verl.utils.errors import ConfigError

_INNER = re.compile(r"\$\{([^${}]*)\}")
_REFERENCE = re.compile(r"\$\{\s*(?:(\.?[\w.-]+)|oc\.select:\s*(\.?[\w.-]+)\s*(?:,(.*))?)\s*\}", re.DOTALL)
_MAX_STEPS = 20
Resolver = Callable[[dict[str, Any], str], Any]


def has_interpolation(value: Any) -> bool:
    """True where `value` or a value inside it refers to another key."""
    if isinstance(value, dict):
        return any(has_interpolation(inner) for inner in value.values())
    if isinstance(value, list):
        return any(has_interpolation(inner) for inner in value)
    return isinstance(value, str) and "${" in value


def names_in(value: Any) -> list[str]:
    """The names of other keys in `value`."""
    return re.findall(r"\$\{(?:oc\.select:)?\s*([\w.]+)", str(value)) if has_interpolation(value) else []


def reference(value: Any, path: str) -> tuple[str, str | None] | None:
    """(key, text of the value where there is no such key) of a value of `path` that is one reference; else None."""
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    target = match[1] or match[2]
    return (path.rpartition(".")[0] + target if target.startswith(".") else target), match[3]


def interpolate(value: Any, flat: dict[str, Any], path: str, resolve: Resolver, depth: int = 0) -> Any:
    """`value` of key `path` with every reference replaced; `resolve` is asked for what is not in `flat`."""
    if depth > _MAX_STEPS:
        raise ConfigError(f"{path}={flat[path]!r} refers to itself")
    if isinstance(value, dict):
        return {name: interpolate(inner, flat, path, resolve, depth) for name, inner in value.items()}
    if isinstance(value, list):
        return [interpolate(inner, flat, path, resolve, depth) for inner in value]
    if not has_interpolation(value):
        return value
    single = reference(value, path)
    if single:
        target, otherwise = single
        if target in flat:
            return interpolate(flat[target], flat, target, resolve, depth + 1)
        if otherwise is not None and not any(known.startswith(target + ".") for known in flat):
            return interpolate(parse_value(otherwise), flat, path, resolve, depth + 1)
    names = _INNER.findall(value)
    if not names or any(name not in flat for name in names):
        return resolve(flat, path)
    text = _INNER.sub(lambda m: str(interpolate(flat[m[1]], flat, path, resolve, depth + 1)), value)
    return interpolate(text, flat, path, resolve, depth + 1)
