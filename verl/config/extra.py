"""The values of the open section `extra`, where users keep the hyperparameters of their own functions."""

import sys
from collections.abc import Iterator
from typing import Any, ClassVar

from verl.utils.suggest import did_you_mean

EXTRA = "extra"  # name of the section


def is_extra(path: str) -> bool:
    """Whether `path` is the open section of a section, where users keep keys of their own."""
    return path.rpartition(".")[2] == EXTRA


class Extra(dict[str, Any]):
    """The keys below `*.extra`: `extra["x"]`, `extra.get("x", 1)` and `extra.x`; inner dictionaries are the same."""

    record: ClassVar[set[tuple[str, str]] | None] = None  # gets (path, key) of each key read, while not None

    def __init__(self, values: Any = (), path: str = ""):
        super().__init__(values)
        self._path = path
        for name, value in dict.items(self):
            if isinstance(value, dict) and not isinstance(value, Extra):
                super().__setitem__(name, Extra(value, f"{path}.{name}" if path else ""))

    def place(self, path: str) -> None:
        """Let the keys be those below `path`, which is known only when the configuration is built."""
        self._path = path
        for name, value in dict.items(self):
            if isinstance(value, Extra):
                value.place(f"{path}.{name}")

    def _note(self, names: Any) -> None:
        if Extra.record is not None and self._path and sys._getframe(2).f_globals["__name__"] != "dataclasses":
            Extra.record.update((self._path, name) for name in names)

    def __getitem__(self, name: str) -> Any:
        self._note([name])
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of key `name`, or `default` where it is not set."""
        self._note([name])
        return super().get(name, default)

    def items(self) -> Any:
        """Names and values; all of them count as read."""
        self._note(list(self))
        return super().items()

    def values(self) -> Any:
        """All values, which count as read."""
        self._note(list(self))
        return super().values()

    def __iter__(self) -> Iterator[str]:  # with it, `dict(extra)` and `**extra` use __getitem__
        return super().__iter__()

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"{self.__dict__.get('_path') or EXTRA}.{name} is not set; {did_you_mean(name, self)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Extra, (dict(dict.items(self)), self._path)
