"""`Tracking`, where published code imports it."""

from verl.observe.tracking import Tracking
from verl.utils.import_paths import refuse_missing_names

__getattr__ = refuse_missing_names(__name__)
