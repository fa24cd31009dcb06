"""What a schedule of generation and training gives: a simulation of events over the rules of a real run.

Generation is modelled by one line: a decode step, in which every running answer gets one token, takes `base_s` +
`per_answer_s` x answers running on a device. Training takes as long as it was seen to, and both are shared evenly by
their devices.
"""

import heapq
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from verl.trainer.ppo.admission import WAIT, AdmissionRules

Groups = Sequence[Sequence[float]]  # of each prompt: sampled tokens of its answers


@dataclass(frozen=True)
class Costs:
    """Seconds of one device."""

    base_s: float  # of a decode step, however many answers run
    per_answer_s: float  # of a decode step, for each answer that runs on the device
    train_s: float  # of a step: all but generation and publish
    publish_s: float  # on however many devices
    prefill_s: float = 0.0  # to compute a token of an unfinished answer anew, after a publish
    prompt_tokens: float = 0.0  # of an answer, computed anew with it
    max_running: float = 0.0  # answers that a device decodes at once; 0: no limit


@dataclass(frozen=True)
class Schedule:
    """A mode of training. `staleness` 0 is synchronous; `apart`: generation and training have devices of their own."""

    name: str
    staleness: float
    max_lag: int
    generation_devices: int
    training_devices: int
    apart: bool = False
    parts: int = 1  # in which a step takes its prompts
    strategy: str = WAIT


@dataclass(frozen=True)
class Outcome:
    """What a simulated run did after its first steps."""

    step_s: float  # mean from one publish to the next
    mean_lag: float  # versions, over trained prompts
    largest_lag: int
    dropped: int
    generation_idle: float  # share of the time in which no answer is decoded
    training_idle: float


class Generation:
    """Answers being decoded. All that run get a token at the same moment, so a clock that counts decode steps says when
    each ends."""

    def __init__(self, costs: Costs, devices: int):
        self.costs, self.devices = costs, devices
        self.limit = int(costs.max_running * devices)
        self.now = self.steps = self.busy_s = 0.0
        self._debt_s = 0.0  # of tokens that are computed anew
        self._running: list[tuple[float, int, float]] = []  # heap of (its last step, group, its first step)
        self._waiting: deque[tuple[int, float]] = deque()  # (group, tokens)
        self.left: dict[int, int] = {}  # group -> its answers that are not complete

    def add(self, group: int, lengths: Sequence[float]) -> None:
        self.left[group] = len(lengths)
        self._waiting.extend((group, length) for length in lengths)
        self._fill()

    def remove(self, groups: Sequence[int]) -> None:
        """They are not wanted any more."""
        gone = set(groups)
        self._running = [answer for answer in self._running if answer[1] not in gone]
        heapq.heapify(self._running)
        self._waiting = deque(answer for answer in self._waiting if answer[0] not in gone)
        for group in gone:
            self.left.pop(group, None)
        self._fill()

    def new_weights(self) -> None:
        """What runs is computed anew before it goes on."""
        begun = [self.steps - first for _, _, first in self._running if first < self.steps]
        tokens = sum(begun) + self.costs.prompt_tokens * len(begun)
        self._debt_s += tokens * self.costs.prefill_s / self.devices

    def advance(self, until: float | None = None) -> list[int]:
        """Decode until the next answer is complete, or until the time `until`; the groups that are complete by it."""
        if not self._running:
            assert until is not None, "a step waits for answers, and none is being decoded"
            self.now = until
            return []
        step_s = self.costs.base_s + self.costs.per_answer_s * len(self._running) / self.devices
        needed_s = self._debt_s + (self._running[0][0] - self.steps) * step_s
        spent_s = needed_s if until is None else min(needed_s, until - self.now)
        prefill_s = min(self._debt_s, spent_s)
        self._debt_s -= prefill_s
        self.busy_s += spent_s
        if until is not None and needed_s > until - self.now:
            self.steps += (spent_s - prefill_s) / step_s
            self.now = until
            return []
        self.now += spent_s
        self.steps = self._running[0][0]
        return list(self._complete())

    def _complete(self) -> Iterator[int]:
        while self._running and self._running[0][0] <= self.steps:
            group = heapq.heappop(self._running)[1]
            self.left[group] -= 1
            if not self.left[group]:
                del self.left[group]
                yield group
        self._fill()

    def _fill(self) -> None:
        while self._waiting and (not self.limit or len(self._running) < self.limit):
            group, length = self._waiting.popleft()
            heapq.heappush(self._running, (self.steps + length, group, self.steps))


def decode_steps(groups: Groups, max_running: float) -> float:
    """Decode steps in which all of `groups` are complete, begun together; `max_running` answers at once (0: all)."""
    generation = Generation(Costs(1.0, 0.0, 0.0, 0.0, max_running=max_running), 1)
    for number, lengths in enumerate(groups):
        generation.add(number, lengths)
    while generation.left:
        generation.advance()
    return generation.steps


def draws(groups: Groups, seed: int) -> Iterator[Sequence[float]]:
    """Groups without end: all of them in an order of its own, then again in another."""
    generator = random.Random(seed)
    while True:
        yield from generator.sample(groups, len(groups))


def simulate(schedule: Schedule, costs: Costs, groups: Groups, batch: int, steps: int = 60, seed: int = 0) -> Outcome:
    """A run of `steps` steps of `batch` prompts, and some before them that do not count. The same arguments give the
    same outcome."""
    admission = AdmissionRules(batch, schedule.staleness, schedule.max_lag, schedule.strategy)
    generation, prompts = Generation(costs, schedule.generation_devices), draws(groups, seed)
    part_s = costs.train_s / schedule.training_devices / schedule.parts
    first = schedule.max_lag + 4  # of the steps that count
    lags: list[int] = []
    dropped, start_s, busy_s = 0, 0.0, 0.0
    for step in range(first + steps):
        if step == first:
            lags, dropped, start_s, busy_s = [], 0, generation.now, generation.busy_s
        for _ in range(admission.room):
            generation.add(admission.admit(), next(prompts))
        for part in range(schedule.parts):
            count = batch // schedule.parts + (batch % schedule.parts if part == schedule.parts - 1 else 0)
            while not admission.is_ready(count):
                _finish(admission, generation.advance())
            lags += [admission.version - admission.versions[number] for number in admission.queued[:count]]
            admission.take(count)
            ends = generation.now + part_s
            while schedule.apart and generation.now < ends:
                _finish(admission, generation.advance(ends))
            generation.now = ends
        generation.now += costs.publish_s
        late = admission.publish(step + 1)
        generation.remove(late)
        dropped += len(late)
        generation.new_weights()
    whole_s = generation.now - start_s
    return Outcome(
        whole_s / steps,
        sum(lags) / len(lags),
        max(lags),
        dropped,
        1 - (generation.busy_s - busy_s) / whole_s if whole_s else 0.0,
        1 - steps * part_s * schedule.parts / whole_s if whole_s else 0.0,
    )


def _finish(admission: AdmissionRules, numbers: Sequence[int]) -> None:
    for number in numbers:
        admission.finish(number)
