"""Train a tiny reward model from pairs of answers, then a tiny policy by GRPO on its score; on a CPU, in minutes.

    python3 examples/reward_model/on_sums.py                 # --steps, --pairs, --seed, --out, key=value ...

The task is the quickstart's: two-digit sums with their working. Of a pair, the chosen answer is right, and the
rejected one is sampled from the policy, has wrong digits, or is nonsense. The reward model starts from a model that was
fine-tuned to add, the policy from one that knows the format only. It is trained on the score of the reward model alone;
the share of right results, which the function of the task logs, falls, since the policy finds the errors of so small a
reward model. Writes result.json.
"""

import argparse
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

RUNS = ("reward_model_run", "grpo")


def wrong(problem: Any, other: str, draw: random.Random) -> str:
    """A rejected answer: a sum in it is wrong, or digits are, or it is cut off, of another problem, or any characters.

    A policy finds what a reward model was never shown. Without wrong sums whose results are carried on correctly it
    learnt those, and with one wrong digit alone it learnt nonsense; both had a high score.
    """
    kind, answer = draw.random(), problem.worked
    if kind < 0.6:
        return miscalculated(problem, draw)
    if kind < 0.7:
        return answer[: draw.randrange(1, len(answer))]
    if kind < 0.8:
        return other
    if kind < 0.9:
        return "".join(draw.choice("0123456789+=,;") for _ in range(draw.randrange(1, 24)))
    changed, digits = list(answer), [i for i, character in enumerate(answer) if character.isdigit()]
    for place in draw.sample(digits, draw.choice((1, 2, 4))):
        changed[place] = draw.choice([d for d in "0123456789" if d != answer[place]])
    return "".join(changed)


def miscalculated(problem: Any, draw: random.Random) -> str:
    """The working of `problem` with a wrong sum of units or tens, and what follows from it."""
    (tens_a, units_a), (tens_b, units_b) = divmod(problem.a, 10), divmod(problem.b, 10)
    errors = [draw.choice((-4, -3, -2, -1, 1, 2, 3, 4)), 0]
    draw.shuffle(errors)
    units = abs(units_a + units_b + errors[0])
    carry = units // 10
    tens = tens_a + tens_b + carry + errors[1]
    return f"{units_a}+{units_b}={units},{tens_a}+{tens_b}+{carry}={tens};{10 * tens + units % 10}"


def sampled_answers(out: Path, seed: int) -> dict[str, str]:
    """By prompt, an answer that the policy samples before it is trained."""
    from verl.commands.generate_answers import generate
    from verl.config import load_config

    file = out / "data" / "sampled.jsonl"
    file.unlink(missing_ok=True)
    sampling = ["actor_rollout_ref.rollout.dtype=float32", f"actor_rollout_ref.rollout.seed={seed}"]
    lengths = ["data.max_prompt_length=8", "data.max_response_length=24"]
    files = [f"data.train_files={out / 'data' / 'train.jsonl'}", f"data.output_path={file}"]
    generate(load_config([f"actor_rollout_ref.model.path={out / 'warm'}", *files, *lengths, *sampling]))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["prompt"][0]["content"]: row["responses"][0] for row in rows}


def write_pairs(out: Path, count: int, seed: int) -> None:
    """pairs.jsonl of training problems, and 200 of held-out ones in test_pairs.jsonl."""
    from verl.commands.quickstart.addition_task import compute_score, make_split, write_rows
    from verl.commands.quickstart.stages import NUM_HELD_OUT

    split, draw, sampled = make_split(seed, NUM_HELD_OUT, num_worked=0), random.Random(seed), sampled_answers(out, seed)
    for name, problems, number in (("pairs", split.train, count), ("test_pairs", split.held_out, NUM_HELD_OUT)):
        rows = []
        for i in range(number):
            problem, rejected = problems[i % len(problems)], sampled.get(problems[i % len(problems)].prompt, "")
            if draw.random() < 0.7 or not rejected or compute_score("", rejected, problem.result)["acc"]:
                rejected = wrong(problem, draw.choice(problems).worked, draw)
            if rejected != problem.worked:
                rows.append({"prompt": problem.prompt, "chosen": problem.worked, "rejected": rejected})
        write_rows(out / "data" / f"{name}.jsonl", rows)


