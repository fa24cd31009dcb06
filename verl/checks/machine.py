"""Checks of what a run needs on this machine, and of names, before heavy libraries are loaded."""

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Collection
from functools import partial

from verl.checks.findings import Findings
from verl.config import ActorRolloutRefConfig, HFModelConfig, RunConfig, SFTConfig
from verl.config.algorithm import ESTIMATORS, POLICY_LOSSES
from verl.config.check import check_can_start, trained_actor, uses_critic
from verl.config.engine import STRATEGIES
from verl.config.foreign_keys import load_foreign_keys
from verl.data.file_places import data_paths
from verl.models.model_place import existing_folder, reward_model_folder
from verl.observe.tracker_checks import check_trackers
from verl.plugin.installed import has_module
from verl.plugin.loading import GROUP, MODULES_VARIABLE
from verl.plugin.platform.platform_manager import check_device_name
from verl.rewards.managers import check_reward_manager
from verl.utils.errors import ConfigError
from verl.utils.external_code import check_user_object
from verl.utils.suggest import did_you_mean
from verl.workers.rollout.engines import find_rollout_engine

MODEL_KEY = "actor_rollout_ref.model.path"
FUNCTION, MANAGER = "reward.custom_reward_function", "reward.reward_manager"
REWARD_MODEL, ROWS_CLASS = "reward.reward_model.model_path", "data.custom_cls"


def early_findings(config: RunConfig | SFTConfig) -> Findings:
    """Engines, model folders, data files, trackers and rewards, as far as this machine has them, and unknown names.

    The preparation of a run goes on with them: it asks nothing again that has refused here.
    """
    found, settings = Findings(), config.trainer
    found.check("features", lambda: check_can_start(config), "every configured feature is supported")
    refused = load_foreign_keys(RunConfig).refused_values["trainer.logger"]  # by the features
    names = [name for name in settings.logger if name not in refused]
    found.check("trainer.logger", lambda: check_trackers(names, settings.tracker_errors), ", ".join(names))
    if isinstance(config, RunConfig):
        arr = config.actor_rollout_ref
        check_rollout_engine(arr, found)
        check_model_place(MODEL_KEY, arr.model, arr.actor.strategy, found)
        if uses_critic(config) and config.critic.model.path != arr.model.path:
            check_model_place("critic.model.path", config.critic.model, config.critic.strategy, found)
        _check_reward(config, found)
    else:
        check_model_place("model.path", config.model, config.engine.strategy, found)
    _check_names(config, found)
    rows = config.data.custom_cls
    if name := rows.name:
        found.check(ROWS_CLASS, lambda: check_user_object(rows.path, name, ROWS_CLASS), name)
    for key, files in (
        data_files_by_key(config).items() if not rows.path else ()
    ):  # a user's class knows what its files are
        check_files(key, files, found)
    return found


def check_files(key: str, files: str | list[str], found: Findings) -> None:
    """Whether the data files of `key` are there."""
    found.check(key, lambda: data_paths(files), files if isinstance(files, str) else ", ".join(files))


def check_rollout_engine(arr: ActorRolloutRefConfig, found: Findings) -> bool:
    """Whether the engine of `rollout.name` is known and installed."""
    return found.check("rollout", lambda: check_rollout_engine_is_installed(arr), arr.rollout.name)


def check_rollout_engine_is_installed(arr: ActorRolloutRefConfig) -> None:
    """ConfigError where `rollout.name` is unknown, or its library or server program is not on this machine."""
    where, rollout = "actor_rollout_ref.rollout", arr.rollout
    name, engine = rollout.name, find_rollout_engine(rollout.name, arr.model.external_lib)
    if engine.package is None or (engine.traits.joins_server and rollout.server.url):
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


def check_model_place(key: str, model: HFModelConfig, strategy: str, found: Findings) -> None:
    """Whether a model's folder is there, and a training engine has that name; `key` is that of the folder."""
    found.run(key, lambda: existing_folder(model.path, "path"))
    if (path := model.tokenizer_path) is not None:
        found.run("tokenizer", lambda: existing_folder(path, "tokenizer_path"))
    if not others_may_register(model):
        found.check("engine", lambda: _check_known("no engine named", strategy, STRATEGIES), strategy)


def _check_known(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(f"{what} {name!r}; {did_you_mean(name, known)}")


def others_may_register(model: HFModelConfig) -> bool:
    """Whether names beyond the built-in ones may be known once everything is loaded."""
    return bool(model.external_lib or os.environ.get(MODULES_VARIABLE) or importlib.metadata.entry_points(group=GROUP))


def _check_reward(config: RunConfig, found: Findings) -> None:
    function, model = config.reward.custom_reward_function, config.reward.reward_model
    if function.path is not None:
        found.check(FUNCTION, lambda: check_user_object(function.path, function.name, FUNCTION), function.name)
    if model.enable and (path := model.model_path):
        found.run(REWARD_MODEL, lambda: reward_model_folder(path))


def _check_names(config: RunConfig | SFTConfig, found: Findings) -> None:
    """Refuses the names that are certain to be unknown."""
    if others_may_register(config.actor_rollout_ref.model if isinstance(config, RunConfig) else config.model):
        return
    found.check("trainer.device", lambda: check_device_name(config.trainer.device), config.trainer.device)
    if not isinstance(config, RunConfig):
        return
    manager = config.reward.reward_manager
    found.check(MANAGER, lambda: check_reward_manager(manager), manager.name)
    if "verl.algorithms.advantage_registry" in sys.modules:  # a program that calls us may have registered its own
        return
    estimator, loss = config.algorithm.adv_estimator, trained_actor(config).policy_loss.loss_mode
    for kind, name, known in (("advantage estimator", estimator, ESTIMATORS), ("policy loss", loss, POLICY_LOSSES)):
        found.check(kind, partial(_check_known, f"unknown {kind}", name, known), name)


def data_files_by_key(config: RunConfig | SFTConfig) -> dict[str, str | list[str]]:
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
