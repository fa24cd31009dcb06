"""Teach a small model to use a calculator: a supervised warm-up on few worked problems, then GRPO with the tool agent.

    python3 examples/gsm8k_multiturn_w_tool/run.py [--out gsm8k_tool_out]

Both stages are the ordinary commands (printed as they run). Held-out problems are answered before and after GRPO; the
rewards are compared problem by problem: mean difference with its 95 % interval. Writes result.json and curve.png (needs
matplotlib).
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ARR = "actor_rollout_ref"


def sft(out, seed, steps):
    return [
        f"model.path={out / 'model'}",
        "model.enable_gradient_checkpointing=False",
        f"data.train_files={out / 'data' / 'sft.jsonl'}",
        "data.train_batch_size=32",
        "data.max_length=160",
        "optim.lr=2e-3",
        "optim.lr_warmup_steps=20",
        "optim.lr_scheduler_type=cosine",
        "engine.dtype=float32",
        f"trainer.total_training_steps={steps}",
        "trainer.logger=[file]",
        "trainer.project_name=gsm8k_tool",
        "trainer.experiment_name=sft",
        f"trainer.default_local_dir={out / 'sft'}",
        "trainer.resume_mode=disable",
        f"trainer.seed={seed}",
    ]


def grpo(out, model, seed, steps):
    return [
        f"{ARR}.model.path={model}",
        f"{ARR}.model.enable_gradient_checkpointing=False",
        f"data.train_files={out / 'data' / 'train.jsonl'}",
        f"data.val_files={out / 'data' / 'test.jsonl'}",
        "data.train_batch_size=32",
        f"data.seed={seed}",
        "data.max_prompt_length=64",
        "data.max_response_length=80",
        "algorithm.adv_estimator=grpo",
        f"{ARR}.rollout.multi_turn.enable=True",
        f"{ARR}.rollout.multi_turn.format=hermes",
        f"{ARR}.rollout.multi_turn.function_tool_path={HERE / 'tools.py'}",
        f"{ARR}.rollout.multi_turn.max_assistant_turns=3",
        f"{ARR}.rollout.multi_turn.max_tool_response_length=24",
        f"{ARR}.rollout.multi_turn.tool_response_truncate_side=right",
        f"{ARR}.rollout.n=8",
        f"{ARR}.rollout.dtype=float32",
        f"{ARR}.rollout.seed={seed}",
        f"{ARR}.rollout.val_kwargs.do_sample=True",  # test answers are sampled as in training: temperature 1
        f"{ARR}.rollout.val_kwargs.temperature=1.0",
        f"{ARR}.actor.ppo_mini_batch_size=32",
        f"{ARR}.actor.use_dynamic_bsz=True",
        f"{ARR}.actor.optim.lr=4e-4",
        f"{ARR}.actor.optim.betas=[0.9,0.95]",
        f"{ARR}.actor.fsdp_config.dtype=float32",
        f"reward.custom_reward_function.path={HERE / 'reward.py'}",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=1000000",
        "trainer.logger=[file]",
        "trainer.project_name=gsm8k_tool",
        "trainer.experiment_name=grpo",
        f"trainer.default_local_dir={out / 'grpo'}",
        f"trainer.rollout_data_dir={out / 'train_answers'}",
        f"trainer.validation_data_dir={out / 'test_answers'}",
        "trainer.resume_mode=disable",
    ]


def command(module, overrides):
    """Print a command of the library, then run it."""
    print(f"\npython3 -m {module} \\\n  " + " \\\n  ".join(overrides), flush=True)
    subprocess.run([sys.executable, "-m", module, *overrides], check=True)


def newest(root):
    return root / f"global_step_{(root / 'latest_checkpointed_iteration.txt').read_text().strip()}"


def answers(folder, step):
    """The dumped conversations of a step, in order."""
    return [json.loads(line) for line in (folder / f"{step}.jsonl").read_text(encoding="utf-8").splitlines()]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def paired(before, after):
    """Mean difference and the half-width of its 95 % interval."""
    differences = [b["score"] - a["score"] for a, b in zip(before, after, strict=True)]
    center = mean(differences)
    variance = sum((d - center) ** 2 for d in differences) / (len(differences) - 1)
    return center, 1.96 * math.sqrt(variance / len(differences))


def show(before, after, count=2):
    """Print conversations of the same problem before and after GRPO; first those with the largest gain."""
    pairs = sorted(zip(before, after, strict=True), key=lambda pair: pair[0]["score"] - pair[1]["score"])
    for first, second in pairs[:count]:
        print(f"\n{first['input']}  ({first['gts']} is right)")
        for name, row in (("before", first), ("after", second)):
            print(f"--- {name}: reward {row['score']:g}")
            print(re.sub(r"(</tool_(?:call|response)>)", r"\1\n", row["output"]))


def draw(out, steps, result, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    dumped = [answers(out / "train_answers", step) for step in range(1, steps + 1)]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for key, label, color in (("score", "reward", "#4878a8"), ("tool", "answers with a successful call", "#6aa84f")):
        axes.plot(range(1, steps + 1), [mean(r[key] for r in rows) for rows in dumped], color=color, label=label)
    test_rewards = [result["reward_before"], result["reward_after"]]
    axes.plot([0, steps], test_rewards, "o", color="#b0413e", label="reward on held-out problems")
    axes.set(xlabel="GRPO step", ylabel="mean over answers", ylim=(0, 1), title="Learning to use a calculator")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gsm8k_tool_out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sft-steps", type=int, default=700)
    parser.add_argument("--grpo-steps", type=int, default=40)
    options = parser.parse_args()
    start, out, steps = time.time(), Path(options.out).resolve(), options.grpo_steps
    if (out / "sft").exists():
        parser.error(f"{out} holds an earlier run; name another folder with --out, or delete it")
    os.environ["VERL_FILE_LOGGER_ROOT"] = str(out / "metrics")
    preparation = [sys.executable, str(HERE / "prepare.py"), "--out", str(out), "--seed", str(options.seed)]
    subprocess.run(preparation, check=True)
    command("verl.trainer.sft_trainer", sft(out, options.seed, options.sft_steps))
    trained = time.time()
    command("verl.trainer.main_ppo", grpo(out, newest(out / "sft") / "huggingface", options.seed, steps))
    before, after = answers(out / "test_answers", 0), answers(out / "test_answers", steps)
    gain, interval = paired(before, after)
    result = {
        "problems": len(before),
        "reward_before": mean(row["score"] for row in before),
        "reward_after": mean(row["score"] for row in after),
        "gain": gain,
        "gain_95_percent_half_width": interval,
        "successful_tool_call_before": mean(row["tool"] for row in before),
        "successful_tool_call_after": mean(row["tool"] for row in after),
        "reward_without_tool_before": mean([row["score"] for row in before if not row["tool"]] or [0.0]),
        "seconds_sft": round(trained - start),
        "seconds_in_all": round(time.time() - start),
    }
    show(before, after)
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    try:
        draw(out, steps, result, out / "curve.png")
    except ImportError:
        print("no curve.png: matplotlib is not installed")
    print(json.dumps(result, indent=1))
    return 0 if gain > interval else 1


if __name__ == "__main__":
    sys.exit(main())
