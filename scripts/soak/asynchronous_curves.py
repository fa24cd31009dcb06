"""Learning curves of the modes of asynchronous training beside those of sync, on the quickstart's task.

    make soak PART=asynchronous_curves                      # five seeds of four modes: about forty minutes on two cores
    python -m scripts.soak.asynchronous_curves --seeds 1 --steps 3 --only one_step_off --folder /tmp/soak

Every run has two processes of one thread: two ranks that generate and train in turns, or a trainer and a replica. A
seed's runs train the same warm model on the same prompts. Says whether the final reward of each mode is within the
spread of sync's seeds. With every case measured, draws docs/pictures/asynchronous_curves.svg and fills the section of
docs/train/asynchronous.md. Goes on where the last run stopped; a result stays when other code changes, with its commit.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.draw_architecture import PICTURES, STYLE, text
from scripts.soak.algorithms import read_points, write_points
from scripts.soak.progress import RESULTS, ROOT, Progress
from verl.commands.quickstart.stages import grpo_overrides
from verl.observe.svg_curves import HEIGHT, LEFT, WIDTH, Points, make_curve
from verl.observe.trackers import read_metrics
from verl.utils.external_code import load_module

cpu = load_module(str(ROOT / "examples" / "cpu" / "run.py"), "soak")
PART, SEEDS, STEPS, LAST, POINTS = "asynchronous_curves", 5, 120, 10, 30  # the last steps' mean is the final reward
PROMPTS, ANSWERS = 32, 8
IDLE = {"trainer": "fully_async/trainer/idle_ratio", "rollout": "fully_async/rollouter/idle_ratio"}
PICTURE, PAGE = PICTURES / f"{PART}.svg", ROOT / "docs" / "train" / "asynchronous.md"
SECTION = "## Measured curves"
APART = (
    "--config-name=one_step_off_ppo_trainer",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
)
HALF = "async_training.staleness_threshold=0.5"
MODES = {
    "sync": ("trainer.n_gpus_per_node=2",),
    "colocate_async": ("trainer.n_gpus_per_node=2", "trainer.v1.trainer_mode=colocate_async", HALF),
    "one_step_off": APART,
    "fully_async": (*APART, HALF, "trainer.v1.sampler.max_off_policy_threshold=8"),
}
COLOURS = dict(zip(MODES, ("--accent", "--write", "--green", "--violet"), strict=True))
HEAD, MARGIN = 44, 20  # pixels above a curve for its name and the legend; right of the last one for its last number


@dataclass(frozen=True)
class Curve:
    """One run, by step: mean reward of its answers, and seconds since it began, in which it was warm."""

    reward: Points
    seconds: Points
    final: float
    idle: dict[str, float]  # mean share of the time in which the trainer, and the rollout, waited for the other


def train(mode: str, seed: int, steps: int, folder: Path) -> Curve:
    """One run of `mode`. Its lines are in `folder`/logs."""
    os.environ["VERL_FILE_LOGGER_ROOT"] = str(folder / "metrics")  # of the warm-up, too
    model, name = cpu.prepare(folder, seed), mode
    words = [
        *grpo_overrides(folder, model, seed, steps),
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
        "trainer.device=cpu",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.ledger=False",
        f"trainer.project_name={PART}",
        f"trainer.experiment_name={name}",
        f"trainer.default_local_dir={folder / name}",
        *MODES[mode],
    ]
    metrics, log = folder / "metrics" / PART / f"{name}.jsonl", folder / "logs" / f"{name}.txt"
    metrics.unlink(missing_ok=True)  # of a run that was stopped
    shutil.rmtree(folder / name, ignore_errors=True)
    log.parent.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
        subprocess.run(command, stdout=output, stderr=output, env=environment, check=True)
    return curve_of(read_metrics(metrics))


def curve_of(records: Sequence[dict[str, Any]]) -> Curve:
    rows = [(r["step"], r["data"]) for r in records if "critic/score/mean" in r["data"]]
    seconds, passed = [], 0.0
    for step, data in rows:
        passed += data["timing_s/step"]
        seconds.append((float(step), passed))
    reward = [(float(step), float(data["critic/score/mean"])) for step, data in rows]
    waits = {name: [data[key] for _, data in rows if key in data] for name, key in IDLE.items()}
    idle = {name: round(statistics.mean(values), 3) for name, values in waits.items() if values}
    return Curve(reward, seconds, statistics.mean(value for _, value in reward[-LAST:]), idle)


def in_stretches(points: Points, count: int = POINTS) -> list[list[float]]:
    """Means of both coordinates over at most `count` equal stretches of the points."""
    size = max(1, -(-len(points) // count))
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [[float(f"{statistics.mean(column):.4g}") for column in zip(*part, strict=True)] for part in parts]


def case_name(mode: str, seed: int) -> str:
    return f"{mode}, seed {seed}"


def of_mode(cases: Mapping[str, dict[str, Any]], mode: str) -> list[dict[str, Any]]:
    """The results of a mode, by seed."""
    return sorted((case for case in cases.values() if case["mode"] == mode), key=lambda case: case["seed"])


def comparison(cases: Mapping[str, dict[str, Any]]) -> list[str]:
    """A line of a table for each mode: final reward over seeds, seconds, and whether it is within sync's spread."""
    sync = [case["final"] for case in of_mode(cases, "sync")]
    lines = [
        "| mode | seeds | final reward | its seeds | seconds | trainer waits | rollout waits | within sync's spread |",
        "|---|--:|--:|---|--:|--:|--:|---|",
    ]
    for mode in MODES:
        if not (found := of_mode(cases, mode)):
            continue
        finals = [case["final"] for case in found]
        within = (
            abs(statistics.mean(finals) - statistics.mean(sync)) <= max(sync) - min(sync) if len(sync) > 1 else None
        )
        said = "-" if mode == "sync" or within is None else "yes" if within else "no"
        seconds = statistics.mean(case["seconds"] for case in found)
        ends = f"{min(finals):.3f} to {max(finals):.3f}"
        waits = " | ".join(mean_share([case["idle"].get(name) for case in found]) for name in IDLE)
        final = f"{statistics.mean(finals):.3f}"
        lines.append(f"| `{mode}` | {len(finals)} | {final} | {ends} | {seconds:.0f} | {waits} | {said} |")
    return lines


