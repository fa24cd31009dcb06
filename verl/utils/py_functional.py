"""Plain functions, where published code imports them."""

from verl.doors.py_functional import *
