"""Base class of configuration sections: documented fields, and a record of the keys that are read."""

import functools
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

from verl.config.extra import EXTRA, Extra
from verl.utils.errors import ConfigError

S = TypeVar("S", bound="type[Section]")

PATH = "_path"
LARGEST_SEED = 2**32 - 1  # what every generator of random numbers takes
_METHODS_THAT_COPY = ("__eq__", "__repr__", "__hash__", "__post_init__")  # they read every key without using it
_reads: set[tuple[str, str]] = set()


def key(
    default: Any,
    doc: str,
    *,
    choices: tuple[Any, ...] = (),
    sibling: str = "",
    minimum: float | None = None,
    greater_than: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A configuration key: default, meaning, and allowed values as a list or bounds (`greater_than` is exclusive).
    A number is finite unless `maximum` is inf.

    With `sibling`, the default None stands for the value of that key of the same section.
    """
    metadata = {"doc": doc, "choices": choices, "sibling": sibling, "bounds": (minimum, greater_than, maximum)}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type, **defaults: Any) -> Any:
    """A nested section of class `cls`; `defaults` replace defaults of the class."""
    return field(default_factory=lambda: cls(**defaults), metadata={"doc": (cls.__doc__ or "").strip(), "section": cls})


def default_of(item: Field) -> Any:
    """The default value of a dataclass field; MISSING when it has none."""
    return item.default_factory() if item.default_factory is not MISSING else item.default


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of all sections. Keys are attributes; `section["key"]` and `.get` are for code that expects a mapping.

    `extra` holds keys of the user's own, which are attributes of the section too.
    """

    extra: dict[str, Any] = field(
        default_factory=dict, repr=False, metadata={"doc": "", "choices": (), "sibling": "", "bounds": (None,) * 3}
    )

    def __init_subclass__(cls) -> None:
        """Annotate keys so that `OmegaConf.structured(cls)` works too: it knows no unions with lists, and checks None.

        The type of the schema is in the annotation's metadata; `schema.key_types` reads it.
        """
        for name, hint in inspect.get_annotations(cls).items():
            kinds = [get_origin(member) or member for member in get_args(hint) if isinstance(hint, types.UnionType)]
            item = cls.__dict__.get(name)
            if len(set(kinds) - {types.NoneType}) > 1 and set(kinds) & {list, dict}:
                cls.__annotations__[name] = Annotated[Any, hint]
            elif isinstance(item, Field) and item.metadata.get("sibling"):
                cls.__annotations__[name] = Annotated[hint | None, hint]

    def __post_init__(self) -> None:
        for item in fields(self):
            source = item.metadata.get("sibling")
            if source and self.__dict__[item.name] is None:
                value = self.__dict__[source]
                object.__setattr__(self, item.name, value.copy() if isinstance(value, list | dict) else value)
        own = self.__dict__.get(EXTRA)
        if isinstance(own, dict) and not isinstance(own, Extra):
            object.__setattr__(self, EXTRA, Extra(own, f"?{type(self).__name__}.{EXTRA}"))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A key of `extra`, for published code that reads its own keys from the section itself."""
            own = self.__dict__.get(EXTRA)
            if isinstance(own, Extra) and name in own:
                return own[name]
            where = self.__dict__.get(PATH)
            hint = f"; set {where}.{EXTRA}.{name} for a key of your own" if where and own is not None else ""
            raise AttributeError(f"{type(self).__name__!r} has no key {name!r}{hint}")

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self.__dataclass_fields__ or name in self.__dict__.get(EXTRA, ())

    def get(self, name: str, default: Any = None) -> Any:
        """The value of key `name`, or `default` where the section has no such key."""
        return getattr(self, name) if name in self else default


def accepts_keywords(**renamed: str) -> Callable[[S], S]:
    """Class decorator: keywords of published code that are no keys here, each with the key that gets its value.

    "" keeps the value as an attribute of that name. ConfigError where both spellings are given and differ.
    """

    def decorate(cls: S) -> S:
        construct = cls.__init__

        @functools.wraps(construct)
        def __init__(self: Section, **given: Any) -> None:
            kept: dict[str, Any] = {}
            for old, new in renamed.items():
                if old not in given:
                    continue
                value = given.pop(old)
                if new and given.setdefault(new, value) != value:
                    raise ConfigError(f"{cls.__name__}({old}={value!r}, {new}={given[new]!r}): give only {new}")
                kept |= {} if new else {old: value}
            construct(self, **given)
            for name, value in kept.items():
                object.__setattr__(self, name, value)

        cls.__init__ = __init__  # type: ignore[method-assign]
        return cls

    return decorate


def _recording_getattribute(self: Section, name: str) -> Any:
    value = object.__getattribute__(self, name)
    caller = sys._getframe(1)
    if (
        name[0] != "_"
        and caller.f_code.co_name not in _METHODS_THAT_COPY
        and caller.f_globals["__name__"] != "dataclasses"
    ):
        _reads.add((self.__dict__.get(PATH) or "?" + type(self).__name__, name))
    return value


def record_reads(on: bool) -> None:
    """Start an empty record of the keys that are read, or stop recording. No cost while stopped."""
    if on:
        _reads.clear()
        Extra.record = _reads
        Section.__getattribute__ = _recording_getattribute  # type: ignore[method-assign, assignment]
    else:
        record_own_reads()
        Extra.record = None


def record_own_reads() -> None:
    """From now on record reads of the users' own keys alone, which costs nothing elsewhere."""
    if "__getattribute__" in Section.__dict__:
        del Section.__getattribute__


def recorded_reads() -> set[tuple[str, str]]:
    """(section path, key) pairs read since `record_reads(True)`; "?Class" is a section built without load_config."""
    return set(_reads)


def add_reads(reads: set[tuple[str, str]]) -> None:
    """Merge the record of another process into this one's."""
    _reads.update(reads)
