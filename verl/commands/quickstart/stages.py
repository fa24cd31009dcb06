"""The stages of `verl quickstart`: warm up, train by GRPO, and compare answers before and after."""

import json
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config import load_config
from verl.observe.progress import format_duration
from verl.observe.run_record import RUN_FILE
from verl.utils.paths import atomic_write_text

if TYPE_CHECKING:
    from verl.trainer.ppo.training_run import TrainingRun

NUM_HELD_OUT = 200
NUM_SHOWN = 10
NUM_WORKED = 320
WARM_UP_ACCURACY = 0.2  # the warm-up ends at this share of right answers: the model knows the format only
NUM_TIMED = 10  # steps of GRPO, by which the others are expected to take as long
NUM_PROMPTS, NUM_ANSWERS = 64, 8  # per step of GRPO
SFT_RUN = "supervised"
GRPO_RUN = "grpo"
RESULT = "result.json"  # written at the end


def report_result(
    out: Path,
    problems: Sequence[Any],
    before: Sequence[str],
    after: Sequence[str],
    records: list[dict[str, Any]],
    seconds: float,
) -> dict[str, float]:
    """Print the curve and ten problems before and after; write RESULT and report.html. Returns both accuracies."""
    from verl.commands.quickstart.addition_task import compute_score
    from verl.observe.html_report import AnswerComparison, write_report
    from verl.observe.terminal_curve import draw_curve

    curve = [(r["step"], r["data"]["critic/score/mean"]) for r in records if "critic/score/mean" in r["data"]]
    print(draw_curve(curve, title="mean reward of sampled answers, by step"))
    samples = [
        AnswerComparison(
            prompt=p.prompt,
            before=b,
            after=a,
            ground_truth=p.result,
            before_score=compute_score("", b, p.result)["acc"],
            after_score=compute_score("", a, p.result)["acc"],
        )
        for p, b, a in zip(problems, before, after, strict=True)
    ]
    print(f"{'problem':<8}  {'before':<26}  {'after':<26}")
    for s in samples[:NUM_SHOWN]:
        marks = ["right" if score else "wrong" for score in (s.before_score, s.after_score)]
        print(f"{s.prompt:<8}  {s.before[:19]:<20}{marks[0]:<6}  {s.after[:19]:<20}{marks[1]:<6}")
    summary = {"before": accuracy(problems, before), "after": accuracy(problems, after)}
    facts = {
        "held-out problems right before": f"{summary['before']:.1%}",
        "held-out problems right after": f"{summary['after']:.1%}",
        "training problems per step": f"{NUM_PROMPTS} x {NUM_ANSWERS} answers",
        "time": f"{seconds:.0f} s",
    }
    result = {**summary, "problems": len(problems), "seconds": round(seconds, 1)}
    atomic_write_text(out / RESULT, json.dumps(result) + "\n")
    config = load_config(grpo_overrides(out, out / SFT_RUN, 0, None))
    report = write_report(
        out / "report.html", "Quickstart: two-digit addition", records, samples[:50], asdict(config), facts
    )
    print(f"held-out problems answered right: {summary['before']:.1%} before, {summary['after']:.1%} after GRPO")
    print(f"{seconds:.0f} s in all; model: {newest_model(out)}; report: {report}")
    return summary


def sft_overrides(out: Path, seed: int) -> list[str]:
    """Command-line overrides of the warm-up."""
    return [
        f"model.path={out / 'model'}",
        f"data.train_files={out / 'data' / 'worked.jsonl'}",
        "data.train_batch_size=32",
        "data.max_length=64",
        "optim.lr=2e-3",
        "optim.lr_warmup_steps=10",
        "optim.lr_scheduler_type=cosine",
        "engine.dtype=float32",
        "model.enable_gradient_checkpointing=False",
        "trainer.runtime=inline",
        "trainer.total_epochs=14",
        f"trainer.save_freq={NUM_WORKED // 32}",
        "checkpoint.save_contents=[hf_model]",
        "trainer.logger=[file]",
        "trainer.project_name=quickstart",
        f"trainer.experiment_name={SFT_RUN}",
        f"trainer.default_local_dir={out / SFT_RUN}",
        "trainer.resume_mode=disable",
        "trainer.on_existing=rename",
        f"trainer.seed={seed}",
    ]


