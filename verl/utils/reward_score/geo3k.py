"""Import path for outside code to the Geometry3K scorer."""

from verl.rewards.scorers.geo3k import *