def remove(out: Path, run: str) -> None:
    """What an earlier program left of the run."""
    from verl.observe.trackers import metrics_path

    shutil.rmtree(out / run, ignore_errors=True)
    metrics_path("reward_model", run).unlink(missing_ok=True)


def train_reward_model(out: Path, seed: int, pairs: int = 16000, announce=print) -> dict[str, float]:
    """Trains out/reward_model from the model in out/teacher; returns its validation."""
    from verl.commands.quickstart.stages import newest_checkpoint
    from verl.config import load_config
    from verl.trainer.sft_trainer import run_sft

    write_pairs(out, pairs, seed)
    remove(out, RUNS[0])
    folder = out / RUNS[0]
    overrides = [
        f"model.path={out / 'teacher'}",
        "model.enable_gradient_checkpointing=False",
        f"data.train_files={out / 'data' / 'pairs.jsonl'}",
        f"data.val_files={out / 'data' / 'test_pairs.jsonl'}",
        f"data.train_batch_size={min(64, pairs)}",
        "data.max_length=64",
        "engine.dtype=float32",
        "optim.lr=1e-3",
        "optim.lr_warmup_steps=10",
        "optim.lr_scheduler_type=cosine",
        "trainer.total_epochs=2",
        "trainer.logger=[file]",
        "trainer.project_name=reward_model",
        f"trainer.experiment_name={RUNS[0]}",
        f"trainer.default_local_dir={folder}",
        "trainer.resume_mode=disable",
        f"trainer.seed={seed}",
    ]
    found = run_sft(load_config(overrides, config_name="reward_trainer"), announce=announce)
    shutil.copytree(newest_checkpoint(folder) / "huggingface", out / "reward_model", dirs_exist_ok=True)
    return found


def train_policy(out: Path, seed: int, steps: int, extra: list[str]) -> list[dict]:
    """GRPO from out/warm on the score of out/reward_model; returns the metrics of every step."""
    from verl.commands.quickstart.stages import grpo_overrides
    from verl.config import load_config
    from verl.observe.trackers import metrics_path
    from verl.trainer.main_ppo import run_ppo

    remove(out, RUNS[1])
    overrides = [
        *grpo_overrides(out, out / "warm", seed, steps),
        "reward.reward_model.enable=True",
        f"reward.reward_model.model_path={out / 'reward_model'}",
        "reward.weights.rm=1.0",  # the function of the task is logged and counts nothing
        "actor_rollout_ref.actor.use_kl_loss=True",  # what is far from the policy at first, the reward model never saw
        "actor_rollout_ref.actor.kl_loss_coef=0.05",
        "trainer.project_name=reward_model",
        *extra,
    ]
    run_ppo(load_config(overrides))
    return [json.loads(line) for line in metrics_path("reward_model", RUNS[1]).read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("reward_model_out"), help="folder for everything written")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=16000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("overrides", nargs="*", help="key=value of GRPO")
    options = parser.parse_intermixed_args()
    out = options.out.resolve()
    os.environ.setdefault("VERL_FILE_LOGGER_ROOT", str(out / "metrics"))
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))
    from run import prepare_teacher  # and the model that knows the format only

    prepare_teacher(out, options.seed)
    judge = train_reward_model(out, options.seed, options.pairs)
    records = train_policy(out, options.seed, options.steps, options.overrides)
    rows = [record["data"] for record in records if "critic/score/mean" in record["data"]]
    part = max(len(rows) // 10, 1)
    result = {"pairs right": judge.get("val/rewards/accuracies")}
    for name, metric in (("reward", "reward/rm/mean"), ("right", "reward/acc/mean")):
        values = [row[metric] for row in rows]
        result[f"{name} first"], result[f"{name} last"] = sum(values[:part]) / part, sum(values[-part:]) / part
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
