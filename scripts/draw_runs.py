"""Draw docs/pictures/run_*.svg: the curves of one healthy run and of four that go wrong, from real runs.

Run as `python -m scripts.draw_runs [FOLDER [NAME ...]]` after `make quickstart` (about fifteen minutes on a CPU; not
part of `make docs`). Each run starts from a model of the quickstart; FOLDER (default: quickstart_out) holds it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.draw_architecture import PICTURES, STYLE, text
from verl.observe.svg_curves import HEIGHT, LEFT, WIDTH, Points, make_curve
from verl.observe.trackers import read_metrics

HEAD = 26  # pixels above a curve for its name
COLUMNS = 2
COMMON = (
    "data.train_batch_size=32",
    "data.max_prompt_length=8",
    "data.max_response_length=24",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.calculate_entropy=True",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "trainer.logger=[file]",
    "trainer.test_freq=5",
    "trainer.resume_mode=disable",
    "trainer.project_name=pictures",
    "trainer.ledger=False",
)
REWARD = "reward.custom_reward_function.path"
OURS = (f"{REWARD}=pkg://verl.commands.quickstart.addition_task",)
VALIDATION = "val-core/quickstart/addition/acc/mean@1"
ENTROPY, KL, LENGTH = "actor/entropy", "actor/ppo_kl", "response_length/mean"
SCORE, SPREAD, NORM = "critic/score/mean", "reward/groups_without_spread", "actor/grad_norm"

# name: (model, overrides, metrics that are drawn)
RUNS: dict[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "healthy": (
        "warm",
        (
            *OURS,
            "actor_rollout_ref.rollout.n=16",
            "actor_rollout_ref.actor.optim.lr=4e-4",
            "actor_rollout_ref.actor.optim.betas=[0.9,0.95]",
            "trainer.total_training_steps=80",
        ),
        (SCORE, VALIDATION, ENTROPY, KL, LENGTH, SPREAD),
    ),
    "reward_hacking": (
        "warm",
        (
            f"{REWARD}={Path(__file__)}",
            "reward.custom_reward_function.name=digits_anywhere",
            "actor_rollout_ref.actor.optim.lr=4e-4",
            "trainer.total_training_steps=100",
        ),
        (SCORE, VALIDATION, LENGTH, "response_length/clip_ratio"),
    ),
    "entropy_collapse": (
        "warm",
        (*OURS, "actor_rollout_ref.actor.optim.lr=3e-3", "trainer.total_training_steps=40"),
        (SCORE, VALIDATION, ENTROPY, SPREAD),
    ),
    "kl_blow_up": (
        "warm",
        (
            *OURS,
            "actor_rollout_ref.actor.optim.lr=2e-2",
            "actor_rollout_ref.actor.ppo_epochs=4",
            "actor_rollout_ref.actor.optim.clip_grad=1000",
            "trainer.total_training_steps=25",
        ),
        (SCORE, VALIDATION, KL, ENTROPY),
    ),
    "zero_spread": (
        "model",
        (
            f"{REWARD}={Path(__file__)}",
            "reward.custom_reward_function.name=exact",
            "actor_rollout_ref.actor.optim.lr=4e-4",
            "trainer.total_training_steps=25",
        ),
        (SCORE, SPREAD, NORM, ENTROPY),
    ),
}


def digits_anywhere(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """A reward that can be cheated: the share of the result's digits that stand anywhere in the answer."""
    found = sum(digit in solution_str for digit in ground_truth)
    return {"score": found / len(ground_truth), "acc": float(solution_str.rpartition(";")[2] == ground_truth)}


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1 for the exact result, else 0."""
    return float(solution_str.rpartition(";")[2] == ground_truth)


def train(name: str, folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step of run `name`; a run that is already there is not repeated."""
    model, overrides, _ = RUNS[name]
    metrics = folder / "pictures" / f"{name}.jsonl"
    if not metrics.exists():
        data = [f"data.{kind}_files={folder / 'data' / file}" for kind, file in (("train", "train"), ("val", "test"))]
        command = [
            *(sys.executable, "-m", "verl.trainer.main_ppo", f"actor_rollout_ref.model.path={folder / model}"),
            *(f"{item}.jsonl" for item in data),
            *COMMON,
            *overrides,
            f"trainer.experiment_name={name}",
            f"trainer.default_local_dir={folder / 'pictures' / name}",
        ]
        subprocess.run(command, check=True, env={**os.environ, "VERL_FILE_LOGGER_PATH": f"{metrics}.part"})
        os.replace(f"{metrics}.part", metrics)
    return read_metrics(metrics)


def draw(records: list[dict[str, Any]], names: Sequence[str]) -> str:
    """One SVG with a curve for each metric, two beside each other."""

    def points(name: str) -> Points:
        return [(float(r["step"]), float(r["data"][name])) for r in records if name in r["data"]]

    return draw_cells([(name, {0: points(name)}) for name in names], COLUMNS)


def draw_cells(cells: Sequence[tuple[str, Mapping[int, Points]]], columns: int, same_axes: bool = False) -> str:
    """One SVG with a cell for each (name, points of each run), `columns` beside each other; with `same_axes`, those of
    a column are comparable."""
    runs_of = [[points for _, runs in cells[column::columns] for points in runs.values()] for column in range(columns)]
    shown = [[point for points in runs for point in points] if same_axes else [] for runs in runs_of]
    rows = -(-len(cells) // columns)
    width, height = columns * WIDTH, rows * (HEIGHT + HEAD)
    drawn = [
        f'<g transform="translate({number % columns * WIDTH},{number // columns * (HEIGHT + HEAD) + HEAD})">'
        f"{draw_curve(name, runs, shown[number % columns])}</g>"
        for number, (name, runs) in enumerate(cells)
    ]
    style = STYLE + "  .values { stroke: var(--accent); stroke-width: 1.6; fill: none }\n"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{style}</style>\n<rect class="ground" width="{width}" height="{height}"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def draw_curve(name: str, runs: Mapping[int, Points], shown: Points) -> str:
    curve = make_curve(name, runs, shown=shown)
    right, bottom = WIDTH - 14, HEIGHT - 26
    parts = [text(LEFT, -2, name, "name")]
    for y, label in curve.y_ticks:
        parts += [f'<path class="rule" d="M{LEFT},{y} H{right}"/>', text(LEFT - 6, y + 4, label, "small faint end")]
    parts += [text(x, bottom + 18, label, "small faint mid") for x, label in curve.x_ticks]
    parts += [f'<path class="values" d="{line.path}"/>' for line in curve.lines]
    return "".join(parts)


def main(argv: Sequence[str]) -> None:
    folder = Path(argv[0] if argv else "quickstart_out").absolute()
    for name in argv[1:] or RUNS:
        metrics = RUNS[name][2]
        picture = PICTURES / f"run_{name}.svg"
        records = train(name, folder)
        picture.write_text(draw(records, metrics), encoding="utf-8")
        print(picture, json.dumps({m: [r["data"][m] for r in records if m in r["data"]][-1] for m in metrics}))


if __name__ == "__main__":
    main(sys.argv[1:])
