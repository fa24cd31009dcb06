"""Jobs of several benchmarks: GRPO on the 1M model and the quickstart's GRPO stage, run one step at a time."""

import contextlib
import io
import json
import random
import string
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl.commands.quickstart import stages
from verl.commands.quickstart.addition_task import CHARACTERS, make_split, write_split
from verl.commands.quickstart.small_model import make_tokenizer
from verl.commands.quickstart.stages import NUM_HELD_OUT, NUM_WORKED, warm_up
from verl.config import load_config
from verl.observe.progress import Progress
from verl.trainer.ppo.run_setup import build_run
from verl.trainer.ppo.training_run import TrainingRun

ARR = "actor_rollout_ref"
CHARACTERS_1M = string.digits + string.ascii_letters + string.punctuation + " \n"
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(character.isdigit() for character in solution_str) / 64
"""


@dataclass(frozen=True)
class GRPOCase:
    """One GRPO job: `prompts` x `group` completions a step."""

    name: str
    max_tokens: int
    natural: bool  # EOS ends a completion; if false, every completion has `max_tokens` tokens
    prompts: int = 16
    group: int = 8
    lr: float = 1e-4
    device: str = "cpu"  # of the peer
    max_prompt: int = 8  # tokens


EQUAL = GRPOCase("equal", 64, natural=False)
NATURAL = GRPOCase("natural", 512, natural=True)


def prepare_1m(folder: Path, vocab_size: int = 128) -> None:
    """The 1M model, the prompts (`12+34=` padded to eight characters) and the reward, under `folder`.

    A larger vocabulary makes the model larger; the tokenizer knows 128 of its tokens.
    """
    tokenizer = make_tokenizer(CHARACTERS_1M)
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    generator = random.Random(0)
    prompts = [f"{generator.randint(10, 99)}+{generator.randint(10, 99)}=".rjust(8) for _ in range(2048)]
    rows = [
        {"data_source": "benchmark", "prompt": [{"role": "user", "content": p}], "reward_model": {"ground_truth": ""}}
        for p in prompts
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def grpo_overrides(folder: Path, case: GRPOCase) -> list[str]:
    """Command-line overrides for GRPO on model, train.jsonl and reward.py in `folder`."""
    return [
        f"{ARR}.model.path={folder / 'model'}",
        f"{ARR}.model.enable_gradient_checkpointing=False",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.train_batch_size={case.prompts}",
        f"data.max_prompt_length={case.max_prompt}",
        f"data.max_response_length={case.max_tokens}",
        "algorithm.adv_estimator=grpo",
        f"{ARR}.rollout.n={case.group}",
        f"{ARR}.rollout.temperature=1.0",
        f"{ARR}.rollout.dtype=float32",
        f"{ARR}.rollout.ignore_eos={not case.natural}",
        f"{ARR}.actor.ppo_mini_batch_size={case.prompts}",
        f"{ARR}.actor.use_dynamic_bsz=True",
        f"{ARR}.actor.optim.lr={case.lr}",
        f"{ARR}.actor.fsdp_config.dtype=float32",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "trainer.total_training_steps=1000000",
        *unattended(folder, case.name),
    ]


def unattended(folder: Path, run: str) -> list[str]:
    """Overrides: output paths; no validation, checkpoints or resume."""
    return [
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.logger=[file]",
        "trainer.project_name=benchmark",
        f"trainer.experiment_name={run}",
        f"trainer.default_local_dir={folder / run}",
    ]


def prepare_quickstart(folder: Path) -> list[str]:
    """Run the quickstart up to its GRPO stage (data, model, supervised warm-up); the overrides of that stage."""
    from verl.commands.quickstart.small_model import make_model

    split = make_split(1, NUM_HELD_OUT, NUM_WORKED)
    write_split(split, folder / "data")
    make_model(folder / "model", CHARACTERS, 1)
    with io.StringIO() as discarded, contextlib.redirect_stdout(discarded), contextlib.redirect_stderr(discarded):
        warm_up(folder, 1, split.train[NUM_WORKED : NUM_WORKED + NUM_HELD_OUT], folder / "warm")
    return [*stages.grpo_overrides(folder, folder / "warm", 1, 1_000_000), *unattended(folder, "grpo")]


@dataclass(frozen=True)
class Step:
    """One training step including records and logging: seconds, sampled tokens, seconds per stage, rollout counters."""

    seconds: float
    tokens: int
    timing_s: dict[str, float]
    rollout: dict[str, float]  # counters of the rollout engine


class Stepper:
    """Runs the ordinary trainer one step at a time."""

    def __init__(self, run: TrainingRun, progress: Progress):
        self.run, self.progress = run, progress
        self._record = run.write_records
        run.write_records = self._store_record  # type: ignore[method-assign]

    def _store_record(self, record, timer) -> None:
        self.tokens, self.timer = int(record.batch["loss_mask"].sum()), timer
        self.rollout = record.rollouts.engine_stats
        self._record(record, timer)

    def step(self) -> Step:
        started = time.perf_counter()
        self.run.one_step(self.progress)
        seconds = time.perf_counter() - started
        return Step(seconds, self.tokens, dict(self.timer.seconds), self.rollout)


@contextlib.contextmanager
def stepper(overrides: list[str]) -> Iterator[Stepper]:
    """A run of the main job, ready for its first step."""
    run = build_run(load_config(overrides))
    with run.tracking:
        try:
            run.resume()
            run.trainer.publish()
            with io.StringIO() as discarded, Progress(run.total_steps, 0, discarded) as progress:
                yield Stepper(run, progress)
        finally:
            run.trainer.close()
