"""Ranks for simulated clusters: actors of Ray that import neither torch nor the package, and so start in a second."""

import json
import os
import queue
import sys
from typing import Any

import ray


class LightRank:
    """Stands where `RankActor` does, and answers every call but `wait` with where it is and how it was started."""

    def __init__(self, label: str):
        self.replies_to_send: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def place(self, resource: str) -> tuple[str, str, list[str]]:
        context: Any = ray.get_runtime_context()
        self.node, self.ids = context.get_node_id(), context.get_accelerator_ids().get(resource, [])
        util: Any = ray.util
        return self.node, util.get_node_ip_address(), self.ids

    def device_names(self, resource: str) -> list[str]:
        return self.ids

    def versions(self) -> dict[str, str]:
        return json.loads(os.environ["VERL_TEST_VERSIONS"])  # of the shell: light ranks cannot ask the package

    def open_store(self, address: str) -> int:
        return 29500

    def start(self, variables: dict[str, str], share_cores: bool, folder: str, reports: str, factory: Any) -> None:
        heavy = [name for name in ("torch", "verl") if name in sys.modules]
        self.said = {**variables, "node": self.node, "devices": self.ids, "pid": os.getpid(), "heavy": heavy}
        self.answer(0)

    def answer(self, number: int) -> None:
        text = json.dumps(["tuple", 1, [number, True, json.dumps(self.said)]])
        self.replies_to_send.put((text.encode(), []))

    def deliver(self, number: int, header: Any, body: Any) -> None:
        for _, _, (call, method) in json.loads(header[0])[2]:
            if method != "wait":
                self.answer(call)

    def finish(self, number: int) -> None:
        pass

    def replies(self) -> list[Any]:
        try:
            return [self.replies_to_send.get(timeout=10.0)]
        except queue.Empty:
            return []
