"""A pretended device whose library polls: gloo's collectives, which count as started, and told as a GPU's are.

A rank imports this module through VERL_USE_EXTERNAL_MODULES.
"""

import json
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json, _register_handler

from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.cpu import PlatformCPU

HANDLER = "pretended_trace_json"


@PlatformRegistry.register(platform="polling")
class PlatformPolling(PlatformCPU):
    """A CPU that is said to poll."""

    vendor_name = "polling"

    def collectives_handler(self) -> str | None:
        return HANDLER


def answer(request: Any, response: Any) -> None:
    """torch's own record of gloo; it lacks the start of a collective, and the members of a group."""
    trace = json.loads(_dump_fr_trace_json())
    for entry in trace["entries"]:
        entry["state"] = "completed" if entry["retired"] else "started"
        trace["pg_config"][entry["process_group"][0]] = {"ranks": str(list(range(dist.get_world_size())))}
    response.set_content(json.dumps(trace).encode(), "application/json")
    response.set_status(200)


_register_handler(HANDLER, answer)
