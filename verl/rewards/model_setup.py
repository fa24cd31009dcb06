"""Builds the reward of `reward.reward_model`; what cannot score answers is refused before anything starts."""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase

from verl.config import HFModelConfig, RunConfig
from verl.config.reward import RM, reward_model_place
from verl.models.load import load_tokenizer, read_config
from verl.models.model_place import reward_model_folder
from verl.rewards.conversation_tokens import ConversationTokens, other_tokenizer
from verl.rewards.model_reward import ModelReward
from verl.utils.errors import ConfigError

KEY = "reward.reward_model.model_path"


def build_model_reward(config: RunConfig, tokenizer: PreTrainedTokenizerBase, shares_devices: bool) -> ModelReward:
    """The reward of the configured reward model, without a backend yet; ConfigError where it cannot score answers."""
    reward = config.reward.reward_model
    folder, where = classifier_folder(reward.model_path), f"{KEY}={reward.model_path}"
    own = load_tokenizer(HFModelConfig(path=str(folder)))
    other = other_tokenizer(tokenizer, own, reward.input_tokenizer is not None, where)
    reader = ConversationTokens(tokenizer, other, read_config(folder).pad_token_id)
    return ModelReward(reader, config.reward.on_error, config.reward.weights.get(RM, 1.0), shares_devices)


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


def is_shared(config: RunConfig, on_devices: bool) -> bool:
    """Whether the reward model and the rollout take turns: on one device, or where the trainer's ranks score."""
    place = reward_model_place(config.reward)
    own_pool = config.reward.reward_model.enable_resource_pool
    return not own_pool and (place == "ranks" or (on_devices and config.reward.reward_model.rollout.free_cache_engine))
