"""Simulates a schedule of generation and training: events under the rules of a real run.

A decode step, in which every running answer gets one token, takes a time by the number of answers that run on a device
and by the tokens in their caches. Training takes as long as it was seen to; both are shared evenly by their devices.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from verl.trainer.ppo.sources.admission import WAIT, AdmissionRules

Groups = Sequence[Sequence[float]]  # of each prompt: sampled tokens of its answers


@dataclass(frozen=True)
class Costs:
    """Seconds of one device."""

    decode_s: tuple[tuple[float, float], ...]  # (answers that run on the device, seconds of a decode step), one or more
    train_s: float  # of a step: all but generation and publish, shared by the devices
    publish_s: float  # on however many devices
    prefill_s: float = 0.0  # to compute a token of an unfinished answer anew, after a publish
    prompt_tokens: float = 0.0  # of an answer, computed anew with it
    max_running: float = 0.0  # answers that a device decodes at once; 0: no limit
    per_token_s: float = 0.0  # of a decode step, for each token in the caches of the answers that run on the device
    pads: bool = False  # the caches are all as long as the longest, as those of the native engine
    train_fixed_s: float = 0.0  # of a step, on however many devices: collectives, the optimizer
    begin_s: float = 0.0  # of an answer, beside its decode steps: the prompt, and what the agent loop does

    def decode_step_s(self, answers: float) -> float:
        """Seconds of a decode step but for its cached tokens: on straight lines between the points; beyond the last one
        on the line from that of half as many answers."""
        points = self.decode_s
        last, last_s = points[-1]
        if answers >= last:
            half, half_s = min(points, key=lambda point: abs(point[0] - last / 2))
            return last_s + (answers - last) * max(0.0, last_s - half_s) / (last - half or 1.0)
        above = next(number for number, point in enumerate(points) if answers < point[0])
        if above == 0:
            return points[0][1]
        (low, low_s), (high, high_s) = points[above - 1 : above + 1]
        return low_s + (answers - low) * (high_s - low_s) / (high - low)


def line(base_s: float, per_answer_s: float) -> tuple[tuple[float, float], ...]:
    """The points of `base_s` + `per_answer_s` x answers."""
    return (0.0, base_s), (1.0, base_s + per_answer_s)


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
    """Figures of a simulated run, without its first steps."""

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
        self._firsts = 0.0  # sum of the first steps of what runs
        self._waiting: deque[tuple[int, float]] = deque()  # (group, tokens)
        self.left: dict[int, int] = {}  # group -> its answers that are not complete

    def add(self, group: int, lengths: Sequence[float]) -> None:
        self.left[group] = len(lengths)
        self._waiting.extend((group, length) for length in lengths)
        self._fill()

    def wait_until(self, time: float) -> None:
        """Nothing is decoded until then."""
        self.now = time

    def remove(self, groups: Sequence[int]) -> None:
        """They are not wanted any more."""
        gone = set(groups)
        self._running = [answer for answer in self._running if answer[1] not in gone]
        self._firsts = sum(first for _, _, first in self._running)
        heapq.heapify(self._running)
        self._waiting = deque(answer for answer in self._waiting if answer[0] not in gone)
        for group in gone:
            self.left.pop(group, None)
        self._fill()

    def new_weights(self) -> None:
        """Makes running answers compute their cache anew before they go on."""
        begun = [self.steps - first for _, _, first in self._running if first < self.steps]
        tokens = sum(begun) + self.costs.prompt_tokens * len(begun)
        self._debt_s += tokens * self.costs.prefill_s / self.devices

    def advance(self, until: float | None = None) -> list[int]:
        """Decode until the next answer is complete, or until the time `until`; the groups that are complete by it."""
        if not self._running:
            assert until is not None, "a step waits for answers, and none is being decoded"
            self.now = until
            return []
        step_s, slower_s = self._step_s_and_growth()
        count = self._running[0][0] - self.steps
        needed_s = self._debt_s + count * (step_s + count * slower_s / 2)
        spent_s = needed_s if until is None else min(needed_s, until - self.now)
        prefill_s = min(self._debt_s, spent_s)
        self._debt_s -= prefill_s
        self.busy_s += spent_s
        if until is not None and needed_s > until - self.now:
            self.steps += steps_within(spent_s - prefill_s, step_s, slower_s)
            self.now = until
            return []
        self.now += spent_s
        self.steps = self._running[0][0]
        return list(self._complete())

    def _step_s_and_growth(self) -> tuple[float, float]:
        """Seconds of a decode step now, and by how many each following one is longer while the same answers run."""
        costs, count = self.costs, len(self._running)
        per_token_s, tokens = costs.per_token_s / self.devices, 0.0
        if per_token_s:
            firsts = count * min(first for _, _, first in self._running) if costs.pads else self._firsts
            tokens = count * (self.steps + costs.prompt_tokens) - firsts
        step_s = costs.decode_step_s(count / self.devices) + per_token_s * tokens
        return step_s, per_token_s * count

    def _complete(self) -> Iterator[int]:
        while self._running and self._running[0][0] <= self.steps:
            _, group, first = heapq.heappop(self._running)
            self._firsts -= first
            self.left[group] -= 1
            if not self.left[group]:
                del self.left[group]
                yield group
        self._fill()

    def _fill(self) -> None:
        while self._waiting and (not self.limit or len(self._running) < self.limit):
            group, length = self._waiting.popleft()
            heapq.heappush(self._running, (self.steps + length, group, self.steps))
            self._firsts += self.steps
            self._debt_s += self.costs.begin_s / self.devices


def steps_within(seconds: float, step_s: float, slower_s: float) -> float:
    """Decode steps that are made in `seconds`, where the next one takes `step_s` and each later one `slower_s` more."""
    if slower_s <= 0.0:
        return seconds / step_s
    return 2 * seconds / (step_s + math.sqrt(step_s**2 + 2 * slower_s * seconds))


def generate(groups: Groups, costs: Costs, devices: int = 1) -> Generation:
    """All of `groups`, begun together, complete."""
    generation = Generation(costs, devices)
    for number, lengths in enumerate(groups):
        generation.add(number, lengths)
    while generation.left:
        generation.advance()
    return generation


def decode_steps(groups: Groups, max_running: float) -> float:
    """Decode steps in which all of `groups` are complete, begun together; `max_running` answers at once (0: all)."""
    return generate(groups, Costs(line(1.0, 0.0), 0.0, 0.0, max_running=max_running)).steps


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
    part_s = (costs.train_s / schedule.training_devices + costs.train_fixed_s) / schedule.parts
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
            generation.wait_until(ends)
        generation.wait_until(generation.now + costs.publish_s)
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
