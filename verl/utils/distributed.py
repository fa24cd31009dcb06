"""Process groups between separate jobs, where published transports import them."""

from verl.doors.distributed import *
