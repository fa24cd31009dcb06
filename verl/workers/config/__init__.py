"""Configuration classes at the path other people's code imports them from."""

from verl.config import *
from verl.utils.import_paths import refuse_missing_names

__getattr__ = refuse_missing_names(__name__)
