"""Checks of one value by the name of its key, beyond its type and bounds."""

import math
from typing import Any

from verl.config.overrides import is_number
from verl.utils.errors import ConfigError
from verl.utils.paths import expand_home

_CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")
_DTYPES = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16", "half", "fp64", "float64", "auto")
_PATH_ENDINGS = ("path", "dir", "files", "lib")
_PATH_NAMES = ("tokenizer", "python")
_REJECTIONS = tuple(f"{unit}_{k}" for unit in ("token", "seq_sum", "seq_mean") for k in ("k1", "k2", "k3"))
_REJECTIONS += ("seq_max_k2", "seq_max_k3")


def check_value(path: str, name: str, value: Any) -> None:
    """ConfigError where the value of key `path`, whose last part is `name`, cannot be meant."""
    if name == "top_k" and value != -1 and value < 1:
        raise ConfigError(f"{path}={value} must be -1 (all tokens) or at least 1")
    if name.endswith("_max_samples") and value != -1 and value < 1:
        raise ConfigError(f"{path}={value} must be -1 (all rows) or at least 1")
    if name in ("save_contents", "load_contents") and not set(value) <= set(_CHECKPOINT_CONTENTS):
        unknown = sorted(set(value) - set(_CHECKPOINT_CONTENTS))
        raise ConfigError(f"{path} names {', '.join(unknown)}; known parts are {', '.join(_CHECKPOINT_CONTENTS)}")
    if name in ("dtype", "model_dtype") and value.removeprefix("torch.") not in _DTYPES:
        raise ConfigError(f"{path}={value!r} is not one of {', '.join(_DTYPES)}")
    if name == "betas" and not (len(value) == 2 and all(0 <= beta < 1 for beta in value)):
        raise ConfigError(f"{path}={value} must be two numbers from 0 up to, not including, 1")
    if name in ("save_freq", "test_freq") and isinstance(value, str) and value != "after_each_epoch":
        raise ConfigError(f"{path}={value!r} must be a number of steps or after_each_epoch")
    if name in ("project_name", "experiment_name") and value is not None:
        _check_folder_name(path, value)
    if path == "reward.weights":
        for part, weight in value.items():
            if not isinstance(weight, int | float) or isinstance(weight, bool) or not math.isfinite(weight):
                raise ConfigError(f"{path}.{part}={weight!r} must be a number, the weight of that part of the reward")
    _check_rollout_correction(path, name, value)


def _check_folder_name(path: str, value: str) -> None:
    """A name becomes a folder below the run's own: it must not lead out of it."""
    if value.startswith(("/", "~")) or ".." in value.split("/") or not value.isprintable():
        raise ConfigError(
            f"{path}={value!r} is also the name of a folder and must stay inside its own; write it without '..', a "
            "leading '/' or '~' and control characters, and set trainer.default_local_dir for a place elsewhere"
        )


def expand_home_folders(path: str, value: Any) -> Any:
    """The value of key `path`; where it names files or folders, `~` and `~name` are home folders."""
    name = path.rsplit(".", 1)[-1]
    if isinstance(value, list):
        return [expand_home_folders(path, one) for one in value]
    is_path = isinstance(value, str) and (name.endswith(_PATH_ENDINGS) or name in _PATH_NAMES)
    return str(expand_home(value, path)) if is_path and value.startswith("~") else value


def _check_rollout_correction(path: str, name: str, value: Any) -> None:
    """Rules and thresholds of `rollout_correction`, which are strings of several values; any other key passes."""
    if name == "rollout_rs" and value is not None:
        unknown = [rule for rule in map(str.strip, value.split(",")) if rule not in _REJECTIONS]
        if unknown:
            raise ConfigError(f"{path}={value!r} names {unknown[0]!r}; known rules are {', '.join(_REJECTIONS)}")
    if name in ("rollout_is_threshold", "rollout_rs_threshold") and value is not None:
        parts = str(value).split(",") if name == "rollout_rs_threshold" else [str(value)]
        if not all(map(_is_threshold, parts)):
            raise ConfigError(f"{path}={value!r} must be a number above 0, or lo_hi with 0 <= lo < hi, such as 0.5_2.0")


def _is_threshold(text: str) -> bool:
    limits = text.strip().split("_")
    if len(limits) > 2 or not all(map(is_number, limits)):
        return False
    numbers = [float(limit) for limit in limits]
    if not all(math.isfinite(number) for number in numbers):
        return False
    return numbers[0] > 0 if len(numbers) == 1 else 0 <= numbers[0] < numbers[1]
