"""Whether a rollout engine is installed, looked at without importing it or any other heavy library."""

import os
import shutil

from verl.config import RolloutConfig
from verl.plugin.installed import has_module
from verl.utils.errors import ConfigError


def check_engine_is_installed(rollout: RolloutConfig) -> None:
    """ConfigError where `rollout.name` is unknown, or its library or server program is not on this machine."""
    where, name = "actor_rollout_ref.rollout", rollout.name
    if name not in ("native", "hf", "vllm", "sglang", "tgi"):
        raise ConfigError(f"{where}.name={name} is not one of native, vllm, sglang, tgi")
    if name not in ("vllm", "sglang") or (name == "sglang" and rollout.server.url):
        return
    if (python := rollout.server.python) is not None:
        if shutil.which(os.path.expanduser(python)) is None:
            raise ConfigError(f"{where}.server.python={python} is no program here; give the Python that has {name}")
    elif not has_module(name):
        if name == "vllm":
            way = "Install it: pip install -e '.[vllm]' in a checkout of verl"
        else:
            way = "Make an environment for it: scripts/install_sglang_server_env.sh"
        raise ConfigError(
            f"{where}.name={name} needs {name}, which is not installed here. {way}; {where}.server.python names its "
            f"Python where that is another environment. {where}.name=native needs nothing more"
        )
