"""TRL's side of grpo_step.py: GRPOTrainer runs one block of steps per request on stdin.

Runs under TRL's own Python and exchanges JSON lines: `{"steps": 3}` in, `[[seconds, tokens], ...]` out.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Blocks(TrainerCallback):
    """Times a step from one on_log to the next, with data loading and logging; time between blocks does not count."""

    def __init__(self, replies):
        self.replies, self.remaining, self.timings, self.tokens = replies, 0, [], 0

    def reward(self, completion_ids, completions, **_):
        self.tokens = sum(map(len, completion_ids))
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        return [sum(character.isdigit() for character in text) / 64 for text in texts]

    def next_block(self, control):
        line = sys.stdin.readline()
        if not line:
            control.should_training_stop = True
            self.remaining = -1
            return
        self.remaining, self.timings = json.loads(line)["steps"], []
        self.started = time.perf_counter()

    def reply(self, value):
        print(json.dumps(value), file=self.replies, flush=True)

    def on_train_begin(self, args, state, control, **_):
        self.reply("ready")
        self.next_block(control)

    def on_log(self, args, state, control, **_):
        if self.remaining < 0:
            return
        now = time.perf_counter()
        self.timings.append((now - self.started, self.tokens))
        self.started = now
        self.remaining -= 1
        if self.remaining == 0:
            self.reply(self.timings)
            self.next_block(control)


def main():
    folder, case = Path(sys.argv[1]), json.loads(sys.argv[2])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr
    torch.set_num_threads(case["threads"])
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    is_chat = len(rows[0]["prompt"]) > 1
    dataset = Dataset.from_list([{"prompt": row["prompt"] if is_chat else row["prompt"][0]["content"]} for row in rows])
    blocks = Blocks(replies)
    on_cpu = case["device"] == "cpu"
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=case["prompts"] * case["group"],
        num_generations=case["group"],
        steps_per_generation=1,
        max_completion_length=case["max_tokens"],
        generation_kwargs={} if case["natural"] else {"min_new_tokens": case["max_tokens"]},
        learning_rate=case["lr"],
        lr_scheduler_type="constant",
        max_steps=1_000_000,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=on_cpu,
        bf16=not on_cpu,
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=blocks.reward,
        args=config,
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[blocks],
    )
    assert not on_cpu or next(trainer.model.parameters()).dtype == torch.float32
    trainer.train()


if __name__ == "__main__":
    main()
