"""Files in HDFS or on this machine, where published data scripts import their functions."""

from verl.utils.hadoop import *
