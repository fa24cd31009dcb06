"""`DataProto`, where published reward managers import it."""

from verl.doors.protocol import *
from verl.utils.import_paths import refuse_missing_names

__getattr__ = refuse_missing_names(__name__)
