"""`RLHFDataset` and `collate_fn`, where published data sets import them."""

from verl.doors.rl_dataset import *
