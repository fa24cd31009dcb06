"""What the driver itself costs: µs to choose a replica; µs and bytes per trajectory of a step, at growing numbers.

    python benchmarks/driver_scale.py [--trajectories 10000 100000 1000000] [--rounds 3] [--json PATH]

No models: light replicas behind the real router give random tokens, and everything between the arrival of a completion
and the shards of the packed batch is the trainer's own code. Every number of trajectories has a process of its own.
Times are CPU seconds of that process, less those of the light replicas where these are counted apart.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.memory import peak_bytes, reset_peak
from support.record import save

from verl.algorithms.advantages import compute_advantages, with_token_rewards
from verl.config import load_config
from verl.data.balance import assign_shards
from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching
from verl.data.prompts import PromptRow
from verl.rewards.base import RewardInput, Score
from verl.runtime.wire import deserialize, serialize
from verl.trainer.ppo.batch_metrics import data_metrics, turn_metrics
from verl.trainer.ppo.sources.group_filter import FixedPrompts, GroupFilter, GroupRules
from verl.trainer.ppo.sources.trajectory_source import RolloutBatch, RolloutCollector
from verl.workers.rollout.base import Completion, CopyingEngine, GenerationRequest, SamplingParams
from verl.workers.rollout.router import Router

REPLICAS, IN_FLIGHT, GROUP, RANKS = 1000, 100_000, 8, 64
PROMPT, ANSWERS = list(range(16)), (8, 48)  # tokens of a prompt, shortest and longest answer
MICRO_TOKENS = 4096  # of a micro-batch


class LightReplica(CopyingEngine):
    """Holds requests until `Answers` completes them."""

    bucket_bytes = version = 0

    def __init__(self, answers: "Answers"):
        self.answers = answers

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        done: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self.answers.waiting.append((done, request.sampling.n))
        return await done

    async def _nothing(self, *args: Any) -> Any: ...

    begin_update = finish_update = sleep = wake = abort = _nothing


class Answers:
    """Completes waiting requests in random order, a thousand at a time."""

    def __init__(self, seed: int = 0):
        self.waiting: list[tuple[asyncio.Future[list[Completion]], int]] = []
        self.random, self.most_in_flight, self.seconds = random.Random(seed), 0, 0.0
        self.tokens = [self.random.randrange(1000) for _ in range(10_000)]
        self.logprobs = [-self.random.random() for _ in range(10_000)]

    def completion(self) -> Completion:
        length, start = self.random.randint(*ANSWERS), self.random.randrange(9000)
        return Completion(self.tokens[start : start + length], self.logprobs[start : start + length], "stop", (0, 0))

    async def go_on(self) -> None:
        while True:
            started = time.process_time()
            self.most_in_flight = max(self.most_in_flight, len(self.waiting))
            for _ in range(min(1000, len(self.waiting))):
                i = self.random.randrange(len(self.waiting))
                self.waiting[i], self.waiting[-1] = self.waiting[-1], self.waiting[i]
                done, n = self.waiting.pop()
                done.set_result([self.completion() for _ in range(n)])
            self.seconds += time.process_time() - started
            await asyncio.sleep(0)


class DigitReward:
    """A reward that costs nothing."""

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        return [Score(float(len(item.solution_str) % 5)) for item in inputs]


class LightTokenizer:
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "x" * len(ids)


class SingleTurns:
    """What `AgentRunner` does for rows without an agent."""

    async def answer(self, row: PromptRow, request_id: int, sampling: SamplingParams, engine: Any, *traces: Any) -> Any:
        from verl.agent.single_turn import single_turn

        return await single_turn(row, request_id, sampling, engine)


def collect(num: int, filtered: bool) -> tuple[RolloutBatch, Answers]:
    """`num` scored trajectories from REPLICAS light replicas; `filtered`: by dynamic sampling."""
    answers = Answers()
    router = Router([LightReplica(answers) for _ in range(REPLICAS)])
    collector: Any = RolloutCollector(router, DigitReward(), LightTokenizer(), SingleTurns())  # type: ignore[arg-type]
    rows = [PromptRow(i, "light", [], "", PROMPT, False, "light", "") for i in range(num // GROUP)]
    numbers = iter(range(10 * len(rows)))

    def draw(count: int) -> list[tuple[PromptRow, int]]:
        return [(rows[number % len(rows)], number) for number, _ in zip(numbers, range(count), strict=False)]

    rules = GroupRules(metric="seq_reward", gen_batch_size=1)
    plan = GroupFilter(len(rows), rules, draw) if filtered else FixedPrompts(rows, range(len(rows)))

    async def run() -> RolloutBatch:
        task = asyncio.create_task(answers.go_on())
        try:
            return await collector.collect_groups(plan, SamplingParams(n=GROUP, max_tokens=ANSWERS[1]))
        finally:
            task.cancel()

    return asyncio.run(run()), answers


def one_step(num: int) -> dict[str, float]:
    """µs of CPU time per trajectory by stage, and the bytes of the process's peak per trajectory."""
    base = reset_peak()
    config = load_config(["algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=none"])
    seconds: dict[str, float] = {}
    started = time.process_time()

    def lap(stage: str) -> None:
        nonlocal started
        seconds[stage] = time.process_time() - started
        started = time.process_time()

    rollouts, answers = collect(num, filtered=False)
    lap("collect")
    seconds["collect"] -= answers.seconds
    batch = Batch.pack(rollouts.trajectories)
    lap("pack")
    batch = compute_advantages(with_token_rewards(batch), config.algorithm)
    lap("advantages")
    shards = assign_shards(batch, RANKS, MicroBatching(max_tokens=MICRO_TOKENS))
    lap("balance")
    sent = [batch.select(shard.indices) for shard in shards]
    lap("shards")
    data_metrics(batch, len(PROMPT), ANSWERS[1]), turn_metrics(rollouts.trajectories)
    lap("metrics")
    peak = peak_bytes()
    assert sum(shard.num_sequences for shard in sent) == num
    in_flight = answers.most_in_flight
    del rollouts, batch, shards, sent
    lap("free")
    collect(num, filtered=True)
    lap("dynamic sampling")
    out = {f"{stage}_us": value / num * 1e6 for stage, value in seconds.items()}
    total = sum(out[f"{stage}_us"] for stage in seconds if stage not in ("dynamic sampling", "free"))
    return {"trajectories": num, **out, "step_us": total, "bytes": (peak - base) / num, "in_flight": in_flight}


