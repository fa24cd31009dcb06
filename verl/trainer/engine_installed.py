"""Whether a rollout engine is installed, looked at without importing it or any other heavy library."""

import os
import shutil

from verl.config import ActorRolloutRefConfig
from verl.plugin.installed import has_module
from verl.utils.errors import ConfigError
from verl.workers.rollout.registry import find_rollout_engine


def check_rollout_engine_is_installed(arr: ActorRolloutRefConfig) -> None:
    """ConfigError where `rollout.name` is unknown, or its library or server program is not on this machine."""
    where, rollout = "actor_rollout_ref.rollout", arr.rollout
    name, engine = rollout.name, find_rollout_engine(rollout.name, arr.model.external_lib)
    if engine.package is None or (engine.joins_server and rollout.server.url):
        return
    if (python := rollout.server.python) is not None:
        if shutil.which(os.path.expanduser(python)) is None:
            raise ConfigError(f"{where}.server.python={python} is no program here; give the Python that has {name}")
    elif not has_module(engine.package):
        raise ConfigError(
            f"{where}.name={name} needs {engine.package}, which is not installed here. {engine.how_to_install}; "
            f"{where}.server.python names its Python where that is another environment. {where}.name=native needs "
            "nothing more"
        )
