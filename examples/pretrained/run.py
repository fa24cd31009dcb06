"""Teach a pretrained model sums of two-digit numbers by GRPO, on two cores; measure the gain on sums it never saw.

    python3 scripts/get_smollm2.py
    python3 examples/pretrained/run.py [--out pretrained_out]

SmolLM2-135M-Instruct answers "What is 17 + 25?" with "17 + 25 = 32.": fluent and wrong. The run is the ordinary
command, which is printed. Right answers before and after are compared sum by sum: mean difference with 95 % interval.
Writes result.json and curve.png (needs matplotlib). Exit code 1: the gain is not above its interval.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from scripts.get_smollm2 import default_folder, is_complete  # noqa: E402

ARR = "actor_rollout_ref"
STEPS, TEST_EVERY = 8, 2


def row(a, b, split, index):
    question = f"What is {a} + {b}? Answer with the number only."
    return {
        "data_source": "pretrained/sums",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split, "index": index},
    }


def write_sums(folder, seed, held_out=100):
    """train.jsonl and test.jsonl: all 8,100 sums of two numbers from 10 to 99, shuffled and cut in two."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    folder.mkdir(parents=True)
    for split, part in (("test", pairs[:held_out]), ("train", pairs[held_out:])):
        lines = [json.dumps(row(a, b, split, index)) + "\n" for index, (a, b) in enumerate(part)]
        (folder / f"{split}.jsonl").write_text("".join(lines))


def grpo(out, model, seed, steps):
    """The overrides of the run: 16 sums a step, 8 sampled answers of at most 16 tokens to each."""
    return [
        f"{ARR}.model.path={model}",
        f"{ARR}.model.enable_gradient_checkpointing=False",
        f"data.train_files={out / 'data' / 'train.jsonl'}",
        f"data.val_files={out / 'data' / 'test.jsonl'}",
        "data.train_batch_size=16",
        "data.max_prompt_length=64",
        "data.max_response_length=16",
        f"data.seed={seed}",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.bypass_mode=True",
        f"{ARR}.rollout.n=8",
        f"{ARR}.rollout.seed={seed}",
        f"{ARR}.rollout.dtype=float32",
        f"{ARR}.rollout.max_num_seqs=128",
        f"{ARR}.actor.ppo_mini_batch_size=16",
        f"{ARR}.actor.ppo_max_token_len_per_gpu=4096",
        f"{ARR}.actor.use_dynamic_bsz=True",
        f"{ARR}.actor.optim.lr=5e-6",
        f"{ARR}.actor.fsdp_config.dtype=float32",
        f"{ARR}.actor.checkpoint.save_contents=[hf_model]",
        f"reward.custom_reward_function.path={HERE / 'reward.py'}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={TEST_EVERY}",
        "trainer.logger=[console,file]",
        "trainer.project_name=pretrained",
        f"trainer.experiment_name=sums-seed{seed}",
        f"trainer.default_local_dir={out / 'run'}",
        f"trainer.validation_data_dir={out / 'test_answers'}",
        "trainer.resume_mode=disable",
    ]


def right_answers(path):
    """1.0 or 0.0 for every held-out sum, in order."""
    return [json.loads(line)["score"] for line in path.read_text().splitlines()]


def paired(before, after):
    """Mean difference and the half-width of its 95 % interval."""
    differences = [b - a for a, b in zip(before, after, strict=True)]
    mean = sum(differences) / len(differences)
    variance = sum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
    return mean, 1.96 * math.sqrt(variance / len(differences))


def summary(out, name, steps, seconds):
    """What result.json says; the curves are (step, share of right answers)."""
    lines = (out / "metrics" / "pretrained" / f"{name}.jsonl").read_text().splitlines()
    sampled = [(r["step"], r["data"]["critic/score/mean"]) for r in map(json.loads, lines) if r["step"]]
    answers = {int(path.stem): right_answers(path) for path in (out / "test_answers").glob("*.jsonl")}
    gain, interval = paired(answers[0], answers[steps])
    return {
        "steps": steps,
        "sums": len(answers[0]),
        "before": sum(answers[0]) / len(answers[0]),
        "after": sum(answers[steps]) / len(answers[steps]),
        "gain": gain,
        "gain_95_percent_half_width": interval,
        "seconds": round(seconds),
        "held_out": sorted((step, sum(right) / len(right)) for step, right in answers.items()),
        "sampled": sampled,
    }


def draw(result, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(*zip(*result["sampled"], strict=True), label="training sums (sampled)", color="#4878a8")
    axes.plot(*zip(*result["held_out"], strict=True), "o--", color="#b0413e", label="held-out sums (greedy)")
    axes.set(xlabel="GRPO step", ylabel="right answers", title="SmolLM2-135M-Instruct: sums of two-digit numbers")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=default_folder(), help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("pretrained_out"), help="a new folder (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of the sums and the sampling (default: %(default)s)")
    options, more = parser.parse_known_args()
    out = options.out.resolve()
    if out.exists():
        parser.error(f"{out} holds an earlier run; name another folder with --out, or delete it")
    if options.model == default_folder() and not is_complete(options.model):
        parser.error(f"no model in {options.model}; type: python3 scripts/get_smollm2.py")
    write_sums(out / "data", options.seed)
    words = [*grpo(out, options.model.resolve(), options.seed, options.steps), *more]
    print("python3 -m verl.trainer.main_ppo \\\n  " + " \\\n  ".join(words), flush=True)
    environment = {**os.environ, "VERL_FILE_LOGGER_ROOT": str(out / "metrics")}
    start = time.time()
    subprocess.run([sys.executable, "-m", "verl.trainer.main_ppo", *words], check=True, env=environment)
    result = summary(out, f"sums-seed{options.seed}", options.steps, time.time() - start)
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    try:
        draw(result, out / "curve.png")
    except ImportError:
        print("no curve.png: matplotlib is not installed")
    print(json.dumps({name: value for name, value in result.items() if not isinstance(value, list)}, indent=1))
    return 0 if result["gain"] > result["gain_95_percent_half_width"] else 1


if __name__ == "__main__":
    sys.exit(main())
