"""Hyperparameters of the user's own functions: where they are kept, their types, and those that nothing reads."""

import copy
import dataclasses
import functools
import operator
import types
import typing
from typing import Any

from verl.config import schema
from verl.config.base import Section
from verl.config.extra import EXTRA, Extra
from verl.utils.errors import ConfigError
from verl.utils.suggest import closest, did_you_mean

S = typing.TypeVar("S", bound=Section)


def added_key_line(path: str, target: str, root: type) -> str:
    """What is said about an override `+path=...` that is kept at `target`."""
    home, _, name = path.rpartition(".")
    known = [key.removeprefix(home + ".") for key in schema.keys(root) if key.rpartition(".")[0] == home]
    near = closest(name, [other for other in known if other != EXTRA], count=1)
    typo = f" (if you mean {home}.{near[0]}, write that)" if near else ""
    return f"+{path} is no key of the library: it is kept as {target}, for functions of your own{typo}"


def own_values(config: Section, path: str) -> Extra:
    """The values of the open section at `path`."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return typing.cast(Extra, value)


def with_typed_extra(section: S, cls: type | None, path: str, owner: str) -> S:
    """A copy of `section`, at `path`, whose `extra` has the types and defaults of `cls`; the same one without `cls`."""
    if cls is None:
        return section
    return with_value(section, EXTRA, typed_extra(own_values(section, EXTRA), cls, f"{path}.{EXTRA}", owner))


def with_value(section: S, name: str, value: Any) -> S:
    """A copy of `section` in which key `name` is `value`; it keeps what `dataclasses.replace` would drop."""
    changed = copy.copy(section)
    object.__setattr__(changed, name, value)
    return changed


def typed_extra(given: Extra, cls: type, path: str, owner: str) -> Extra:
    """The keys `given` at `path`, with the types and defaults of the dataclass that `owner` was registered with.

    ConfigError for a key that the dataclass lacks, for a wrong type, and for a missing key without default.
    """
    hints, values = typing.get_type_hints(cls), dict(dict.items(given))
    for name in values:
        if name not in hints:
            raise ConfigError(f"{path}.{name} is no key of {owner} ({cls.__name__}); {did_you_mean(name, hints)}")
    for item in dataclasses.fields(cls):
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        if item.name in values:
            doc = str(item.metadata.get("doc", f"{cls.__name__} of {owner} says so"))
            values[item.name] = _converted(values[item.name], hints[item.name], f"{path}.{item.name}", doc)
        elif default is dataclasses.MISSING:
            raise ConfigError(f"{owner} needs {path}.{item.name} ({cls.__name__} has no default for it); set it")
        else:
            values[item.name] = default
    return Extra(values, given._path)


def _converted(value: Any, hint: Any, path: str, doc: str) -> Any:
    if typing.get_origin(hint) is typing.Union:  # Optional[float]
        hint = functools.reduce(operator.or_, typing.get_args(hint))
    members = schema.union_members(hint)
    kinds = {typing.get_origin(member) or member for member in members}
    if not kinds <= {int, float, str, bool, dict, list, types.NoneType} or list in members:
        return value  # no type of a configuration: the dataclass itself is asked
    if isinstance(value, Extra):
        value = dict(dict.items(value))
    default = None if types.NoneType in kinds else ...
    return schema.convert(value, schema.Key(path, hint, default, doc, (), (None, None, None), "", Section))


def check_types(cls: type | None, owner: str) -> None:
    """ConfigError unless `cls`, which `owner` gives as the types of its keys, is None or a dataclass."""
    if cls is not None and not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"{owner}: extra={cls!r} is not a dataclass; give the class of its keys, or leave it out")
