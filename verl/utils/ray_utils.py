"""`get_event_loop`, where published workers import it."""

from verl.doors.py_functional import get_event_loop
