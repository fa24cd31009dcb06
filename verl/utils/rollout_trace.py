"""Traces of agent loops, where published loops import them."""

from verl.doors.rollout_trace import *