def grpo_overrides(out: Path, model: Path, seed: int, steps: int | None, resume: str = "disable") -> list[str]:
    """Command-line overrides of the GRPO run."""
    arr = "actor_rollout_ref"
    return [
        f"{arr}.model.path={model}",
        f"{arr}.model.enable_gradient_checkpointing=False",
        f"data.train_files={out / 'data' / 'train.jsonl'}",
        f"data.val_files={out / 'data' / 'test.jsonl'}",
        f"data.train_batch_size={NUM_PROMPTS}",
        f"data.seed={seed}",
        "data.max_prompt_length=8",
        "data.max_response_length=24",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.bypass_mode=True",
        f"{arr}.rollout.n={NUM_ANSWERS}",
        f"{arr}.rollout.seed={seed}",
        f"{arr}.actor.ppo_mini_batch_size={NUM_PROMPTS // 2}",
        f"{arr}.actor.use_dynamic_bsz=True",
        f"{arr}.actor.optim.lr=4e-4",
        f"{arr}.actor.optim.betas=[0.9,0.95]",
        f"{arr}.actor.optim.lr_warmup_steps=5",
        f"{arr}.actor.optim.lr_scheduler_type=cosine",
        f"{arr}.actor.optim.min_lr_ratio=0.3",
        f"{arr}.actor.fsdp_config.dtype=float32",
        f"{arr}.rollout.dtype=float32",
        "reward.custom_reward_function.path=pkg://verl.commands.quickstart.addition_task",
        "reward.custom_reward_function.name=compute_score",
        f"trainer.total_training_steps={steps or 300}",
        "trainer.test_freq=30",
        "trainer.logger=[file]",
        "trainer.project_name=quickstart",
        f"trainer.experiment_name={GRPO_RUN}",
        f"trainer.default_local_dir={out / GRPO_RUN}",
        f"trainer.resume_mode={resume}",
        "trainer.on_existing=rename",
    ]


def warm_up(out: Path, seed: int, problems: Sequence[Any], target: Path) -> None:
    """Fine-tune with one checkpoint per epoch; copy the first that answers enough `problems` right to `target`.

    After a fixed number of epochs the accuracy would vary much more between seeds.
    """
    from verl.trainer.sft_trainer import run_sft

    overrides = sft_overrides(out, seed)
    print_command("verl.trainer.sft_trainer", overrides)
    run_sft(load_config(overrides, config_name="sft_trainer"), announce=keep_quiet)
    epochs = sorted((out / SFT_RUN).glob("global_step_*/huggingface"), key=lambda p: int(p.parent.name.split("_")[-1]))
    for folder in epochs[len(epochs) // 2 :]:  # the first half has not learned the format
        right = accuracy(problems, greedy_answers(folder, problems))
        if right >= WARM_UP_ACCURACY:
            break
    print(f"     {folder.parent.name} is the first epoch to answer {WARM_UP_ACCURACY:.0%} of others right: {right:.1%}")
    shutil.copytree(folder, target, dirs_exist_ok=True)


def train(out: Path, model: Path, seed: int, steps: int | None, extra: list[str], resume: bool) -> list[dict[str, Any]]:
    """GRPO; returns the metrics of every step."""
    from verl.observe.trackers import metrics_path
    from verl.trainer.main_ppo import run_ppo

    overrides = [*grpo_overrides(out, model, seed, steps, "auto" if resume else "disable"), *extra]
    print_command("verl.trainer.main_ppo", overrides)
    run_ppo(load_config(overrides), announce=keep_quiet, before_steps=say_expected_time)
    lines = metrics_path("quickstart", GRPO_RUN).read_text().splitlines()
    return [json.loads(line) for line in lines]


def say_expected_time(run: "TrainingRun") -> None:
    """Have the run print how long it will take, by its first steps but the very first, which is slower."""
    ends = list[float]()

    def after_step() -> None:
        ends.append(time.perf_counter())
        steps_left = run.total_steps - run.trainer.global_step
        if len(ends) == NUM_TIMED and steps_left:
            step_s = (ends[-1] - ends[0]) / (NUM_TIMED - 1)
            print(f"     {step_s:.2f} s a step: about {format_duration(step_s * steps_left)} to go", flush=True)

    run.observers.after_step.append(after_step)


def keep_quiet(line: str) -> None:
    """Drops a line of a run's header or summary: the quickstart has its own."""


def remove_earlier_runs(out: Path) -> None:
    """Delete what an earlier quickstart left, which this one would mix with its own."""
    from verl.observe.trackers import metrics_path

    (out / RESULT).unlink(missing_ok=True)
    for run in (SFT_RUN, GRPO_RUN):
        if (out / run / RUN_FILE).is_file():
            print(f"     replacing {out / run}, of an earlier quickstart; --out FOLDER keeps it")
            shutil.rmtree(out / run)
        metrics_path("quickstart", run).unlink(missing_ok=True)


def print_command(module: str, overrides: list[str]) -> None:
    """The command that repeats a stage, ready to paste."""
    print(f"     python3 -m {module} \\\n       " + " \\\n       ".join(map(shlex.quote, overrides)))


def newest_checkpoint(root: Path) -> Path:
    from verl.trainer.run.resume import LATEST_STEP_FILE

    return root / f"global_step_{(root / LATEST_STEP_FILE).read_text().strip()}"


def newest_model(out: Path) -> Path:
    return newest_checkpoint(out / GRPO_RUN) / "actor" / "huggingface"


def greedy_answers(folder: Path, problems: Sequence[Any]) -> list[str]:
    """Greedy answers of a saved model, generated by transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from verl.models.load import no_progress_bars

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor(tokenizer([p.prompt for p in problems])["input_ids"])
    mask = torch.ones_like(ids)
    with torch.no_grad():
        out = model.generate(  # type: ignore[misc]
            ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
    return tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)


def accuracy(problems: Sequence[Any], texts: Sequence[str]) -> float:
    """Share of exact results."""
    from verl.commands.quickstart.addition_task import compute_score

    scores = [compute_score("", text, p.result)["acc"] for p, text in zip(problems, texts, strict=True)]
    return sum(scores) / len(scores)
