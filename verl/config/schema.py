"""The schema as a flat table of keys, and conversion of one value to the type of its key."""

import dataclasses
import functools
import math
import types
import typing
from dataclasses import dataclass
from typing import Any

from verl.config.base import Section, default_of
from verl.config.overrides import is_number
from verl.config.run_config import FOLLOWS, RunConfig
from verl.config.sft import SFT_FOLLOWS, SFTConfig
from verl.utils.errors import ConfigError

_LARGEST_INT = 2**63 - 1  # what a tensor of whole numbers can hold


@dataclass(frozen=True)
class Key:
    """One key: path, type, default, meaning, allowed values."""

    path: str
    type: Any
    default: Any
    doc: str
    choices: tuple[Any, ...]
    bounds: tuple[float | None, float | None, float | None]
    follows: str
    section: type

    @property
    def is_open(self) -> bool:
        """True for dictionaries, whose own keys are free."""
        return any((typing.get_origin(member) or member) is dict for member in union_members(self.type))

    def allowed(self) -> str:
        """The allowed values as text; '' when the type is the only limit."""
        minimum, greater_than, maximum = (None if b is None or b == math.inf else b for b in self.bounds)
        parts = [", ".join(str(choice) for choice in self.choices)] if self.choices else []
        parts += [f"at least {_number_text(minimum)}"] if minimum is not None else []
        parts += [f"above {_number_text(greater_than)}"] if greater_than is not None else []
        parts += [f"at most {_number_text(maximum)}"] if maximum is not None else []
        return " and ".join(parts)


def _number_text(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def union_members(tp: Any) -> tuple[Any, ...]:
    """The members of a union type; for any other type, the type itself."""
    return typing.get_args(tp) if isinstance(tp, types.UnionType) else (tp,)


def type_name(tp: Any) -> str:
    """A type as text: 'int or null', 'list of str'."""
    names = []
    for member in union_members(tp):
        args = typing.get_args(member)
        if typing.get_origin(member) is list:
            names.append(f"list of {args[0].__name__}")
        elif (typing.get_origin(member) or member) is dict:
            names.append("dict")
        else:
            names.append("null" if member is types.NoneType else member.__name__)
    return " or ".join(names)


@functools.cache
def keys(root: type) -> dict[str, Key]:
    """Every key of a root configuration class by its dotted path, in the order of the schema."""
    table: dict[str, Key] = {}
    _collect_keys(
        root(), "", FOLLOWS if root is RunConfig else SFT_FOLLOWS if issubclass(root, SFTConfig) else {}, table
    )
    return table


def key_types(cls: type) -> dict[str, Any]:
    """The types of a section's keys."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: getattr(hint, "__metadata__", (hint,))[0] for name, hint in hints.items()}


def _collect_keys(instance: Section, prefix: str, follows: dict[str, str], table: dict[str, Key]) -> None:
    hints = key_types(type(instance))
    for item in dataclasses.fields(instance):
        path, value = prefix + item.name, getattr(instance, item.name)
        if isinstance(value, Section):
            _collect_keys(value, path + ".", follows, table)
            continue
        sibling = item.metadata["sibling"]
        source = prefix + sibling if sibling else follows.get(path, "")
        default = default_of(item) if sibling else value
        meta = item.metadata
        table[path] = Key(
            path, hints[item.name], default, meta["doc"], meta["choices"], meta["bounds"], source, type(instance)
        )


@functools.cache
def sections(root: type) -> dict[str, type]:
    """Every section of a root class by its dotted path ('' is the root itself)."""
    table: dict[str, type] = {"": root}

    def visit(instance: Section, prefix: str) -> None:
        for item in dataclasses.fields(instance):
            value = getattr(instance, item.name)
            if isinstance(value, Section):
                table[prefix + item.name] = type(value)
                visit(value, prefix + item.name + ".")

    visit(root(), "")
    return table


def owning_key(path: str, root: type) -> Key | None:
    """The key that `path` belongs to: itself, or the dictionary that contains it; None when neither exists."""
    table = keys(root)
    if path in table:
        return table[path]
    head = path
    while "." in head:
        head = head.rsplit(".", 1)[0]
        if head in table:
            return table[head] if table[head].is_open else None
    return None


def convert(value: Any, key: Key, text: str | None = None) -> Any:
    """`value` as the type of `key`, or ConfigError. `text`, as the user wrote it, is the value of a string key."""
    if value is None and key.default is None:
        return None
    if isinstance(value, int | float) and text and "_" in text and {float, str} <= set(union_members(key.type)):
        value = text  # lo_hi is no number, though 1_5 reads as one
    for member in union_members(key.type):
        if _has_type(value, member) and value == value:  # no key accepts NaN
            return _check_allowed(value, key)
    for member in union_members(key.type):
        converted = _convert_lossless(value, member, text)
        if converted is not None:
            return _check_allowed(converted, key)
    shown = f"{value!r} ({type(value).__name__})" if value is not None and value == value else str(value or "null")
    raise ConfigError(f"{key.path} must be {type_name(key.type)}, but it is {shown}; {key.doc}")


def _has_type(value: Any, member: Any) -> bool:
    origin = typing.get_origin(member) or member
    if origin is list and isinstance(value, list):
        return all(_has_type(element, typing.get_args(member)[0]) for element in value)
    return type(value) is origin or (value is None and member is types.NoneType)


def _convert_lossless(value: Any, member: Any, text: str | None) -> Any:
    if member is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**1000 else None
    if member is float and isinstance(value, str):
        return float(value) if is_number(value.strip()) else None
    if member is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if member is str and isinstance(value, int | float):
        return text if text is not None else str(value)
    if typing.get_origin(member) is list:
        element = typing.get_args(member)[0]
        if isinstance(value, str) and element is str:
            return [value]
        if isinstance(value, list):
            done = [e if _has_type(e, element) else _convert_lossless(e, element, None) for e in value]
            return None if None in done else done
    return None


def _check_allowed(value: Any, key: Key) -> Any:
    minimum, greater_than, maximum = key.bounds
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    wrong = bool(key.choices) and value is not None and value not in key.choices
    wrong |= number is not None and minimum is not None and number < minimum
    wrong |= number is not None and greater_than is not None and number <= greater_than
    wrong |= number is not None and maximum is not None and number > maximum
    wrong |= isinstance(number, float) and math.isinf(number) and maximum != math.inf
    wrong |= isinstance(number, int) and abs(number) > _LARGEST_INT
    wrong |= any(isinstance(part, str) and not part for part in (value if isinstance(value, list) else [value]))
    if wrong and not key.allowed():
        what = "name something" if isinstance(value, str | list) else "be a finite number of usual size"
        hint = ", or be null" if type(None) in union_members(key.type) else ""
        raise ConfigError(f"{key.path}={value!r} must {what}{hint}; {key.doc}")
    if wrong:
        one_of = "one of " if key.choices else "finite and " if value in (math.inf, -math.inf) else ""
        raise ConfigError(f"{key.path}={value} must be {one_of}{key.allowed()}; {key.doc}")
    return value
