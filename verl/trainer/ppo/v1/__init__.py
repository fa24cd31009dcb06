"""Import path of the registry of trainers, which does not exist here: one trainer serves all modes."""

from verl.utils.import_paths import refuse_missing_names

__getattr__ = refuse_missing_names(__name__)
