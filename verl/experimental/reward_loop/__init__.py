"""The door for reward managers of your own (`reward_manager`)."""

from verl.utils.import_paths import refuse_missing_names

__getattr__ = refuse_missing_names(__name__)
