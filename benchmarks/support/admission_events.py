"""Drives the rules of asynchronous training with groups whose durations have a heavy tail."""

import heapq
import random
from dataclasses import dataclass, field

from verl.trainer.ppo.sources.admission import AdmissionRules

TRAIN_TIME = 1.0  # of a step; the median group takes as long


class NoSecondRule(AdmissionRules):
    """Rule 1 alone: a step begins as soon as there are enough groups."""

    @property
    def ready(self) -> bool:
        return self.num_queued >= self.batch


@dataclass
class Found:
    """What a simulation has seen; an event is an admission, a finished group, a step or a publish."""

    events: int = 0
    admitted: int = 0
    lags: list[int] = field(default_factory=list)  # of every trained group
    trained: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    open: set[int] = field(default_factory=set)  # at the end
    trained_twice: int = 0
    late_waits: int = 0  # finished groups after which enough were there, but one that would be late was waited for
    loads: list[int] = field(default_factory=list)  # groups in flight, queued and in training, after admissions


def simulate(rules: AdmissionRules, num_events: int, sigma: float, seed: int = 0) -> Found:
    """Log-normal durations (`sigma`) of groups that run beside each other and beside the step in progress."""
    draws, found = random.Random(seed), Found()
    now, version = 0.0, 0
    running: list[tuple[float, int]] = []
    while found.events < num_events:
        for _ in range(rules.room):
            found.events += 1
            heapq.heappush(running, (now + draws.lognormvariate(0.0, sigma), rules.admit()))
        found.loads.append(len(rules.versions) + len(rules.in_training))
        while not rules.ready:
            found.late_waits += rules.num_queued >= rules.batch
            now, number = heapq.heappop(running)
            rules.finish(number)
            found.events += 1
        ages = {number: rules.versions[number] for number in rules.queued}
        taken = rules.take()
        found.trained_twice += len(found.trained & set(taken))
        found.trained |= set(taken)
        found.lags += [version - ages[number] for number in taken]
        now += TRAIN_TIME
        while running and running[0][0] <= now:  # finished during the step
            rules.finish(heapq.heappop(running)[1])
            found.events += 1
        version += 1
        found.dropped |= set(rules.publish(version))
        found.events += 2
    found.admitted, found.open = rules.admitted, set(rules.versions)
    return found
