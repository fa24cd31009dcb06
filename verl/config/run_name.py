"""The name of a run that was given none, and a configuration with the name and folders that the run took."""

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, TypeVar

from verl.config.run_config import RunConfig
from verl.config.sft import SFTConfig
from verl.config.user_keys import with_value

C = TypeVar("C", RunConfig, SFTConfig)
NAME_KEY = "trainer.experiment_name"
DATED = "derived: what runs and the date; a counter follows when the run starts"


def dated_name(values: Mapping[str, Any], what: str) -> dict[str, tuple[Any, str]]:
    """`<what>-<date>` for a run that got no name; empty for one that did."""
    return {} if values.get(NAME_KEY, "auto") != "auto" else {NAME_KEY: (f"{what}-{date.today()}", DATED)}


def has_dated_name(config: RunConfig | SFTConfig) -> bool:
    """Whether nobody named the run, so that a counter is still to come."""
    return bool(origins(config).get(NAME_KEY) == DATED)


def has_own_folder(config: RunConfig | SFTConfig) -> bool:
    """Whether trainer.default_local_dir is set, so that it does not follow the name."""
    return origins(config).get("trainer.default_local_dir", "default") != "default"


def origins(config: RunConfig | SFTConfig) -> dict[str, str]:
    """Where each value comes from; empty for a configuration that load_config did not make."""
    return dict(config.__dict__.get("_origins", {}))


def values_given(config: RunConfig | SFTConfig, below: Sequence[str]) -> dict[str, Any]:
    """Values by key that the user gave, of keys that are or lie in one of `below`."""
    out: dict[str, Any] = {}
    for key, origin in origins(config).items():
        given = not origin.startswith(("default", "follows", "derived", "chosen"))
        if given and any(f"{key}.".startswith(f"{name}.") for name in below):
            value: Any = config
            for name in key.split("."):
                value = value[name] if isinstance(value, dict) else getattr(value, name)
            out[key] = value
    return out


def same_command(config: RunConfig | SFTConfig) -> str:
    """The command that continues this run, as words, with the name that the run may have chosen itself."""
    return f"the same command with {NAME_KEY}={config.trainer.experiment_name}"


def with_trainer_values(config: C, values: Mapping[str, Any]) -> C:
    """The same configuration with other values of keys of `trainer`."""
    trainer = config.trainer
    for name, value in values.items():
        trainer = with_value(trainer, name, value)
    changed = {f"trainer.{name}": "chosen when the run started" for name in values}
    return with_value(with_value(config, "trainer", trainer), "_origins", {**origins(config), **changed})
