"""Ports and addresses, where published transports import them."""

from verl.doors.net_utils import *
