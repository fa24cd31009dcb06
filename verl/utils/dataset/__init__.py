"""Base classes of a `data.custom_cls`, where published data sets import them."""

from verl.doors.rl_dataset import RLHFDataset, collate_fn
from verl.utils.import_paths import refuse_missing_names

__getattr__ = refuse_missing_names(__name__)
