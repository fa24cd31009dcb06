"""`verl plan --schedule`: the simulation against closed forms, the fit of a decode step, and what the command says."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from verl import cli
from verl.commands.plan.decode_step import fit_decode_step, measured
from verl.commands.plan.observed_steps import ObservedStep
from verl.commands.plan.schedule_simulation import (
    Costs,
    Generation,
    Groups,
    Outcome,
    Schedule,
    decode_steps,
    generate,
    line,
    simulate,
    steps_within,
)
from verl.data.batch import Batch
from verl.data.trajectory import Trajectory
from verl.observe.ledger import Ledger
from verl.trainer.ppo.sources.admission import DROP, WAIT
from verl.workers.rollout.engine_stats import DecodeTimes

B, TOKENS = 8, 100.0
CONSTANT = [[TOKENS] * 2 for _ in range(B)]
EVEN = Costs(line(0.0, 0.001), train_s=0.5, publish_s=0.1)  # generation costs the same for each token
GENERATION_S = B * 2 * TOKENS * 0.001  # 1.6 s


def exponential(count: int, seed: int = 0) -> list[list[float]]:
    draws = random.Random(seed)
    return [[draws.expovariate(1 / TOKENS)] for _ in range(count)]


def harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


def sync(devices: int = 1) -> Schedule:
    return Schedule("sync", 0.0, 0, devices, devices)


def colocated(k: float, m: int, strategy: str = WAIT) -> Schedule:
    return Schedule("colocate_async", k, m, 1, 1, strategy=strategy)


def one_step_off(devices: int = 1) -> Schedule:
    return Schedule("one_step_off", 1.0, 2, devices, devices, apart=True)


def test_a_synchronous_step_is_generation_training_and_publish():
    found = simulate(sync(), EVEN, CONSTANT, B)
    assert found.step_s == pytest.approx(GENERATION_S + EVEN.train_s + EVEN.publish_s)
    assert (found.mean_lag, found.largest_lag, found.dropped) == (0, 0, 0)
    assert found.training_idle == pytest.approx(1 - EVEN.train_s / found.step_s)
    four = simulate(sync(4), EVEN, CONSTANT, B)
    assert four.step_s == pytest.approx((GENERATION_S + EVEN.train_s) / 4 + EVEN.publish_s)


def test_colocated_gains_nothing_with_constant_lengths():
    found = simulate(colocated(1.0, 8), EVEN, CONSTANT, B)
    assert found.step_s == pytest.approx(simulate(sync(), EVEN, CONSTANT, B).step_s, rel=0.02)


@pytest.mark.parametrize("train_s", [0.5, 1.6, 4.0])
def test_one_step_off_takes_the_longer_of_generation_and_training(train_s: float):
    costs = Costs(EVEN.decode_s, train_s, EVEN.publish_s)
    found = simulate(one_step_off(), costs, CONSTANT, B)
    assert found.step_s == pytest.approx(max(GENERATION_S, train_s) + EVEN.publish_s, rel=0.02)


def test_the_longest_of_n_exponential_answers_takes_the_harmonic_number_of_means():
    n, costs = 32, Costs(line(0.01, 0.0), 0.0, 0.0)  # a decode step takes as long for one as for all
    found = simulate(sync(), costs, exponential(n * 400), n, steps=390)
    assert found.step_s == pytest.approx(0.01 * TOKENS * harmonic(n), rel=0.04)


def test_colocated_waits_for_the_first_half_of_twice_as_many_exponential_answers():
    """They have no memory: of 2B that run, B are complete after mean x (H_2B - H_B), at every step anew."""
    n, costs = 32, Costs(line(0.01, 0.0), 0.0, 0.0)
    found = simulate(colocated(1.0, 100), costs, exponential(n * 400), n, steps=280)
    assert found.step_s == pytest.approx(0.01 * TOKENS * (harmonic(2 * n) - harmonic(n)), rel=0.04)
    assert found.mean_lag == pytest.approx(1.0, abs=0.05)


def heavy(count: int = 2000) -> Groups:
    draws = random.Random(1)
    return [[100 * draws.lognormvariate(0, 2.5) for _ in range(2)] for _ in range(count)]


@pytest.mark.parametrize("strategy", [WAIT, DROP])
@pytest.mark.parametrize("schedule", [colocated, lambda k, m, s: Schedule("a", k, m, 1, 1, True, 2, s)])
def test_no_group_is_older_than_the_largest_age(strategy: str, schedule: Callable[[float, int, str], Schedule]):
    costs = Costs(line(0.01, 0.0001), 1.0, 0.1, prefill_s=1e-4)
    found = simulate(schedule(1.0, 3, strategy), costs, heavy(), B, steps=200)
    assert found.largest_lag == 3
    assert (found.dropped > 0) == (strategy == DROP)
    assert simulate(schedule(1.0, 50, strategy), costs, heavy(), B, steps=200).largest_lag > 3


def test_the_same_seed_gives_the_same_outcome_and_another_one_another():
    def run(seed: int) -> Outcome:
        return simulate(colocated(0.5, 8), Costs(line(0.01, 0.0001), 1.0, 0.1), heavy(), B, seed=seed)

    assert run(3) == run(3) != run(4)


def test_parts_of_a_step_are_trained_on_while_the_others_are_generated():
    """The answers of a step are 1, 2, ... B x the first: a step in B parts trains each as soon as it is there."""
    groups = [[TOKENS * (i + 1)] for i in range(B)]
    costs = Costs(line(0.01, 0.0), train_s=0.8, publish_s=0.0)
    whole, parts = (simulate(Schedule("s", 0.0, 0, 1, 1, True, n), costs, groups, B) for n in (1, B))
    assert whole.step_s == pytest.approx(0.01 * TOKENS * B + 0.8)
    assert parts.step_s == pytest.approx(0.01 * TOKENS * B + 0.1)


def test_tokens_of_parked_answers_are_computed_anew():
    """One answer of 8 short steps beside short ones: at each publish its tokens so far and its prompt are prefilled."""
    costs = Costs(line(0.01, 0.0), 0.0, 0.0, prefill_s=0.001, prompt_tokens=50.0)
    free = Costs(line(0.01, 0.0), 0.0, 0.0)
    groups = exponential(4000)
    slow, fast = (simulate(colocated(1.0, 100), c, groups, 1, steps=3000) for c in (costs, free))
    # two run, one of them ends first: the other has no memory, and has run for as long as its lag in the mean
    assert slow.step_s > fast.step_s + 0.001 * 50 * 0.99
    assert slow.step_s == pytest.approx(fast.step_s + 0.001 * (50 + TOKENS), rel=0.1)


def test_a_limit_of_running_answers_makes_the_others_wait():
    assert decode_steps(CONSTANT, 0) == TOKENS
    assert decode_steps(CONSTANT, 4) == TOKENS * 4


CACHED = Costs(line(0.01, 0.001), 0.0, 0.0, prompt_tokens=50.0, per_token_s=1e-5, begin_s=0.02)


def test_a_decode_step_takes_longer_the_more_tokens_are_cached():
    """Two answers of 100 and 300 tokens: the integral of a line over the steps of both, then of one."""
    found = generate([[100.0, 300.0]], CACHED).now
    both = 100 * (0.01 + 2 * 0.001 + 1e-5 * 2 * 50) + 1e-5 * 2 * 100**2 / 2
    one = 200 * (0.01 + 0.001 + 1e-5 * 50) + 1e-5 * (300**2 - 100**2) / 2
    assert found == pytest.approx(2 * 0.02 + both + one)


@pytest.mark.parametrize("pads", [False, True])
def test_a_new_answer_beside_a_long_one_takes_as_long_as_that_where_caches_are_padded(pads: bool):
    generation = Generation(replace(CACHED, pads=pads, begin_s=0.0), 1)
    generation.add(0, [200.0])
    generation.advance(until=steps_s(100, 0.011 + 1e-5 * 50, 1e-5))
    assert generation.steps == pytest.approx(100)  # and then another one begins
    before = generation.now
    generation.add(1, [100.0])
    generation.advance()
    cached = (100 + 50) * 2 if pads else (100 + 50) + 50
    assert generation.now - before == pytest.approx(steps_s(100, 0.012 + 1e-5 * cached, 2e-5))


def steps_s(count: float, first_s: float, slower_s: float) -> float:
    """Seconds of `count` decode steps."""
    return count * first_s + slower_s * count**2 / 2


@pytest.mark.parametrize("slower_s", [0.0, 1e-9, 1e-3])
def test_steps_within_a_time_are_those_that_take_it(slower_s: float):
    assert steps_within(steps_s(37.5, 0.01, slower_s), 0.01, slower_s) == pytest.approx(37.5)


def uneven(answers: float) -> float:
    return 0.002 + 0.001 * (answers > 1) + 0.0005 * answers


def decode_times(step_s: Callable[[int], float], per_token_s: float) -> DecodeTimes:
    """Of 8 answers of 100 to 800 tokens, begun together, and of 8 that begin after half of that."""
    times = DecodeTimes()
    for first in (20, 420):
        for step in range(800):
            answers = 8 - step // 100
            times.record(answers, answers * (step + first), step_s(answers) + per_token_s * answers * (step + first))
    return times


@pytest.mark.parametrize("per_token_s", [0.0, 3e-7, 1e-5])
def test_what_a_decode_step_takes_follows_from_the_sums_of_an_engine(per_token_s: float):
    """Each number of answers has a time of its own; 4 and 5 are one, as are 6 and 7."""
    points, slope = measured(decode_times(uneven, per_token_s).sums)
    assert slope == pytest.approx(per_token_s, rel=0.1, abs=1e-12)
    expected = {n: uneven(n) for n in (1.0, 2.0, 3.0, 4.5, 6.5, 8.0)}
    assert dict(points) == pytest.approx(expected, rel=0.02 if per_token_s < 1e-6 else 0.2)


def test_no_time_is_negative_where_longer_caches_take_less():
    assert measured(decode_times(uneven, -1e-7).sums)[1] == 0


def test_times_are_read_between_the_points_and_beyond_them_as_from_half_as_many():
    costs = Costs(((1.0, 0.002), (4.0, 0.005), (8.0, 0.006)), 0.0, 0.0)
    assert [costs.decode_step_s(n) for n in (0.5, 1, 2, 4, 8, 16)] == pytest.approx(
        [0.002, 0.002, 0.003, 0.005, 0.006, 0.008]
    )
    assert Costs(((4.0, 0.005),), 0.0, 0.0).decode_step_s(9) == 0.005
    assert Costs(line(0.01, 0.002), 0.0, 0.0).decode_step_s(7) == pytest.approx(0.024)


def test_a_decode_step_in_which_the_machine_stalled_does_not_count():
    before = dict((times := decode_times(uneven, 0.0)).sums)
    times.record(8, 160, 5.0)
    assert times.sums == before


def observed(number: int, groups: list[list[float]], base_s: float, per_answer_s: float) -> ObservedStep:
    tokens = sum(map(sum, groups))
    seconds = base_s * max(map(max, groups)) + per_answer_s * tokens / 2
    return ObservedStep(number, seconds, 1.0, 0.1, 0.9, tokens, 5.0, groups)


def test_the_decode_step_is_found_again_from_three_steps():
    steps = [observed(i, exponential(16, seed=i), 0.01, 0.0005) for i in range(3)]
    [fit] = fit_decode_step(steps, 2, 0)
    assert (fit.base_s, fit.per_answer_s) == (pytest.approx(0.01), pytest.approx(0.0005))
    assert fit.error == pytest.approx(0, abs=1e-9)


def test_steps_that_are_alike_leave_two_explanations():
    steps = [observed(i, CONSTANT, 0.01, 0.0005) for i in range(3)]
    first, second = fit_decode_step(steps, 2, 0)
    assert first.base_s == second.per_answer_s == 0
    assert all(fit.error < 1e-9 for fit in (first, second))


def test_noise_widens_what_is_possible_and_a_clear_tail_excludes_an_end():
    """Generation that takes base_s alone, each time up to a tenth off: the other end explains 1 in 5 of it at most."""
    noise = random.Random(0)
    clear = [observed(i, exponential(16, seed=i), 0.01, 0.0) for i in range(12)]
    off = [replace(step, generation_s=step.generation_s * noise.uniform(0.9, 1.1)) for step in clear]
    fits = fit_decode_step(off, 2, 0)
    assert len(fits) == 2 and all(fit.base_s > 0.008 for fit in fits)
    blurred = [replace(step, generation_s=noise.uniform(1, 9)) for step in clear[:3]]
    first, second = fit_decode_step(blurred, 2, 0)
    assert first.base_s == second.per_answer_s == 0


def save_run(
    folder: Path,
    lengths: Sequence[Sequence[int]],
    train_s: float,
    base_s: float,
    per_answer_s: float,
    metrics: Mapping[str, float] | None = None,
    **config: object,
) -> Path:
    """A run of 4 prompts x 2 answers a step on 2 devices; `lengths` of each step. The first takes twice as long."""
    ledger, lines = Ledger(folder / "ledger"), []
    for step, row in enumerate(lengths, start=1):
        trajectories = [
            Trajectory.from_completion([1, 2, 3], [5] * n, [-1.0] * n, group_id=i // 2, row=i // 2, reward=1.0)
            for i, n in enumerate(row)
        ]
        ledger.append(step, batch := Batch.pack(trajectories))
        gen = (base_s * max(row) + per_answer_s * sum(row) / 2) * (1 + (step == 1))
        data = {"timing_s/gen": gen, "timing_s/update_weights": 0.05, "timing_s/update_actor": train_s * 0.9}
        data |= {"timing_s/testing": 7.0, "timing_s/step": gen + train_s + 0.05 + 7.0}
        data["perf/total_num_tokens"] = batch.num_tokens
        data["perf/throughput"] = batch.num_tokens / data["timing_s/step"] / 2
        lines.append(json.dumps({"step": step, "data": data | dict(metrics or {})}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    actor = {"actor": {"ppo_mini_batch_size": 2}, "rollout": {"n": 2, "kv_cache_on_publish": "recompute"}}
    saved = {"actor_rollout_ref": actor, "algorithm": {"adv_estimator": "grpo"}} | config
    record = {"name": "toy/run", "metrics": str(folder / "metrics.jsonl"), "total_steps": 6, "config": saved}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def tail(seed: int) -> list[int]:
    draws = random.Random(seed)
    return [max(1, round(draws.lognormvariate(3, 1.2))) for _ in range(8)]


TAILS = [tail(seed) for seed in range(12)]


def plan(run: Path, *words: str) -> int:
    return cli.main(["plan", "--schedule", str(run), *words])


def test_a_run_with_a_tail_is_told_what_to_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = save_run(tmp_path, TAILS, train_s=0.2, base_s=0.02, per_answer_s=0.0)
    assert plan(run, "async_training.staleness_threshold=0.5") == 0
    out = capsys.readouterr().out
    assert "toy/run, steps 2-12: 4 prompts, 8 answers a step on 2 devices" in out
    assert "20 ms + 0 ms x answers" in out  # and the first step, which took twice as long, is left out
    assert "it helps: " in out and "trainer.v1.trainer_mode=" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line[:4] in ("sync", "colo", "one_", "full")}
    assert rows["colocate_async"][1] == "0.5" and rows["one_step_off"][2] == rows["fully_async"][2] == "1+1"
    assert float(rows["colocate_async"][5]) > 1.1 and rows["sync"][5] == "1.00"


def test_the_prediction_of_sync_is_the_run_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = save_run(tmp_path, TAILS, train_s=0.2, base_s=0.02, per_answer_s=0.001)
    assert plan(run, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    steps = found["observed_steps"]
    mean = sum(s["generation_s"] + s["train_s"] + s["publish_s"] for s in steps) / len(steps)
    assert found["predictions"][0]["outcomes"][0]["step_s"] == pytest.approx(mean, rel=0.15)
    assert steps[0]["train_s"] == pytest.approx(0.2)  # a validation is no part of it


def test_the_engines_own_times_of_decode_steps_are_used_where_it_recorded_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Two replicas; the second was started anew after the first step, and its sums begin at 0 again."""
    alike = [[20 + (seed + i) % 5 for i in range(8)] for seed in range(4)]
    run = save_run(tmp_path, alike, train_s=0.1, base_s=0.003, per_answer_s=0.001)
    once, wrong = decode_times(uneven, 0.0).sums, decode_times(lambda _: 0.5, 0.0).sums
    after = [
        [wrong, wrong],  # the step that warms up
        [added(wrong, once), once],
        [added(wrong, once, once), added(once, once)],
        [added(wrong, once, once, once), added(once, once, once)],
    ]
    replicas = [[{"counts": {}, "gauges": {}, "decode_times": sums} for sums in row] for row in after]
    lines = [{"step": step, "lost": 0, "replicas": row} for step, row in enumerate(replicas, start=1)]
    (run / "replicas.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert plan(run, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    [fit] = found["decode_steps"]  # steps that are alike explain one thing alone
    assert fit["points"][0] == [1.0, pytest.approx(0.0025)] and fit["points"][-1] == [8.0, pytest.approx(0.007)]
    steps = found["observed_steps"]
    mean = sum(s["generation_s"] + s["train_s"] + s["publish_s"] for s in steps) / len(steps)
    assert found["predictions"][0]["outcomes"][0]["step_s"] == pytest.approx(mean, rel=0.02)
    assert plan(run) == 0
    assert "2.5 ms with 1, 4.5 ms with 3, 6.25 ms with 6 answers + 0 us x cached tokens" in capsys.readouterr().out


def added(*sums: Mapping[str, float]) -> dict[str, float]:
    return {name: sum(one[name] for one in sums) for name in sums[0]}


@pytest.mark.parametrize(
    ("lengths", "times", "reason"),
    [
        (TAILS, {"train_s": 30.0, "base_s": 0.001, "per_answer_s": 0.0}, "of a step is training and publishing"),
        (
            [[20 + (seed + i) % 5 for i in range(8)] for seed in range(7)],
            {"train_s": 0.1, "base_s": 0.0, "per_answer_s": 0.05},
            "generation has no tail",
        ),
        (TAILS, {"train_s": 0.1, "base_s": 0.0, "per_answer_s": 0.05}, "bound by the tokens of all answers"),
    ],
    ids=["updates", "no tail", "tokens"],
)
def test_it_says_that_it_will_not_help_and_why(
    lengths: list[list[int]], times: dict[str, float], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert plan(save_run(tmp_path, lengths, **times)) == 0
    out = capsys.readouterr().out
    assert "it will not help: " in out and reason in out
    if reason == "generation has no tail":
        assert "too alike" in out or "0 ms + 50 ms" in out


def test_devices_and_split_are_those_of_the_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = save_run(tmp_path, TAILS, train_s=2.0, base_s=0.02, per_answer_s=0.001)
    assert plan(run, "--json", "trainer.n_gpus_per_node=4", "actor_rollout_ref.rollout.n_gpus_per_node=2") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == 6
    split = [(p["schedule"]["training_devices"], p["schedule"]["generation_devices"]) for p in found["predictions"]]
    assert split == [(6, 6), (6, 6), (4, 2), (4, 2)]
    assert [p["schedule"]["parts"] for p in found["predictions"]] == [1, 1, 2, 2]
    assert plan(run, "trainer.n_gpus_per_node=1") == 0
    assert "one device cannot be split" in capsys.readouterr().out


def test_what_cannot_be_planned_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def refused(run: Path, *words: str) -> str:
        assert plan(run, *words) == 2
        return capsys.readouterr().err

    cost = {"train_s": 1.0, "base_s": 0.02, "per_answer_s": 0.0}
    assert "names no run" in refused(tmp_path / "nowhere")
    short = save_run(tmp_path / "short", TAILS[:2], **cost)
    assert "has 2 steps with timing_s/step" in refused(short)
    run = save_run(tmp_path / "run", TAILS[:4], **cost)
    assert "alone lacks the length of each answer" in refused(run / "metrics.jsonl")
    assert "drop trainer.v1.trainer_mode=sync" in refused(run, "trainer.v1.trainer_mode=sync")
    assert "drop --placement" in refused(run, "--placement")
    assert "staleness=9" in refused(run, "async_training.staleness_threshold=9")
    for step in (1, 2):
        (run / "ledger" / f"step_00000{step}.parquet").unlink()
    assert "has 2 of 4 steps in its ledger" in refused(run)
    moving = save_run(tmp_path / "moving", TAILS[:4], **cost, metrics={"fully_async/count/queued": 1.0})
    assert "is an asynchronous run (step 1" in refused(moving)
    apart = save_run(tmp_path / "apart", TAILS[:4], **cost, actor_rollout_ref={"hybrid_engine": False})
    assert "devices of its own for the rollout" in refused(apart)
