"""Figures of a run's synchronous steps for a planner: seconds of each stage, lengths of the answers, a decode step."""

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from verl.observe.ledger import ledger_steps, read_ledger
from verl.observe.run_record import RUN_FILE, RunRecord, find_run, read_record
from verl.observe.step_records import REPLICAS_FILE, latest_by_step, read_records
from verl.observe.trackers import read_metrics
from verl.trainer.ppo.batch_metrics import prompt_and_response_lengths
from verl.trainer.run.files import LEDGER
from verl.utils.errors import DataError
from verl.workers.rollout.engine_stats import Counts, EngineStats

NEEDED_STEPS, MOST_STEPS = 3, 20
NOT_TRAINING = ("gen", "update_weights", "testing", "save_checkpoint")
TIMES = ("timing_s/step", "timing_s/gen", "timing_s/update_weights")


@dataclass(frozen=True)
class ObservedStep:
    """One step; seconds on all devices of the run."""

    step: int
    generation_s: float
    train_s: float  # all but generation, publish, validation and checkpoint
    publish_s: float
    update_s: float  # of it, updates of the actor
    num_tokens: float  # prompts and answers
    prompt_tokens: float  # mean
    groups: list[list[float]]  # of each prompt: tokens of its answers


@dataclass(frozen=True)
class ObservedRun:
    """The steps to predict from, oldest first."""

    record: RunRecord
    devices: int
    steps: list[ObservedStep]
    decode_times: Counts | None = None  # the engine's sums of `DecodeTimes` over these steps; None: it has none

    def mean(self, name: str) -> float:
        """Mean over the steps of one of their numbers."""
        return sum(getattr(step, name) for step in self.steps) / len(self.steps)

    @property
    def groups(self) -> list[list[float]]:
        return [group for step in self.steps for group in step.groups]

    def training(self) -> tuple[float, float]:
        """(seconds of one device for what grows with the tokens of a step, seconds that do not depend on them), means.

        All of it grows with the tokens unless the steps show that some does not (an F-test with a bound of 4).
        """
        tokens = np.array([step.num_tokens for step in self.steps]) / self.devices
        times = np.array([step.train_s for step in self.steps])
        per_token = float(tokens @ times / max(tokens @ tokens, 1e-12))
        columns = np.stack([tokens, np.ones_like(tokens)], 1)
        (slope, fixed), *_ = np.linalg.lstsq(columns, times, rcond=None)
        alone, both = (float(((fit - times) ** 2).sum()) for fit in (tokens * per_token, columns @ (slope, fixed)))
        noise = max(both, 1e-12 * float(times @ times)) / (len(times) - 2)
        if slope > 0 and fixed > 0 and alone - both > 4 * noise:
            return float(slope * tokens.mean()) * self.devices, float(fixed)
        return self.mean("train_s") * self.devices, 0.0

    @property
    def batch(self) -> int:
        """Prompts of a step."""
        return round(len(self.groups) / len(self.steps))


def observe(name: str) -> ObservedRun:
    """The last steps of the run `name`. DataError where there are not enough, or they are not synchronous."""
    record = with_folder(find_run(name))
    if record.metrics is None or not record.metrics.is_file():
        where = "trainer.logger is without `file`" if record.metrics is None else f"{record.metrics} is not there"
        raise DataError(f"{record.name} has no metrics file ({where}), which says how long the stages of a step take")
    records = latest_by_step(read_metrics(record.metrics), 2**62)
    asynchronous = [r["step"] for r in records if any(key.startswith("fully_async/") for key in r["data"])]
    if asynchronous:
        raise DataError(
            f"{record.name} is an asynchronous run (step {asynchronous[0]} has metrics fully_async/*), whose stages "
            "wait for one another; plan from a run with trainer.v1.trainer_mode=sync: 3 steps are enough"
        )
    if record.config.get("actor_rollout_ref", {}).get("hybrid_engine", True) is False:
        raise DataError(
            f"{record.name} has devices of its own for the rollout (actor_rollout_ref.hybrid_engine=False); plan from "
            "a run on the same devices for rollout and trainer: 3 steps are enough"
        )
    data = {int(r["step"]): r["data"] for r in records if all(key in r["data"] for key in TIMES)}
    _check_enough(record, len(data), f"steps with {', '.join(TIMES)}", "train for 3 steps or more")
    if record.folder is None:
        raise DataError(
            f"{record.metrics} alone lacks the length of each answer, which the ledger has; name the run's folder "
            f"(the one with {RUN_FILE}: trainer.default_local_dir)"
        )
    folder = record.folder / LEDGER
    recorded = [step for step in ledger_steps(folder) if step in data]
    advice = "lengths of answers are read from there; keep trainer.ledger=True and ledger_keep_steps at 3 or more"
    _check_enough(record, len(recorded), f"of {len(data)} steps in its ledger {folder}", advice)
    if len(recorded) > NEEDED_STEPS and recorded[0] == min(data):
        recorded = recorded[1:]  # it warms up
    steps = [_observed(step, data[step], folder) for step in recorded[-MOST_STEPS:]]
    times = _decode_times(record.folder / REPLICAS_FILE, steps[0].step, steps[-1].step)
    return ObservedRun(record, _num_devices(data[recorded[-1]]), steps, times)


def with_folder(record: RunRecord) -> RunRecord:
    """A metrics file alone: with the run's folder, where it is the usual one."""
    if record.folder is None and record.metrics is not None:
        folder = Path("checkpoints") / record.metrics.absolute().parent.name / record.metrics.stem
        if (folder / RUN_FILE).is_file():
            return replace(read_record(folder), metrics=record.metrics)
    return record


def _check_enough(record: RunRecord, count: int, what: str, advice: str) -> None:
    if count < NEEDED_STEPS:
        raise DataError(f"{record.name} has {count} {what}, and a plan needs {NEEDED_STEPS}; {advice}")


def _num_devices(data: dict[str, float]) -> int:
    """The devices by which the run divided its throughput; 1 where it does not say."""
    rate = data.get("perf/throughput", 0.0) * data["timing_s/step"]
    return max(1, round(data.get("perf/total_num_tokens", 0.0) / rate)) if rate > 0 else 1


def _decode_times(path: Path, first: int, last: int) -> Counts | None:
    """The sums of all replicas or ranks in the steps from `first` to `last`."""
    if not path.is_file():
        return None
    found: dict[str, float] = {}
    before: list[EngineStats] = []
    for record in latest_by_step(read_records(path), last):
        now = [EngineStats(sums=replica.get("decode_times", {})) for replica in record["replicas"]]
        starts = [*before, *(EngineStats() for _ in now[len(before) :])]
        for start, stats in zip(starts, now, strict=False):
            for name, value in stats.since(start).sums.items() if int(record["step"]) >= first else ():
                found[name] = found.get(name, 0.0) + value
        before = now
    return found or None


def _observed(step: int, data: dict[str, float], ledger: Path) -> ObservedStep:
    batch = read_ledger(ledger, step).batch
    prompts, answers = prompt_and_response_lengths(batch)
    groups = defaultdict[int, list[float]](list)
    for group, length in zip(batch["group_ids"].tolist(), answers.tolist(), strict=True):
        groups[group].append(float(length))
    beside = sum(data.get(f"timing_s/{stage}", 0.0) for stage in NOT_TRAINING)
    return ObservedStep(
        step,
        data["timing_s/gen"],
        max(0.0, data["timing_s/step"] - beside),
        data["timing_s/update_weights"],
        data.get("timing_s/update_actor", 0.0),
        float(batch.num_tokens),
        float(prompts.double().mean()),
        list(groups.values()),
    )
