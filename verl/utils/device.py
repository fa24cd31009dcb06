"""The device of this process, where plug-ins and published code ask for it."""

from verl.doors.device import *
from verl.doors.device import __getattr__ as __getattr__
