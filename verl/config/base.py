"""What every section of the configuration shares: frozen, documented fields, and a record of what was read."""

import sys
from dataclasses import MISSING, Field, field, fields
from typing import Any

PATH = "_path"
_METHODS_THAT_COPY = ("__eq__", "__repr__", "__hash__", "__post_init__")  # touch every key without using it
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
    """A configuration key: its default, its meaning, the values allowed: a list or bounds (`greater_than` excludes).

    With `sibling`, the default None means: the value of that key of the same section.
    """
    metadata = {"doc": doc, "choices": choices, "sibling": sibling, "bounds": (minimum, greater_than, maximum)}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type, **defaults: Any) -> Any:
    """A nested section, with other defaults than its class gives where this place needs them."""
    return field(default_factory=lambda: cls(**defaults), metadata={"doc": (cls.__doc__ or "").strip(), "section": cls})


def default_of(item: Field) -> Any:
    """The default value of a dataclass field; MISSING when it has none."""
    return item.default_factory() if item.default_factory is not MISSING else item.default


class Section:
    """Base of all sections. Attributes are the rule; `section["key"]` and `.get` are for functions written that way."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            source = item.metadata.get("sibling")
            if source and self.__dict__[item.name] is None:
                value = self.__dict__[source]
                object.__setattr__(self, item.name, value.copy() if isinstance(value, list | dict) else value)

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self.__dataclass_fields__  # type: ignore[attr-defined]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of key `name`, or `default` where the section has no such key."""
        return getattr(self, name) if name in self else default


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
    """Switch the record of every key that is read on (and empty it) or off. Off costs nothing."""
    if on:
        _reads.clear()
        Section.__getattribute__ = _recording_getattribute  # type: ignore[method-assign, assignment]
    elif "__getattribute__" in Section.__dict__:
        del Section.__getattribute__


def recorded_reads() -> set[tuple[str, str]]:
    """(section path, key) pairs read since `record_reads(True)`; "?Class" is a section built by hand."""
    return set(_reads)


def add_reads(reads: set[tuple[str, str]]) -> None:
    """Merge the record of another process into this one's."""
    _reads.update(reads)
