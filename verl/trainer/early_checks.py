"""What is looked at before heavy libraries are loaded; the preflight looks again, with all the rest."""

import importlib.metadata
import os
from collections.abc import Callable, Sequence

from verl.config import HFModelConfig, RunConfig, SFTConfig
from verl.config.check import check_supported, uses_critic
from verl.config.engine import STRATEGIES
from verl.models.model_place import existing_folder
from verl.observe.tracker_checks import check_trackers
from verl.plugin.loading import GROUP, MODULES_VARIABLE
from verl.trainer.engine_installed import check_engine_is_installed
from verl.utils.errors import ConfigError, Mistakes, VerlError
from verl.utils.external_code import user_file
from verl.utils.suggest import did_you_mean

WHAT = "things keep this run from starting"


def say_early_mistakes(config: RunConfig | SFTConfig, say: Callable[[str], None]) -> list[VerlError]:
    """`early_mistakes`, which `say` has been told; a later refusal leaves them out (`Findings(said=...)`)."""
    mistakes = early_mistakes(config)
    try:
        mistakes.refuse(WHAT)
    except VerlError as error:
        say(f"error: {error}\nlooking for what else keeps this run from starting")
    return mistakes.errors


def early_mistakes(config: RunConfig | SFTConfig) -> Mistakes:
    """What is missing on this machine of engines, model folders, data files, trackers and the file of a reward."""
    mistakes = Mistakes()
    with mistakes:
        check_supported(config)
    with mistakes:
        check_trackers(config.trainer.logger)
    if isinstance(config, RunConfig):
        arr, reward = config.actor_rollout_ref, config.reward.custom_reward_function
        with mistakes:
            check_engine_is_installed(arr)
        check_model_place(arr.model, arr.actor.strategy, mistakes)
        if uses_critic(config):
            check_model_place(config.critic.model, config.critic.strategy, mistakes)
        with mistakes:
            user_file(reward.path, "reward.custom_reward_function")
    else:
        check_model_place(config.model, config.engine.strategy, mistakes)
    for files in files_read(config).values() if not config.data.custom_cls.path else ():
        with mistakes:
            check_files(files)
    return mistakes


def check_model_place(model: HFModelConfig, strategy: str, mistakes: Mistakes) -> None:
    """Keeps in `mistakes` that a model's folder is not there, or that no training engine has that name."""
    with mistakes:
        existing_folder(model.path, "path")
    if model.tokenizer_path:
        with mistakes:
            existing_folder(model.tokenizer_path, "tokenizer_path")
    others_may_register = model.external_lib or os.environ.get(MODULES_VARIABLE) or _has_plugins()
    if strategy not in STRATEGIES and not others_may_register:
        mistakes.add(ConfigError(f"no engine named {strategy!r}; {did_you_mean(strategy, STRATEGIES)}"))


def _has_plugins() -> bool:
    return bool(importlib.metadata.entry_points(group=GROUP))


def files_read(config: RunConfig | SFTConfig) -> dict[str, str | list[str]]:
    """The data files that the run reads, by key."""
    data = config.data
    files = {"data.train_files": data.train_files}
    if data.val_files and (isinstance(config, SFTConfig) or validates(config)):
        files["data.val_files"] = data.val_files
    return files


def validates(config: RunConfig) -> bool:
    """Whether the run ever validates."""
    settings = config.trainer
    return bool(config.data.val_files) and (settings.val_before_train or settings.val_only or settings.test_freq > 0)


def check_files(files: str | Sequence[str]) -> None:
    """DataError where a data file is not there."""
    paths = [files] if isinstance(files, str) else files
    if not paths or not all(os.path.isfile(os.path.expanduser(file)) for file in paths):
        from verl.data.data_files import data_paths  # for its errors: it loads pyarrow

        data_paths(paths)
