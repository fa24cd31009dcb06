"""Import path of training one step off the policy; its program is `main_ppo`."""

from verl.utils.import_paths import refuse_missing_names

__getattr__ = refuse_missing_names(__name__)
