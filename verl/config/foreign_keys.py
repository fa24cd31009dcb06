"""Every key is read, an alias, inert or refused; foreign_keys.yaml lists the keys of the last three kinds."""

import fnmatch
import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from verl.config import schema
from verl.config.extra import EXTRA, is_extra
from verl.config.run_config import RunConfig
from verl.utils.suggest import closest

FOREIGN_KEYS_FILE = Path(__file__).with_name("foreign_keys.yaml")


@dataclass(frozen=True)
class KeyRule:
    """How one key is treated. `kind`: read, alias, inert, refused, or unknown."""

    kind: str
    target: str = ""
    """alias: the key that gets the value."""
    per_device: bool = False
    """alias: the value is a sum over devices."""
    reason: str = ""
    """inert, refused: why, and what to do."""
    planned: bool = False
    """refused: only because the feature is still to come."""


@dataclass
class ForeignKeys:
    """The foreign keys of one root class."""

    exact: dict[str, KeyRule] = field(default_factory=dict)
    patterns: list[tuple[str, KeyRule]] = field(default_factory=list)
    values: dict[str, dict[Any, Any]] = field(default_factory=dict)
    planned: dict[str, dict[Any, str]] = field(default_factory=dict)
    refused_values: dict[str, dict[Any, str]] = field(default_factory=dict)
    defaults: dict[str, list[Any]] = field(default_factory=dict)
    """refused key -> values at which it asks for nothing."""
    waiting: list["WaitingKeys"] = field(default_factory=list)


@dataclass(frozen=True)
class WaitingKeys:
    """Keys of the schema that are checked but read by nothing until `feature` is there."""

    feature: str
    patterns: tuple[str, ...]
    only_while: dict[str, list[Any]]
    """They wait only while each of these keys has one of its values; otherwise code from outside may read them."""


_EMPTY: tuple[Any, ...] = (None, "", [], {})


@functools.cache
def load_foreign_keys(root: type) -> ForeignKeys:
    """The foreign keys of a root class, from foreign_keys.yaml."""
    raw = yaml.safe_load(FOREIGN_KEYS_FILE.read_text())
    result = ForeignKeys()
    for part in (raw["common"], raw["ppo" if root is RunConfig else "sft"]):
        for old, new in part.get("alias", {}).items():
            for path, target in zip(
                _expand_places(old, raw), _expand_places(new.removesuffix(" / devices"), raw), strict=True
            ):
                _add(result, path, KeyRule("alias", target=target, per_device=new.endswith(" / devices")))
        for pattern, reason in part.get("inert", {}).items():
            for path in _expand_places(pattern, raw):
                _add(result, path, KeyRule("inert", reason=reason))
        for group in part.get("refused", []):
            planned = "later" in group
            reason = group["later"] if planned else group["because"]
            rule, defaults = KeyRule("refused", reason=reason, planned=planned), group.get("defaults", {})
            for pattern in group.get("keys", defaults):
                for path in _expand_places(pattern, raw):
                    _add(result, path, rule)
            for pattern, value in defaults.items():
                values = value["any"] if isinstance(value, dict) else [value]
                result.defaults.update({path: values for path in _expand_places(pattern, raw)})
        for group in part.get("waiting", []):
            patterns = tuple(path for pattern in group["keys"] for path in _expand_places(pattern, raw))
            result.waiting.append(WaitingKeys(group["for"], patterns, group.get("while", {})))
        tables = (("values", result.values), ("later", result.planned), ("never", result.refused_values))
        for name, table in tables:
            table.update({p: new for pattern, new in part.get(name, {}).items() for p in _expand_places(pattern, raw)})
    return result


def _expand_places(pattern: str, raw: dict[str, Any]) -> list[str]:
    word, _, key = pattern.partition(".")
    return [f"{place}.{key}" for place in raw["places"][word]] if word in raw["places"] else [pattern]


def _add(result: ForeignKeys, path: str, rule: KeyRule) -> None:
    if "*" in path:
        result.patterns.append((path, rule))
    elif path in result.exact:
        raise AssertionError(f"{path} is listed twice in {FOREIGN_KEYS_FILE.name}")
    else:
        result.exact[path] = rule


def matching_patterns(path: str, root: type) -> list[str]:
    """The patterns of the table that match `path`."""
    return [pattern for pattern, _ in load_foreign_keys(root).patterns if _matches(path, pattern)]


def _matches(path: str, pattern: str) -> bool:
    if path == pattern:
        return True
    if pattern.endswith(".**"):
        return path == pattern[:-3] or path.startswith(pattern[:-2])
    return path.count(".") == pattern.count(".") and fnmatch.fnmatchcase(path, pattern)


