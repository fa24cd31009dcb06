"""Checks before heavy libraries are loaded; the preflight looks again, with all the rest."""

import importlib.metadata
import os
import sys
from collections.abc import Callable

from verl.config import HFModelConfig, RunConfig, SFTConfig
from verl.config.algorithm import ESTIMATORS, POLICY_LOSSES
from verl.config.check import check_can_start, trained_actor, uses_critic
from verl.config.engine import STRATEGIES
from verl.data.file_places import data_paths
from verl.models.model_place import existing_folder, reward_model_folder
from verl.observe.tracker_checks import check_trackers
from verl.plugin.loading import GROUP, MODULES_VARIABLE
from verl.plugin.platform.platform_manager import check_device_name
from verl.rewards.managers import check_reward_manager
from verl.trainer.engine_installed import check_rollout_engine_is_installed
from verl.utils.errors import ConfigError, Mistakes, VerlError
from verl.utils.external_code import check_user_object
from verl.utils.suggest import did_you_mean

WHAT = "things keep this run from starting"


def say_early_mistakes(config: RunConfig | SFTConfig, say: Callable[[str], None]) -> bool:
    """Whether `early_mistakes` finds any, which `say` is told; the refusal that ends the run says all of them."""
    mistakes = early_mistakes(config)
    try:
        mistakes.raise_if_any(WHAT)
    except VerlError as error:
        say(f"error: {error}\nlooking for what else keeps this run from starting")
    return bool(mistakes.errors)


def early_mistakes(config: RunConfig | SFTConfig) -> Mistakes:
    """Lists engines, model folders, data files, trackers and rewards that this machine lacks, and unknown names."""
    mistakes = Mistakes()
    with mistakes:
        check_can_start(config)
    with mistakes:
        check_trackers(config.trainer.logger, config.trainer.tracker_errors)
    if isinstance(config, RunConfig):
        arr, reward = config.actor_rollout_ref, config.reward.custom_reward_function
        with mistakes:
            check_rollout_engine_is_installed(arr)
        check_model_place(arr.model, arr.actor.strategy, mistakes)
        if uses_critic(config):
            check_model_place(config.critic.model, config.critic.strategy, mistakes)
        with mistakes:
            check_user_object(reward.path, reward.name, "reward.custom_reward_function")
        if config.reward.reward_model.enable and config.reward.reward_model.model_path:
            with mistakes:
                reward_model_folder(config.reward.reward_model.model_path)
    else:
        check_model_place(config.model, config.engine.strategy, mistakes)
    check_names(config, mistakes)
    rows = config.data.custom_cls
    if rows.name:
        with mistakes:
            check_user_object(rows.path, rows.name, "data.custom_cls")
    for files in files_read(config).values() if not config.data.custom_cls.path else ():
        with mistakes:
            data_paths(files)
    return mistakes


def check_model_place(model: HFModelConfig, strategy: str, mistakes: Mistakes) -> None:
    """Keeps in `mistakes` that a model's folder is not there, or that no training engine has that name."""
    with mistakes:
        existing_folder(model.path, "path")
    if model.tokenizer_path:
        with mistakes:
            existing_folder(model.tokenizer_path, "tokenizer_path")
    if strategy not in STRATEGIES and not others_may_register(model):
        mistakes.add(ConfigError(f"no engine named {strategy!r}; {did_you_mean(strategy, STRATEGIES)}"))


def others_may_register(model: HFModelConfig) -> bool:
    """Whether names beyond the built-in ones may be known once everything is loaded."""
    return bool(model.external_lib or os.environ.get(MODULES_VARIABLE) or importlib.metadata.entry_points(group=GROUP))


def check_names(config: RunConfig | SFTConfig, mistakes: Mistakes) -> None:
    """Keeps in `mistakes` the names that are certain to be unknown."""
    if others_may_register(config.actor_rollout_ref.model if isinstance(config, RunConfig) else config.model):
        return
    with mistakes:
        check_device_name(config.trainer.device)
    if not isinstance(config, RunConfig):
        return
    with mistakes:
        check_reward_manager(config.reward.reward_manager)
    if "verl.algorithms.advantage_registry" in sys.modules:  # a program that calls us may have registered its own
        return
    estimator, loss = config.algorithm.adv_estimator, trained_actor(config).policy_loss.loss_mode
    for kind, name, known in (("advantage estimator", estimator, ESTIMATORS), ("policy loss", loss, POLICY_LOSSES)):
        if name not in known:
            mistakes.add(ConfigError(f"unknown {kind} {name!r}; {did_you_mean(name, known)}"))


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
