"""Helpers on TensorDict, where published code imports them."""

from verl.doors.tensordict_utils import __getattr__ as __getattr__
