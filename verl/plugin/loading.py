"""Find and import plug-ins: modules named in the environment, then installed entry points of group `verl.plugins`."""

import importlib
import importlib.metadata
import inspect
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from verl.utils.errors import PluginError
from verl.utils.suggest import did_you_mean

GROUP = "verl.plugins"
MODULES_VARIABLE = "VERL_USE_EXTERNAL_MODULES"
FILTER_VARIABLE = "VERL_USE_EXTERNAL_PLUGINS"


@dataclass(frozen=True)
class LoadedPlugin:
    """A loaded plug-in: its name, where it was named, and what was imported."""

    name: str
    source: str
    target: str


_lock = threading.RLock()
_loaded: list[LoadedPlugin] | None = None
_loading = False


def load_plugins() -> tuple[LoadedPlugin, ...]:
    """All plug-ins, imported on the first call. Registries call it before their first lookup.

    PluginError names the plug-in that cannot be imported; nothing counts as loaded then, and the next call tries again.
    A registry lookup during the import of a plug-in sees what is registered so far.
    """
    global _loaded, _loading
    with _lock:
        if _loaded is not None:
            return tuple(_loaded)
        if _loading:
            return ()
        _loading = True
        try:
            _loaded = [*_load_modules(), *_load_entry_points()]
        finally:
            _loading = False
        return tuple(_loaded)


def _load_modules() -> list[LoadedPlugin]:
    names = [name.strip() for name in os.environ.get(MODULES_VARIABLE, "").split(",") if name.strip()]
    for name in names:
        _load_or_raise(name, f"named in {MODULES_VARIABLE}", partial(importlib.import_module, name))
    return [LoadedPlugin(name, MODULES_VARIABLE, name) for name in names]


def _load_entry_point(entry: importlib.metadata.EntryPoint) -> None:
    _call_entry_point(entry.load())


def _load_entry_points() -> list[LoadedPlugin]:
    loaded = []
    for entry in _filter_entry_points(
        sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.name)
    ):
        _load_or_raise(entry.name, f"entry point {entry.value}", partial(_load_entry_point, entry))
        loaded.append(LoadedPlugin(entry.name, GROUP, entry.value))
    return loaded


def _filter_entry_points(entries: list[importlib.metadata.EntryPoint]) -> list[importlib.metadata.EntryPoint]:
    """The entry points that VERL_USE_EXTERNAL_PLUGINS selects: auto (all), none, or a list of names."""
    text = os.environ.get(FILTER_VARIABLE, "auto").strip()
    if text.lower() in ("", "auto"):
        return entries
    if text.lower() == "none":
        return []
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    by_name = {entry.name: entry for entry in entries}
    for name in wanted:
        if name not in by_name:
            raise PluginError(
                f"{FILTER_VARIABLE} names {name!r}, which is not installed; {did_you_mean(name, by_name)}"
            )
    return [by_name[name] for name in wanted]


def _call_entry_point(target: object) -> None:
    """Call an entry point that is a function; a module or class only needs its import."""
    if inspect.isfunction(target):
        target()


def _load_or_raise(name: str, source: str, load: Callable[[], object]) -> None:
    try:
        load()
    except Exception as error:  # whatever a plug-in raises is reported under its name
        raise PluginError(
            f"plug-in {name!r} ({source}) cannot be loaded: {type(error).__name__}: {error}. Repair or uninstall it, "
            f"or leave it out with {FILTER_VARIABLE} or {MODULES_VARIABLE}"
        ) from error
