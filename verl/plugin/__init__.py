"""Plug-ins and hardware platforms; this import loads neither torch nor any plug-in."""

from verl.plugin.loading import LoadedPlugin, load_plugins

__all__ = ["LoadedPlugin", "load_plugins"]
