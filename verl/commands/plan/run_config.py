"""The configuration that a plan is for."""

import warnings
from collections.abc import Sequence

from verl.config import RunConfig, load_config
from verl.utils.errors import ConfigError


def load_run_config(words: Sequence[str]) -> RunConfig:
    """The configuration that `words` give over the preset; a run says its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = load_config(words)
    if not isinstance(config, RunConfig):
        raise ConfigError("this command is for runs of main_ppo; drop --config-name")
    return config
