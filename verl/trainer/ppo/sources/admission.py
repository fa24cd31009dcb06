"""The two rules of asynchronous training: how many prompts are under way, and how old a group may be when trained.

No input or output and no clock: the same calls give the same answers. Ages are in policy versions.
"""

import heapq
import math
from collections import Counter
from typing import Any

from verl.config.asynchronous import check_ages

WAIT, DROP = "wait", "drop"
STRATEGIES = (WAIT, DROP)


class AdmissionRules:
    """Says when a prompt may be sent, and which finished groups a step takes. Groups are numbered from 0 as admitted.

    Rule 1: a prompt is admitted while in flight + queued + in training < (1 + staleness) x batch groups. A publish
    frees one batch, so that by Little's law a group waits `staleness` versions in the mean. Its largest age has no
    bound by this rule: a slow group is overtaken for as long as it is slow.

    Rule 2: a step takes finished groups, the oldest first, and none that is older than `max_lag` versions. With `wait`,
    it begins only once the groups that it leaves can all be trained in time, `batch` a step; an unfinished group that
    would be late is waited for. With `drop`, groups that have become too old leave untrained. A step may take its
    groups in parts, each as soon as it is there: the parts to come are room for what a part leaves.
    """

    def __init__(self, batch: int, staleness: float = 0.0, max_lag: int = 8, strategy: str = WAIT):
        check_ages(staleness, max_lag)
        self.batch, self.strategy = batch, strategy
        self.max_lag = max_lag if staleness > 0 else 0
        self.limit = math.ceil(round((1 + staleness) * batch, 9))  # the first count that is not below the bound
        self.version = self.admitted = 0
        self.in_training: list[int] = []
        self.versions: dict[int, int] = {}  # group -> version at its admission: in flight or queued, the oldest first
        self._queued: set[int] = set()  # finished, not taken
        self._oldest: list[int] = []  # heap of the same, and of groups that have left since
        self._outstanding: Counter[int] = Counter()  # by version: in flight or queued
        self._finished: Counter[int] = Counter()  # by version: queued

    @property
    def room(self) -> int:
        """How many prompts may be admitted now."""
        return max(0, self.limit - len(self.versions) - len(self.in_training))

    @property
    def num_queued(self) -> int:
        """Finished groups that no step has taken."""
        return len(self._queued)

    @property
    def queued(self) -> list[int]:
        """The queued groups, in the order of their admission."""
        return sorted(self._queued)

    def admit(self) -> int:
        """The number of a new group, at the version that is published now."""
        number, self.admitted = self.admitted, self.admitted + 1
        self.versions[number] = self.version
        self._outstanding[self.version] += 1
        return number

    def finish(self, number: int) -> None:
        """The answers of a group are complete. One that has left, or is queued already, is ignored."""
        if number in self.versions and number not in self._queued:
            self._queued.add(number)
            heapq.heappush(self._oldest, number)
            self._finished[self.versions[number]] += 1

    def evict(self, number: int) -> None:
        """A group leaves untrained: it cannot be trained on. Its place is free for another prompt."""
        self._leave(number)

    @property
    def ready(self) -> bool:
        """Whether a step can take all its groups now."""
        return self.is_ready(self.batch)

    def is_ready(self, count: int) -> bool:
        """Whether a step can take `count` groups: so many are finished, and none is left behind that would be late."""
        if self.num_queued < count:
            return False
        if self.strategy == DROP:
            return True
        waiting = finished = 0
        later = self.batch - len(self.in_training) - count  # of this version
        for version in sorted(self._outstanding):
            waiting += self._outstanding[version]
            finished += self._finished[version]
            steps_left = version + self.max_lag - self.version  # after this one
            if waiting - min(count, finished) > steps_left * self.batch + later:
                return False
        return True

    def take(self, count: int | None = None) -> list[int]:
        """The oldest finished groups, `batch` or `count` of them, which a step trains on until `publish`. Only when it
        `is_ready`, and no more than `batch` a version in all."""
        taken: list[int] = []
        while len(taken) < (self.batch if count is None else count):
            if (number := heapq.heappop(self._oldest)) in self._queued:
                self._leave(number)
                taken.append(number)
        self.in_training = self.in_training + taken
        return taken

    def publish(self, version: int) -> list[int]:
        """Ends the training of what was taken; returns the groups that are dropped because they are too old now."""
        self.in_training, self.version = [], version
        if self.strategy != DROP:
            return []
        late = []
        for number, admitted_at in self.versions.items():  # oldest first
            if version - admitted_at <= self.max_lag:
                break
            late.append(number)
        for number in late:
            self._leave(number)
        return late

    def _leave(self, number: int) -> None:
        version = self.versions.pop(number)
        counted = [self._outstanding, *([self._finished] if number in self._queued else [])]
        self._queued.discard(number)
        for counts in counted:
            counts[version] -= 1
            if not counts[version]:
                del counts[version]

    def state_dict(self) -> dict[str, Any]:
        """JSON values: the groups that are in flight or queued, in the order of their admission."""
        groups = [[number, version, number in self._queued] for number, version in self.versions.items()]
        return {"version": self.version, "admitted": self.admitted, "groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after `state`; nothing is in training."""
        self.version, self.admitted, self.in_training = state["version"], state["admitted"], []
        for kept in (self.versions, self._queued, self._oldest, self._outstanding, self._finished):
            kept.clear()
        for number, version, is_queued in state["groups"]:
            self.versions[number] = version
            self._outstanding[version] += 1
            if is_queued:
                self.finish(number)
