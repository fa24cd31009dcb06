"""The configurations of preference training, DPO and reward models: that of fine-tuning, and `loss`."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import Section, key, section
from verl.config.data import SFTDataConfig
from verl.config.optim import FSDPOptimizerConfig
from verl.config.sft import SFTConfig
from verl.config.trainer import SFTTrainerConfig

_FILES = "~/data/preferences/train.parquet"


@dataclass(frozen=True, kw_only=True)
class PreferenceLossConfig(Section):
    """The loss of a pair of answers, of which one was preferred."""

    name: str = key("sigmoid", "sigmoid (DPO, Bradley-Terry), ipo, hinge (SLiC), simpo, or one that you registered.")
    beta: float = key(0.1, "Nats of log-prob to units of implicit reward; not used by reward models.", greater_than=0)
    label_smoothing: float = key(0.0, "sigmoid: share of pairs taken to be labelled wrongly.", minimum=0, maximum=0.5)
    gamma: float = key(0.5, "simpo: the reward margin that it asks for.", minimum=0)
    extra: dict[str, Any] = key({}, "Any keys of your own, for a loss that you registered.")


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(SFTConfig):
    """Keys of both kinds of preference training."""

    data: SFTDataConfig = section(SFTDataConfig, train_files=_FILES)
    loss: PreferenceLossConfig = section(PreferenceLossConfig)


@dataclass(frozen=True, kw_only=True)
class DPOConfig(PreferenceConfig):
    """Configuration of `verl dpo`."""

    module = "verl.trainer.dpo_trainer"
    run_name = "dpo"
    task = "preference optimization"

    trainer: SFTTrainerConfig = section(SFTTrainerConfig, project_name="dpo")
    optim: FSDPOptimizerConfig = section(FSDPOptimizerConfig, lr=1e-6)


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(PreferenceConfig):
    """Configuration of `verl reward-model`."""

    module = "verl.trainer.reward_trainer"
    run_name = "reward-model"
    task = "reward-model training"

    trainer: SFTTrainerConfig = section(SFTTrainerConfig, project_name="reward-model")
    optim: FSDPOptimizerConfig = section(FSDPOptimizerConfig, lr=1e-5)