def choice_us(replicas: int, requests: int = 20_000) -> float:
    """Median µs to choose a replica and to note the begin and the end of its request, with IN_FLIGHT others."""
    router = Router([LightReplica(Answers()) for _ in range(replicas)])
    generator = random.Random(0)
    running = [generator.randrange(replicas) for _ in range(IN_FLIGHT)]
    for number in running:
        router._add_load(number, generator.randint(100, 2000))
    times = []
    for request in range(requests):
        started = time.perf_counter()
        number = router.pick_replica(request if request % 2 else None)
        router._add_load(number, 500)
        router._add_load(running[request], -50)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def wire_us(length: int, repeats: int = 300) -> float:
    """Median µs to read a completion of `length` tokens that a replica's process has sent."""
    generator = random.Random(0)
    tokens, logprobs = [generator.randrange(150_000) for _ in range(length)], [-generator.random()] * length
    data, times = serialize([1, True, [Completion(tokens, logprobs, "stop", (0, 0))]]), []
    for _ in range(repeats):
        started = time.perf_counter()
        deserialize(data)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def in_process(num: int) -> dict[str, float]:
    """`one_step` in a fresh process."""
    out = subprocess.run([sys.executable, __file__, "--one", str(num)], stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(out.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.one:
        print(json.dumps(one_step(args.one)))
        return
    choices = {count: round(statistics.median(choice_us(count) for _ in range(3)), 2) for count in (10, 100, REPLICAS)}
    for count, us in choices.items():
        print(f"{count:>5} replicas: {us:.2f} µs per choice, {us / choices[10]:.2f}x that of 10", flush=True)
    wire = {length: round(wire_us(length), 1) for length in (64, 1024, 8192)}
    for length, us in wire.items():
        print(f"{length:>5} tokens: {us:.1f} µs to read a completion, {us / length * 1e3:.0f} ns a token")
    rows = []
    for num in args.trajectories:
        rounds = [in_process(num) for _ in range(args.rounds)]
        row = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        rows.append(row)
        stages = ", ".join(f"{name.removesuffix('_us')} {row[name]:.1f}" for name in row if name.endswith("_us"))
        print(f"{num:>9,} trajectories, {row['in_flight']:,.0f} requests in flight: µs per trajectory: {stages}")
        print(f"{'':>9} {row['bytes']:,.0f} bytes per trajectory", flush=True)
    first, last = rows[0], rows[-1]
    for name in ("step_us", "dynamic sampling_us", "bytes"):
        print(f"{name}: {last[name] / first[name]:.2f}x at {last['trajectories'] / first['trajectories']:.0f}x as many")
    if args.json:
        save(args.json, {"replicas": REPLICAS, "ranks": RANKS, "choice_us": choices, "wire_us": wire, "steps": rows})


if __name__ == "__main__":
    main()
