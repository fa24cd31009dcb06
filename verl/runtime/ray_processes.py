"""The processes of ranks that are Ray's actors: on each node a small actor looks at those of that node."""

import contextlib
import os
from collections.abc import Collection, Sequence
from typing import Any

from verl.runtime.rank_observation import Counters, RankProcess, RanksOfMachine, WatchedRanks, helpers_of
from verl.runtime.rank_reports import RecordedError, folder_of_this_node

ANSWER_S, STACKS_S = 5.0, 30.0  # how long a node's answer is waited for


class _RanksOfNode(RanksOfMachine):
    """The ranks of a node, by the name of their folder there."""

    def __init__(self, processes: dict[int, RankProcess], name: str, parents: Collection[int]):
        super().__init__(processes, folder_of_this_node(name), parents)


class RanksOnRay(WatchedRanks):
    """Ranks on the nodes `nodes[rank]` (ids), in `processes[rank]`, which write stacks and errors to the folder
    `reports` (a name) among the temporary files there."""

    def __init__(self, nodes: Sequence[str], processes: Sequence[RankProcess], reports: str):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.nodes, self.processes = nodes, processes
        self.holders: list[Any] = []  # actors of objects for which a rank may wait
        self._by_node: dict[str, Any] = {}
        watcher: Any = ray.remote(_RanksOfNode)
        for node in dict.fromkeys(nodes):
            own = {rank: processes[rank] for rank in range(len(nodes)) if nodes[rank] == node}
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "scheduling_strategy": there}
            parents = [place.process for place in own.values()]
            self._by_node[node] = watcher.options(**options).remote(own, reports, parents)

    def look(self, ranks: Collection[int]) -> dict[int, Counters] | None:
        answers = self._ask("look", ranks)
        return None if None in answers else {rank: one for answer in answers for rank, one in answer.items()}

    def look_at_helpers(self) -> dict[tuple[str, int], Counters]:
        import ray

        own_ray = f"{ray.__path__[0]}/"  # in the command lines of the processes of a Ray that the driver has started
        found = helpers_of([os.getpid()], without=own_ray)
        for answer in self._ask("look_at_helpers"):
            found |= answer or {}
        return found

    def ask_for_stacks(self, ranks: Collection[int]) -> dict[int, str]:
        found = dict.fromkeys(ranks, "")
        for answer in self._ask("ask_for_stacks", ranks, STACKS_S):
            found |= answer or {}
        return found

    def wait_for_disks(self, ranks: Collection[int]) -> set[int]:
        return {rank for answer in self._ask("wait_for_disks", ranks) for rank in answer or ()}

    def describe(self, ranks: Collection[int]) -> dict[int, str]:
        found = {rank: f"node {self.nodes[rank]}, process {self.processes[rank].process}" for rank in ranks}
        for answer in self._ask("describe", ranks):
            found |= answer or {}
        return found

    def read_errors(self) -> list[RecordedError]:
        """The errors that all ranks have recorded, in order of time."""
        return sorted((one for answer in self._ask("read_errors") for one in answer or ()), key=lambda one: one.time)

    def kill(self) -> None:
        """End all ranks, also those that are stopped."""
        self._ask("kill")

    def close(self) -> None:
        """End the watching actors."""
        import ray

        self._ask("remove_reports")
        for watcher in self._by_node.values():
            with contextlib.suppress(Exception):  # Ray may have ended
                ray.kill(watcher)

    def _ask(self, method: str, ranks: Collection[int] | None = None, limit_s: float = ANSWER_S) -> list[Any]:
        """The answers of the nodes that have some of `ranks`, of all without ranks; None for one that gives none."""
        import ray

        refs, answers = [], []
        with contextlib.suppress(Exception):  # Ray has ended
            for node, watcher in self._by_node.items():
                call = getattr(watcher, method).remote
                if ranks is None:
                    refs.append(call())
                elif own := [rank for rank in ranks if self.nodes[rank] == node]:
                    refs.append(call(own))
            if method == "look_at_helpers":
                refs += [holder.look_at_helpers.remote() for holder in self.holders]
            if refs:
                ray.wait(refs, num_returns=len(refs), timeout=limit_s)
        for ref in refs:
            try:
                answers.append(ray.get(ref, timeout=0.1))
            except Exception:  # it has not answered, or is gone
                answers.append(None)
        return answers
