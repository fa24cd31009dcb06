"""The FSDP engines, at the import path that published plug-ins use."""

from verl.workers.engine.fsdp_engine import *
