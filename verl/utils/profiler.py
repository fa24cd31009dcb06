"""Profiling, where published workers import it."""

from verl.doors.profiler import *
