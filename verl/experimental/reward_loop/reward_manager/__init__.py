"""The base class of reward managers and their registry, where published managers import them."""

from verl.rewards.manager_class import RewardManagerBase, register
from verl.utils.import_paths import refuse_missing_names

__getattr__ = refuse_missing_names(__name__)
