"""Train a small model from scratch on GSM8K solutions, then by GRPO to calculate correctly; measure the gain.

    python3 examples/gsm8k_calculator/run.py --local_dataset_path DIR [--out gsm8k_calculator_out]

Both stages are the ordinary commands (printed as they run). The test reward before and after GRPO is compared question
by question: mean difference with its 95 % interval. Writes result.json and curve.png (needs matplotlib).
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ARR = "actor_rollout_ref"


def sft(out, steps):
    return [
        f"model.path={out / 'model'}",
        "model.enable_gradient_checkpointing=False",
        f"data.train_files={out / 'data' / 'sft.jsonl'}",
        "data.train_batch_size=8",
        "data.max_length=512",
        "data.truncation=right",
        "data.ignore_input_ids_mismatch=True",  # the prompt ends in a space, with which words begin in this tokenizer
        "data.max_token_len_per_gpu=4096",
        "optim.lr=3e-3",
        "optim.betas=[0.9,0.98]",
        "optim.lr_warmup_steps=20",
        "optim.lr_scheduler_type=cosine",
        "engine.dtype=float32",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=100",
        "trainer.logger=[file]",
        "trainer.project_name=gsm8k_calculator",
        "trainer.experiment_name=sft",
        f"trainer.default_local_dir={out / 'sft'}",
        "trainer.resume_mode=disable",
    ]


def grpo(out, model, steps):
    return [
        f"{ARR}.model.path={model}",
        f"{ARR}.model.enable_gradient_checkpointing=False",
        f"data.train_files={out / 'data' / 'train.jsonl'}",
        f"data.val_files={out / 'data' / 'test.jsonl'}",
        "data.train_batch_size=32",
        "data.max_prompt_length=256",
        "data.max_response_length=224",
        "data.filter_overlong_prompts=True",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.bypass_mode=True",
        f"{ARR}.rollout.n=8",
        f"{ARR}.rollout.dtype=float32",
        f"{ARR}.rollout.max_num_seqs=256",
        f"{ARR}.actor.ppo_mini_batch_size=16",
        f"{ARR}.actor.ppo_max_token_len_per_gpu=8192",
        f"{ARR}.actor.use_dynamic_bsz=True",
        f"{ARR}.actor.optim.lr=3e-4",
        f"{ARR}.actor.optim.betas=[0.9,0.95]",
        f"{ARR}.actor.optim.lr_warmup_steps=3",
        f"{ARR}.actor.fsdp_config.dtype=float32",
        f"reward.custom_reward_function.path={HERE / 'reward.py'}",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=1000000",
        "trainer.logger=[file]",
        "trainer.project_name=gsm8k_calculator",
        "trainer.experiment_name=grpo",
        f"trainer.default_local_dir={out / 'grpo'}",
        f"trainer.validation_data_dir={out / 'test_answers'}",
        "trainer.resume_mode=disable",
    ]


def command(module, overrides):
    """Print a command of the library, then run it."""
    print(f"\npython3 -m {module} \\\n  " + " \\\n  ".join(overrides), flush=True)
    subprocess.run([sys.executable, "-m", module, *overrides], check=True)


def newest(root):
    return root / f"global_step_{(root / 'latest_checkpointed_iteration.txt').read_text().strip()}"


def scores(path):
    """(score, exact) of every test question, in order."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["score"] for row in rows], [row["acc"] for row in rows]


def paired(before, after):
    """Mean difference and the half-width of its 95 % interval."""
    differences = [b - a for a, b in zip(before, after, strict=True)]
    mean = sum(differences) / len(differences)
    variance = sum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
    return mean, 1.96 * math.sqrt(variance / len(differences))


def draw(rows, result, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [row["step"] for row in rows if "critic/score/mean" in row["data"]]
    rewards = [row["data"]["critic/score/mean"] for row in rows if "critic/score/mean" in row["data"]]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(steps, rewards, label="training reward (sampled)", color="#4878a8")
    test_rewards = [result["reward_before"], result["reward_after"]]
    axes.plot([0, steps[-1]], test_rewards, "o--", color="#b0413e", label="test reward (greedy)")
    axes.set(xlabel="GRPO step", ylabel="reward", title="GSM8K calculator: right arithmetic in written solutions")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dataset_path", required=True)
    parser.add_argument("--out", default="gsm8k_calculator_out")
    parser.add_argument("--sft-steps", type=int, default=2200)
    parser.add_argument("--grpo-steps", type=int, default=50)
    options = parser.parse_args()
    start, out = time.time(), Path(options.out).resolve()
    if (out / "sft").exists():
        parser.error(f"{out} holds an earlier run; name another folder with --out, or delete it")
    os.environ["VERL_FILE_LOGGER_ROOT"] = str(out / "metrics")
    source = ["--local_dataset_path", options.local_dataset_path, "--out", str(out)]
    subprocess.run([sys.executable, str(HERE / "prepare.py"), *source], check=True)
    command("verl.trainer.sft_trainer", sft(out, options.sft_steps))
    trained = time.time()
    model = newest(out / "sft") / "huggingface"
    command("verl.trainer.main_ppo", grpo(out, model, options.grpo_steps))
    before, exact_before = scores(out / "test_answers" / "0.jsonl")
    after, exact_after = scores(out / "test_answers" / f"{options.grpo_steps}.jsonl")
    gain, interval = paired(before, after)
    result = {
        "questions": len(before),
        "reward_before": sum(before) / len(before),
        "reward_after": sum(after) / len(after),
        "gain": gain,
        "gain_95_percent_half_width": interval,
        "exact_before": sum(exact_before) / len(before),
        "exact_after": sum(exact_after) / len(after),
        "seconds_sft": round(trained - start),
        "seconds_in_all": round(time.time() - start),
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = (out / "metrics" / "gsm8k_calculator" / "grpo.jsonl").read_text().splitlines()
    try:
        draw([json.loads(line) for line in lines], result, out / "curve.png")
    except ImportError:
        print("no curve.png: matplotlib is not installed")
    print(json.dumps(result, indent=1))
    return 0 if gain > interval else 1


if __name__ == "__main__":
    sys.exit(main())
