"""Registry: a mapping from names to objects, with errors that list the known names."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from verl.utils.errors import RegistryError
from verl.utils.suggest import did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to objects. Registering a different object under a taken name is an error; the same object is not."""

    def __init__(self, kind: str):
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that registers its argument as `name`."""

        def add(item: T) -> T:
            existing = self._items.get(name)
            if existing is not None and existing != item:
                raise RegistryError(
                    f"{self.kind} {name!r} is already registered as {existing!r}; {item!r} needs another name"
                )
            self._items[name] = item
            return item

        return add

    def get(self, name: str) -> T:
        """The object registered as `name`; RegistryError with the closest names otherwise."""
        if name not in self._items:
            raise RegistryError(f"unknown {self.kind} {name!r}; {did_you_mean(name, self._items)}")
        return self._items[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)
