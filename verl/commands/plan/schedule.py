"""`verl plan --schedule RUN`: what other schedules of generation and training would give a synchronous run."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from verl.commands.plan.decode_step import DecodeStep, find_decode_steps
from verl.commands.plan.observed_steps import ObservedRun, observe
from verl.commands.plan.run_config import load_run_config
from verl.commands.plan.schedule_simulation import Costs, Outcome, Schedule, simulate
from verl.config import RunConfig
from verl.config.asynchronous import COLOCATED, SEPARATE, SYNC, staleness
from verl.placement.tables import columns
from verl.trainer.ppo.facts import num_parts
from verl.utils.errors import ConfigError

MODE = "trainer.v1.trainer_mode"
APART = (f"{MODE}={SEPARATE}", "actor_rollout_ref.hybrid_engine=False")
CARRIED = (  # keys of the run that a plan goes on with, unless they are given
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.shuffle",
    "actor_rollout_ref.rollout.kv_cache_on_publish",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "algorithm.adv_estimator",
    "algorithm.use_kl_in_reward",
    "algorithm.use_pf_ppo",
    "trainer.v1.sampler.max_off_policy_strategy",
    "trainer.v1.sampler.max_off_policy_threshold",
)
WORTH_IT = 1.1  # a smaller speed-up is within the error of a prediction
NO_TAIL = 1.5  # the longest answer of a step over the mean one
MOST_ANSWERS, MOST_SPLITS = 150_000, 12  # that are simulated for one schedule


@dataclass(frozen=True)
class Prediction:
    """A schedule, and what it gives by each of the decode steps that explain the run."""

    schedule: Schedule
    outcomes: list[Outcome]
    speedups: list[float]  # against sync on the same number of devices


@dataclass(frozen=True)
class SchedulePlan:
    """Everything that is printed."""

    run: ObservedRun
    devices: int
    fits: list[DecodeStep]
    predictions: list[Prediction]  # sync first
    notes: list[str]
    verdict: str


def print_schedule(name: str, words: Sequence[str], as_json: bool) -> None:
    """Print what the run `name` would do in each mode, with the keys that `words` give."""
    plan = plan_schedule(observe(name), words)
    print(_json(plan) if as_json else schedule_text(plan))


def plan_schedule(run: ObservedRun, words: Sequence[str]) -> SchedulePlan:
    """The predictions for the devices and ages that `words` give; the run's own devices where they give none."""
    config, apart = _config(run, words, ()), _config(run, words, APART)
    rollout = config.actor_rollout_ref.rollout
    size = rollout.tensor_model_parallel_size
    known = _costs(run, config, rollout.max_num_seqs / size)
    fits = find_decode_steps(run, known)
    all_costs = [replace(known, decode_s=fit.points, per_token_s=fit.per_token_s, begin_s=fit.begin_s) for fit in fits]
    training, generation = _planned_devices(run, config)
    devices, parts = training + generation, num_parts(apart)
    mean, largest = staleness(config), config.trainer.v1.sampler.max_off_policy_threshold
    strategy = config.trainer.v1.sampler.max_off_policy_strategy
    sync = Schedule(SYNC, 0.0, 0, devices, devices)
    base = [_simulated(sync, costs, run) for costs in all_costs]

    def predicted(schedule: Schedule) -> Prediction:
        outcomes = [_simulated(schedule, costs, run) for costs in all_costs]
        return Prediction(schedule, outcomes, [b.step_s / o.step_s for b, o in zip(base, outcomes, strict=True)])

    predictions = [Prediction(sync, base, [1.0] * len(base))]
    predictions.append(predicted(Schedule(COLOCATED, mean, largest, devices, devices, strategy=strategy)))
    splits = [(training, generation)] if generation else _splits(devices, size, apart)
    for name, k, m in (("one_step_off", 1.0, 2), ("fully_async", mean, largest)):
        found = [predicted(Schedule(name, k, m, g, t, True, parts if k else 1, strategy)) for t, g in splits]
        if found:
            predictions.append(max(found, key=lambda prediction: min(prediction.speedups)))
    return SchedulePlan(
        run, devices, fits, predictions, _notes(run, devices, fits, predictions), _verdict(run, predictions)
    )


def _config(run: ObservedRun, words: Sequence[str], more: Sequence[str]) -> RunConfig:
    """The keys of the run that matter, those that are given, and `more`."""
    carried = [f"data.train_batch_size={run.batch}"]
    for key in CARRIED:
        value: Any = run.record.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            carried.append(f"{key}={value}")
    if not any(word.startswith(f"{MODE}=") for word in words):
        carried.append(f"{MODE}={COLOCATED}")
    given_split = any(word.startswith("actor_rollout_ref.rollout.n_gpus_per_node=") for word in words)
    if given_split or more:
        more = [*APART, *more, *([] if given_split else ["actor_rollout_ref.rollout.n_gpus_per_node=1"])]
    config = load_run_config([*carried, *words, *more])
    if config.trainer.v1.trainer_mode == SYNC:
        raise ConfigError(f"--schedule compares every mode with sync: drop {MODE}={SYNC}")
    return config


