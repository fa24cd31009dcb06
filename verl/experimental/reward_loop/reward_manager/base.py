"""The base class of reward managers, where published managers import it."""

from verl.rewards.manager_class import RewardManagerBase
from verl.utils.import_paths import refuse_missing_names

__getattr__ = refuse_missing_names(__name__)