def mean_share(values: Sequence[float | None]) -> str:
    """The mean in per cent; a dash where there is none."""
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):.0%}".replace("%", " %") if known else "-"


def mean_curve(found: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """The mean over seeds of both coordinates, point by point."""
    curves = [read_points(case["curves"][name]) for case in found]
    return [
        tuple(statistics.mean(column) for column in zip(*points, strict=True))  # type: ignore[misc]
        for points in zip(*curves, strict=False)
    ]


def picture(cases: Mapping[str, dict[str, Any]]) -> str:
    """Reward by answers that were trained on, and by seconds; the mean over seeds of each mode."""
    modes = [mode for mode in MODES if of_mode(cases, mode)]
    cells = [("reward by answers trained on", "answers"), ("reward by seconds", "seconds")]
    width, height = len(cells) * WIDTH + MARGIN, HEIGHT + HEAD
    style = STYLE + "  svg { --green: #1a7f37; --violet: #8250df }\n"
    style += "".join(f"  .{mode} {{ stroke: var({COLOURS[mode]}); stroke-width: 2; fill: none }}\n" for mode in modes)
    parts = [text(LEFT + 28 + 130 * i, 20, mode, "small") for i, mode in enumerate(modes)]
    parts += [f'<path class="{mode}" d="M{LEFT + 130 * i},16 h22"/>' for i, mode in enumerate(modes)]
    for column, (title, name) in enumerate(cells):
        curve = make_curve(title, {i: mean_curve(of_mode(cases, mode), name) for i, mode in enumerate(modes)})
        cell = [text(LEFT, -2, title, "name")]
        for y, label in curve.y_ticks:
            cell += [
                f'<path class="rule" d="M{LEFT},{y} H{WIDTH - 14}"/>',
                text(LEFT - 6, y + 4, label, "small faint end"),
            ]
        cell += [text(x, HEIGHT - 8, label, "small faint mid") for x, label in curve.x_ticks]
        cell += [f'<path class="{modes[line.run]}" d="{line.path}"/>' for line in curve.lines]
        parts.append(f'<g transform="translate({column * WIDTH},{HEAD})">{"".join(cell)}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{style}</style>\n<rect class="ground" width="{width}" height="{height}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def with_section(page: str, lines: Sequence[str]) -> str:
    """`page` with these lines after the first paragraph of SECTION, in place of those of an earlier call."""
    before, found, rest = page.partition(f"{SECTION}\n\n")
    assert found, f"{PAGE} has no section {SECTION!r}"
    first, _, _ = rest.partition("\n\n")
    after = rest[rest.index("\n## ") :]
    return before + found + first + "\n\n" + "\n".join(lines) + "\n" + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", choices=MODES)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the record")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / PART, help="of the runs")
    options = parser.parse_args()
    progress = Progress(PART, options.folder, keep_older=True)
    for seed in range(1, options.seeds + 1):
        for mode in [options.only] if options.only else MODES:
            case = case_name(mode, seed)
            if progress.done(case):
                continue
            begin = time.monotonic()
            curve = train(mode, seed, options.steps, options.out.absolute() / f"seed_{seed}")
            by_answers = [(step * PROMPTS * ANSWERS, reward) for step, reward in curve.reward]
            by_seconds = [(s, reward) for (_, s), (_, reward) in zip(curve.seconds, curve.reward, strict=True)]
            curves = {"answers": by_answers, "seconds": by_seconds}
            written = {name: write_points(in_stretches(points)) for name, points in curves.items()}
            seconds = round(curve.seconds[-1][1], 1)
            result = {"final": curve.final, "seconds": seconds, "idle": curve.idle, "curves": written}
            progress.record(case, 1, mode=mode, seed=seed, **result)
            print(f"{case}: final reward {curve.final:.3f}, {time.monotonic() - begin:.0f} s", flush=True)
    table = comparison(progress.cases)
    print("\n".join(table))
    if options.folder == RESULTS and len(progress.cases) == SEEDS * len(MODES):
        PICTURE.write_text(picture(progress.cases), encoding="utf-8")
        shown = [f"![reward of each mode by answers and by seconds](../pictures/{PICTURE.name})", "", *table]
        PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), shown), encoding="utf-8")
    return int(any(line.endswith("| no |") for line in table))


if __name__ == "__main__":
    sys.exit(main())
