"""A main job small enough for tests: the quickstart's task on a model of a few thousand parameters."""

import json
from pathlib import Path
from typing import Any

import pytest

from verl.commands.quickstart.addition_task import CHARACTERS, Problem, Split, write_split
from verl.commands.quickstart.small_model import make_model
from verl.config import load_config
from verl.trainer.main_ppo import run_ppo
from verl.trainer.run import checkpoints

ARR = "actor_rollout_ref"


def prepare(folder: Path, seed: int = 0, layers: int = 1, hidden: int = 32) -> None:
    """A random model and a few rows under `folder`."""
    make_model(folder / "model", CHARACTERS, seed, hidden, layers)
    problems = [Problem(a, b) for a in range(10, 14) for b in range(10, 14)]
    write_split(Split(problems[:12], problems[12:], problems[:4]), folder / "data")
    reward = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    reward += "    return sum(c.isdigit() for c in solution_str) / 8\n"
    (folder / "reward.py").write_text(reward)


def overrides(folder: Path, run: str, *extra: str) -> list[str]:
    """GRPO on what `prepare` made, writing to `folder/run`; 12 prompts an epoch, 4 a step."""
    return [
        f"{ARR}.model.path={folder / 'model'}",
        f"data.train_files={folder / 'data' / 'train.jsonl'}",
        f"data.val_files={folder / 'data' / 'test.jsonl'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "algorithm.adv_estimator=grpo",
        f"{ARR}.rollout.n=4",
        f"{ARR}.rollout.dtype=float32",
        f"{ARR}.actor.ppo_mini_batch_size=4",
        f"{ARR}.actor.optim.lr=1e-2",
        f"{ARR}.actor.fsdp_config.dtype=float32",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "trainer.total_training_steps=6",
        "trainer.logger=[file]",
        "trainer.project_name=e2e",
        f"trainer.experiment_name={run}",
        f"trainer.default_local_dir={folder / run}",
        *extra,
    ]


def train(folder: Path, run: str, *extra: str) -> dict[str, float]:
    """Run the main job as the command does."""
    return run_ppo(load_config(overrides(folder, run, *extra)))


def metrics(folder: Path, run: str, project: str = "e2e") -> dict[int, dict[str, Any]]:
    """What the file tracker wrote, by step (VERL_FILE_LOGGER_ROOT must be `folder/metrics`)."""
    lines = (folder / "metrics" / project / f"{run}.jsonl").read_text().splitlines()
    rows = {row["step"]: row["data"] for row in map(json.loads, lines)}
    assert len(rows) == len(lines), "a step was logged twice"
    return rows


def scores_said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines about scores in the summary of the run that has just ended."""
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(("validation   ", "training   "))]


def watch_checkpoints(folder: Path, run: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry per checkpoint that gets its name from now on: whether its step was in the metrics before."""
    logged, publish = [], checkpoints.publish_directory

    def watched(temporary: Path, target: Path) -> None:
        logged.append(int(target.name.removeprefix("global_step_")) in metrics(folder, run))
        publish(temporary, target)

    monkeypatch.setattr(checkpoints, "publish_directory", watched)
    return logged


TIMINGS = (
    "fully_async/trainer/",
    "fully_async/rollouter/",
    "fully_async/total_wait_time",
    "timing_s/",
    "timing_per_token_ms/",
)


def without_timings(rows: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Everything that must repeat exactly: neither times (rollout/model_s is seconds, too) nor memory."""

    def repeats(name: str) -> bool:
        return not name.startswith(TIMINGS) and "perf/" not in name and not name.endswith("_s")

    return {step: {k: v for k, v in row.items() if repeats(k)} for step, row in rows.items()}
