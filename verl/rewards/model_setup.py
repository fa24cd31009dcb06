"""Builds what `reward.reward_model` asks for; what cannot score answers is refused before anything starts."""

import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase

from verl.config import HFModelConfig, RewardConfig, RunConfig
from verl.config.reward import RM, ScoringModelConfig, reward_model_place
from verl.models.load import load_tokenizer, read_config
from verl.models.model_place import reward_model_folder
from verl.plugin.installed import has_module
from verl.rewards.conversation_tokens import ConversationTokens, other_tokenizer
from verl.rewards.model_reward import ModelReward
from verl.rewards.run_scorer import rules_of
from verl.utils.errors import ConfigError
from verl.workers.rollout.remote.http_server import HOST

KEY = "reward.reward_model.model_path"
ROUTER_ADDRESS = "reward_router_address"  # keyword of a function that asks a judge


def build_model_reward(config: RunConfig, tokenizer: PreTrainedTokenizerBase, shares_devices: bool) -> ModelReward:
    """The reward of the configured reward model, without a backend yet; ConfigError where it cannot score answers."""
    reward = config.reward.reward_model
    check_server_is_installed(reward)
    folder, where = classifier_folder(reward.model_path), f"{KEY}={reward.model_path}"
    own = load_tokenizer(HFModelConfig(path=str(folder)))
    other = other_tokenizer(tokenizer, own, reward.input_tokenizer is not None, where)
    reader = ConversationTokens(tokenizer, other, read_config(folder).pad_token_id)
    return ModelReward(reader, rules_of(config.reward), shares_devices)


def classifier_folder(path: str | None) -> Path:
    """The folder of a sequence-classification model with one label; ConfigError for another."""
    if path is None:
        raise ConfigError(f"reward.reward_model.enable=True needs {KEY}=DIR, the folder of the model")
    if not ((folder := reward_model_folder(path)) / "config.json").is_file():
        raise ConfigError(f"{KEY}={path} has no config.json, so it is no model's folder")
    model = read_config(folder)
    kinds = model.architectures or []
    train = "train one with `verl reward-model`, or take one for sequence classification"
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise ConfigError(f"{KEY}={path} is no reward model: its config.json says {', '.join(kinds) or None}; {train}")
    if model.num_labels != 1:
        raise ConfigError(f"{KEY}={path} has {model.num_labels} labels, and a reward model has one; {train}")
    if "score.weight" not in (names := _tensor_names(folder)):
        found = f"only {len(names)} other tensors" if names else "no *.safetensors"
        raise ConfigError(f"{KEY}={path} has {found}, and a reward model has a head score.weight; {train}")
    return folder


def _tensor_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, "pt") as file:
                names |= set(file.keys())
        except SafetensorError as error:
            raise ConfigError(f"{KEY}: {path} cannot be read ({error}); download it again") from error
    return names


def judge_keywords(settings: ScoringModelConfig, port: int) -> dict[str, Any]:
    """Keyword arguments for a function that asks a judge; ConfigError where the judge cannot be served."""
    check_server_is_installed(settings)
    if settings.model_path is None:
        raise ConfigError(f"reward.reward_model.enable=True needs {KEY}=DIR, the folder of the judge")
    folder = reward_model_folder(settings.model_path)
    if any(kind.endswith("ForSequenceClassification") for kind in read_config(folder).architectures or []):
        raise ConfigError(
            f"{KEY}={settings.model_path} is a reward model, which answers no questions; add reward.weights.{RM}=1.0 "
            "so that it scores beside the function, or drop reward.custom_reward_function.path"
        )
    tokenizer = load_tokenizer(HFModelConfig(path=str(folder)))
    if not tokenizer.chat_template:
        raise ConfigError(f"{KEY}={settings.model_path}: its tokenizer has no chat template, which a judge needs")
    return {ROUTER_ADDRESS: f"{HOST}:{port}", "reward_model_tokenizer": tokenizer}


def check_server_is_installed(settings: ScoringModelConfig) -> None:
    """ConfigError where the program of the servers is not on this machine."""
    name, python, where = settings.rollout.name, settings.rollout.server.python, "reward.reward_model.rollout"
    if python is not None and shutil.which(os.path.expanduser(python)) is None:
        raise ConfigError(f"{where}.server.python={python} is no program here; give the Python that has {name}")
    if python is None and name in ("vllm", "sglang") and not has_module(name):
        raise ConfigError(
            f"{where}.name={name} needs {name}, which is not installed here; {where}.server.python names its Python "
            "where that is another environment"
        )


def takes_turns(config: RewardConfig, on_devices: bool) -> bool:
    """Whether the model and the rollout take turns on the devices; servers on CPUs do not."""
    settings = config.reward_model
    if settings.enable_resource_pool:
        return False
    return reward_model_place(config) == "ranks" or (on_devices and settings.rollout.free_cache_engine)
