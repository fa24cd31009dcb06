"""The base class of reward managers and their registry, where published managers import them."""

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.rewards.manager_class import register
from verl.utils.import_paths import refuse_missing_names

__all__ = ["RewardManagerBase", "register"]
__getattr__ = refuse_missing_names(__name__)
