"""Plug-ins and hardware platforms; importing this imports neither torch nor any plug-in."""

from verl.plugin.loading import LoadedPlugin, load_plugins

__all__ = ["LoadedPlugin", "load_plugins"]