def classify(path: str, root: type) -> KeyRule:
    """The rule for key `path` in a configuration of class `root`."""
    if schema.owning_key(path, root) is not None or path in schema.sections(root):
        return KeyRule("read")
    foreign = load_foreign_keys(root)
    if path in foreign.exact:
        return foreign.exact[path]
    head = path
    while "." in head:
        head = head.rsplit(".", 1)[0]
        if head in foreign.exact and foreign.exact[head].kind == "alias":
            return replace(foreign.exact[head], target=foreign.exact[head].target + path[len(head) :])
    for pattern, rule in foreign.patterns:
        if _matches(path, pattern):
            return rule
    return KeyRule("unknown")


def same(one: Any, other: Any) -> bool:
    """Equal, and of one type: 1 is not True and "1" is not 1, but 1 and 1.0 are the same number."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other))
    return bool(one == other) and (numbers or type(one) is type(other))


def asks_for_nothing(value: Any, defaults: list[Any]) -> bool:
    """True for a value at which a refused key with these `defaults` has no effect."""
    if any(same(value, default) for default in (*defaults, *_EMPTY)):
        return True
    return value is False and not any(default is True for default in defaults)


def waiting_for(path: str, root: type) -> WaitingKeys | None:
    """The feature that a key of the schema waits for; None where something reads the key."""
    for group in load_foreign_keys(root).waiting:
        if any(_matches(path, pattern) for pattern in group.patterns):
            return group
    return None


def not_yet_supported_message(what: str, feature: str) -> str:
    """Error text for a feature that does not exist yet."""
    return f"{what} is not supported yet: {feature} is still to come (docs/start/coming_from_verl.md)"


def heads(path: str) -> list[str]:
    """The sections around `path` and `path` itself: a, a.b, a.b.c."""
    names = path.split(".")
    return [".".join(names[: count + 1]) for count in range(len(names))]


@functools.cache
def names_known(root: type) -> frozenset[str]:
    """Every key and section of the schema and of the table, patterns left out."""
    return frozenset(head for key in (*schema.keys(root), *load_foreign_keys(root).exact) for head in heads(key))


def is_section(path: str, root: type) -> bool:
    """True for a section of the schema, and for one that only old or refused keys have."""
    return path in schema.sections(root) or (path in names_known(root) and classify(path, root).kind == "unknown")


def key_in_extra(path: str, root: type) -> str | None:
    """`a.extra.x` for a key `a.x` that only the user can have made; None for every key that the library knows."""
    if classify(path, root).kind != "unknown" or is_section(path, root):
        return None
    around = heads(path)[:-1]
    if any(head in schema.keys(root) for head in around):
        return None
    home = max((head for head in around if head in schema.sections(root)), key=len, default="")
    return f"{home}.{EXTRA}.{path[len(home) :].removeprefix('.')}".removeprefix(".")


def is_own_section(path: str, value: Any, root: type) -> bool:
    """Whether a preset's unknown key is, or is in, a section of the user's own: no name like it is known there.

    A single value outside the sections is one too, unless some section has a key of that name.
    """
    unknown, beside = first_unknown(path, root)
    home, _, name = unknown.rpartition(".")
    if unknown == path and not isinstance(value, dict):
        if home:
            return False
        beside |= {key.rpartition(".")[2] for key in schema.keys(root)}
    return not closest(name, beside)


def first_unknown(path: str, root: type) -> tuple[str, set[str]]:
    """The outermost section or key of `path` that the library lacks, and the names that it has in that place."""
    unknown = next((head for head in heads(path) if head not in names_known(root)), path)
    home = unknown.rpartition(".")[0]
    beside = {name for where, _, name in (key.rpartition(".") for key in names_known(root)) if where == home}
    return unknown, beside - {EXTRA}


def unknown_key_message(path: str, root: type) -> str:
    """Error text for an unknown key, with the nearest keys by last name and by whole path."""
    leaf = path.rsplit(".", 1)[-1]
    table_of_root = [key for key in schema.keys(root) if not is_extra(key)]
    same_leaf = [p for p in table_of_root if p.rsplit(".", 1)[-1] == leaf]
    near = closest(path, [*table_of_root, *load_foreign_keys(root).exact])
    ranked = list(dict.fromkeys([*closest(path, same_leaf, count=2), *same_leaf[:2], *near]))[:3]
    own = key_in_extra(path, root)
    hint = f" A key of your own is +{path}, in a preset {own}" if own else ""
    if not ranked:
        return f"unknown key {path!r}; `verl config print` lists all keys.{hint}".removesuffix(".")
    return f"unknown key {path!r}; did you mean " + " or ".join(repr(p) for p in ranked) + "?" + hint
