"""`reduce_metrics`, where published trainers import it."""

from verl.doors.py_functional import reduce_metrics