def _planned_devices(run: ObservedRun, config: RunConfig) -> tuple[int, int]:
    """Devices that train, and those that generate beside them; 0 where the split is not given."""
    settings, rollout = config.trainer, config.actor_rollout_ref.rollout
    per_node = settings.n_gpus_per_node
    training = run.devices if per_node is None else settings.nnodes * per_node
    if config.actor_rollout_ref.hybrid_engine and not rollout.nnodes:
        return training, 0
    return training, (rollout.nnodes or settings.nnodes) * (rollout.n_gpus_per_node or 0)


def _splits(devices: int, size: int, config: RunConfig) -> list[tuple[int, int]]:
    """(training, generation) for whole replicas of `size` devices and even shares of a mini-batch, no more than
    MOST_SPLITS of them, evenly spread."""
    answers = config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    splits = [(devices - g, g) for g in range(size, devices, size) if answers % (devices - g) == 0]
    every = max(1, -(-len(splits) // MOST_SPLITS))
    return splits[::every]


def _costs(run: ObservedRun, config: RunConfig, max_running: float) -> Costs:
    """Costs on one device, without decode steps. An update does three times the work of a forward pass, which is what a
    prefill is."""
    passes = 3 * config.actor_rollout_ref.actor.ppo_epochs
    train_s, train_fixed_s = run.training()
    recomputes = config.actor_rollout_ref.rollout.kv_cache_on_publish == "recompute"
    prefill_s = run.mean("update_s") * run.devices / (passes * max(run.mean("num_tokens"), 1.0))
    return Costs(
        (),
        train_s,
        run.mean("publish_s"),
        prefill_s if recomputes else 0.0,
        run.mean("prompt_tokens"),
        max_running,
        train_fixed_s=train_fixed_s,
        pads=run.record.config.get("actor_rollout_ref", {}).get("rollout", {}).get("name") == "native",
    )


def _simulated(schedule: Schedule, costs: Costs, run: ObservedRun) -> Outcome:
    answers = run.batch * max(1, sum(map(len, run.groups)) // max(1, len(run.groups)))
    return simulate(schedule, costs, run.groups, run.batch, min(60, max(12, MOST_ANSWERS // answers)))


def _notes(run: ObservedRun, devices: int, fits: Sequence[DecodeStep], predictions: Sequence[Prediction]) -> list[str]:
    """Lines about what the predictions leave out."""
    notes = []
    if len(fits) > 1:
        notes.append(
            "the steps are too alike, or their times too noisy, to say how much longer a decode step takes the more "
            "answers run: ranges are from the most to the least that can be; more steps narrow them"
        )
    if (error := min(fit.error for fit in fits)) > 0.15:
        notes.append(
            f"generation took up to {error:.0%} longer or shorter than its lengths explain (other programs on the "
            "machine, or waiting for tools): the predictions are no better than that"
        )
    if len(predictions) < 3 and devices > 1:
        notes.append(
            f"missing: a split of {devices} devices into whole replicas of the rollout, and trainers among which a "
            "mini-batch can be shared evenly"
        )
    if devices == 1:
        notes.append("one device cannot be split: trainer.n_gpus_per_node=2 plans the modes with devices apart for two")
    algorithm = run.record.config.get("algorithm", {})
    if algorithm.get("filter_groups", {}).get("enable"):
        notes.append("missing: the lengths of answers that filter_groups left out; the ledger has what was trained on")
    return notes


def _verdict(run: ObservedRun, predictions: Sequence[Prediction]) -> str:
    """Whether a schedule is worth it, and which, or why none is."""
    best = max(predictions[1:], key=lambda prediction: min(prediction.speedups))
    most = max(max(prediction.speedups) for prediction in predictions)
    if min(best.speedups) >= WORTH_IT:
        return f"it helps: {best.schedule.name} {_range(best.speedups)}x of sync; {_keys(best.schedule)}"
    if most >= WORTH_IT:
        how = "only by more answers decoded at once, as with a larger batch; there is no tail to gain from"
        return f"it may help, up to {most:.2f}x, or not ({min(best.speedups):.2f}x): " + (
            how if _tail(run) < NO_TAIL else "the steps do not say; train some more, and plan again"
        )
    return f"it will not help: {_reason(run)}"


def _reason(run: ObservedRun) -> str:
    """Why nothing is gained, from where a step's time goes."""
    times = {"generation": run.mean("generation_s"), "training": run.mean("train_s"), "publish": run.mean("publish_s")}
    whole, ratio = sum(times.values()), _tail(run)
    if times["generation"] < whole / 2:
        share = (whole - times["generation"]) / whole
        return (
            f"{share:.0%} of a step is training and publishing (updates), which the same devices have to do in every "
            "mode; make the update faster first"
        )
    if ratio < NO_TAIL:
        return (
            f"generation has no tail: the longest answer of a step is {ratio:.2f} times as long as the mean, so nobody "
            "waits for few long ones"
        )
    return (
        "generation is bound by the tokens of all answers, not by waiting for the longest: a decode step takes as long "
        "as there are answers running, so that other answers beside the long ones gain no time"
    )


def _tail(run: ObservedRun) -> float:
    """Longest answer of a step over the mean one."""
    ratios = []
    for step in run.steps:
        lengths = [length for group in step.groups for length in group]
        ratios.append(max(lengths) * len(lengths) / max(sum(lengths), 1.0))
    return sum(ratios) / len(ratios)


def _keys(schedule: Schedule) -> str:
    """The settings that choose this schedule."""
    ages = f"async_training.staleness_threshold={schedule.staleness:g}"
    if not schedule.apart:
        return f"set {MODE}={COLOCATED} {ages}"
    return (
        f"set {MODE}={SEPARATE} actor_rollout_ref.hybrid_engine=False {ages} "
        f"trainer.v1.sampler.max_off_policy_threshold={schedule.max_lag}, {schedule.training_devices} devices "
        f"(trainer.n_gpus_per_node) to train and {schedule.generation_devices} (rollout.n_gpus_per_node) to generate"
    )


def schedule_text(plan: SchedulePlan) -> str:
    """The plan for a terminal."""
    run = plan.run
    lengths = sorted(length for group in run.groups for length in group)
    fits = " or ".join(fit.text() for fit in plan.fits)
    sync = plan.predictions[0].outcomes
    seen = run.mean("generation_s") + run.mean("train_s") + run.mean("publish_s")
    rows = [["schedule", "K", "devices", "steps/h", "prompts/s", "of sync", "mean lag", "largest", "train idle"]]
    rows += [_row(prediction, run.batch) for prediction in plan.predictions]
    lines = [
        f"{run.record.name}, steps {run.steps[0].step}-{run.steps[-1].step}: {run.batch} prompts, "
        f"{len(lengths) / len(run.steps):g} answers a step on {run.devices} device{'s' * (run.devices != 1)}",
        f"a step       {seen:.3g} s: generation {run.mean('generation_s'):.3g}, training {run.mean('train_s'):.3g}, "
        f"publish {run.mean('publish_s'):.3g}; sync is predicted as "
        f"{_range([outcome.step_s for outcome in sync], '{:.3g}')} s on {plan.devices}",
        f"answers      {sum(lengths) / len(lengths):.0f} tokens in the mean, {lengths[len(lengths) * 95 // 100]:.0f} "
        f"at 95 %, {lengths[-1]:.0f} at most; the longest of a step is {_tail(run):.1f} times its mean",
        f"decode step  {fits} on a device; off by {max(fit.error for fit in plan.fits):.0%} at most",
        "",
        columns(rows, numbers=True),
        "",
        *(f"note: {note}" for note in plan.notes),
        plan.verdict,
    ]
    return "\n".join(lines)


def _row(prediction: Prediction, batch: int) -> list[str]:
    schedule, outcomes = prediction.schedule, prediction.outcomes
    apart = f"{schedule.training_devices}+{schedule.generation_devices}"
    return [
        schedule.name,
        f"{schedule.staleness:g}",
        apart if schedule.apart else str(schedule.training_devices),
        _range([3600 / outcome.step_s for outcome in outcomes], "{:.4g}"),
        _range([batch / outcome.step_s for outcome in outcomes], "{:.3g}"),
        _range(prediction.speedups),
        _range([outcome.mean_lag for outcome in outcomes]),
        str(max(outcome.largest_lag for outcome in outcomes)),
        _range([outcome.training_idle * 100 for outcome in outcomes], "{:.0f}") + " %",
    ]


def _range(values: Sequence[float], form: str = "{:.2f}") -> str:
    """`1.00` or `1.00-1.80`."""
    return "-".join(dict.fromkeys(form.format(value) for value in (min(values), max(values))))


def _json(plan: SchedulePlan) -> str:
    steps = [{k: v for k, v in asdict(step).items() if k != "groups"} for step in plan.run.steps]
    return json.dumps(
        {
            "run": plan.run.record.name,
            "prompts": plan.run.batch,
            "devices": plan.devices,
            "observed_steps": steps,
            "decode_steps": [asdict(fit) for fit in plan.fits],
            "predictions": [asdict(prediction) for prediction in plan.predictions],
            "notes": plan.notes,
            "verdict": plan.verdict,
        },
        indent=2,
    )
