"""Import path for outside data scripts to `verl.utils.hadoop`."""

from verl.utils.hadoop import HDFS_PREFIX, copy, exists, makedirs

__all__ = ["HDFS_PREFIX", "copy", "exists", "makedirs"]
