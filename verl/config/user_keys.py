"""Hyperparameters of the user's own functions: where they are kept, their types, and those that nothing reads."""

import copy
import dataclasses
import functools
import operator
import types
import typing
from typing import Any

from verl.config import foreign_keys, schema
from verl.config.base import Section, recorded_reads
from verl.config.extra import EXTRA, Extra, is_extra
from verl.utils.errors import ConfigError
from verl.utils.suggest import closest, did_you_mean

S = typing.TypeVar("S", bound=Section)


def added_key_line(path: str, target: str, root: type) -> str:
    """The line about an override `+path=...` that is kept at `target`."""
    unknown, beside = foreign_keys.first_unknown(path, root)
    home, _, name = unknown.rpartition(".")
    near = closest(name, beside, count=1)
    meant = f"{home}.{near[0]}{path[len(unknown) :]}".removeprefix(".") if near else ""
    typo = f" (if you mean {meant}, write that)" if near else ""
    return f"+{path} is no key of the library: it is kept as {target}, for functions of your own{typo}"


def own_section_line(target: str) -> str:
    """The line about a preset's section that is kept at `target`, or about the one around it."""
    home, _, rest = target.partition(f"{EXTRA}.")
    name = rest.partition(".")[0]
    return f"{home}{name} is nothing of the library: it is kept as {home}{EXTRA}.{name}, for functions of your own"


def values_by_path(flat: dict[str, Any]) -> dict[str, Any]:
    """The values in the open sections of `flat`, sections in them included, each at the path where users read it."""
    result: dict[str, Any] = {}

    def visit(prefix: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            result[prefix + name] = value
            if isinstance(value, dict):
                visit(f"{prefix}{name}.", value)

    for path, value in flat.items():
        if is_extra(path):
            visit(path.removesuffix(EXTRA), value)
    return result


def unread_user_keys(config: Any) -> list[str]:
    """Keys of the user's own that nothing has read; a section of which no key was read one by one was read whole."""
    reads = recorded_reads()

    def visit(values: Extra) -> list[str]:
        unread = []
        for name, value in dict.items(values):
            where = f"{values._path}.{name}"
            if (values._path, name) not in reads:
                unread.append(where)
            elif isinstance(value, Extra) and any(place.startswith(where) for place, _ in reads):
                unread += visit(value)
        return unread

    found = [key for path in config._set if is_extra(path) for key in visit(own_values(config, path))]
    return [key for key in found if key.replace(f"{EXTRA}.", "", 1) not in config._referenced]


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
