"""What tests on a real pretrained model share: its questions, and what `transformers` alone makes of them."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.conftest import ROOT
from tests.e2e import jobs
from verl.observe.ledger import read_ledger
from verl.utils.external_code import load_module

example = load_module(str(ROOT / "examples" / "pretrained" / "run.py"), "test")
QUESTIONS = ("What is 17 + 25?", "Name a fruit.", "What is 48 + 31? Answer with the number only.")
OPEN = tuple(f"Tell me a story about {what}." for what in ("a fox", "the sea", "two brothers", "a red hat"))


def read_model(folder: Path) -> PreTrainedModel:
    """The model as `transformers` alone reads it, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def ids_of(folder: Path, question: str) -> list[int]:
    """A question as the model was trained to see it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]


@torch.no_grad()
def logprobs_alone(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """(L,) ids -> (L,) log-probs of each token after those before it; 0 for the first."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return torch.cat([torch.zeros(1), logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]])


def train_two_steps(folder: Path, model: Path, run: str, *extra: str) -> dict[int, dict[str, Any]]:
    """The metrics of two small steps of examples/pretrained, which saves after each; VERL_FILE_LOGGER_ROOT is set."""
    out, reward = folder / run, folder / "reward.py"
    (out / "data").mkdir(parents=True)
    rows = [{"data_source": "letters", "prompt": [{"role": "user", "content": question}]} for question in OPEN]
    for split in ("train", "test"):
        lines = [json.dumps({**row, "reward_model": {"ground_truth": ""}}) + "\n" for row in rows]
        (out / "data" / f"{split}.jsonl").write_text("".join(lines))
    reward.write_text(  # a number that differs between nearly all answers
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(map(ord, solution_str)) % 97 / 97\n"
    )
    words = [
        *example.grpo(out, model, seed=1, steps=2), "data.train_batch_size=2", "data.max_response_length=6",
        f"{jobs.ARR}.rollout.n=2", f"{jobs.ARR}.rollout.max_num_seqs=4", f"{jobs.ARR}.actor.ppo_mini_batch_size=2",
        "algorithm.rollout_correction.bypass_mode=False", "trainer.save_freq=1", "trainer.test_freq=-1",
        "trainer.val_before_train=False", "trainer.logger=[file]", f"trainer.experiment_name={run}",
        f"reward.custom_reward_function.path={reward}",
    ]  # fmt: skip
    jobs.run_ppo(jobs.load_config([*words, *extra]))
    return jobs.metrics(folder, run, project="pretrained")


def assert_saved_as_published(run: Path, source: Path) -> PreTrainedModel:
    """What step 1 saved, read by `transformers` alone, gives the log-probs with which step 2 sampled.

    Returns what step 2 saved, which has other weights, and the tokenizer and chat template of `source`.
    """
    sampling, last = (read_model(run / f"global_step_{step}" / "actor" / "huggingface") for step in (1, 2))
    batch = read_ledger(run / "ledger", 2).batch
    for ids, told, old, mask in zip(
        *(batch[name].split(batch.lengths.tolist()) for name in ("tokens", "rollout_logprobs", "old_logprobs")),
        batch["loss_mask"].split(batch.lengths.tolist()),
        strict=True,
    ):
        expected, sampled = logprobs_alone(sampling, ids), mask.bool()
        assert sampled.any()
        torch.testing.assert_close(told[sampled], expected[sampled], rtol=0, atol=1e-4)
        torch.testing.assert_close(old[sampled], expected[sampled], rtol=0, atol=1e-4)
    moved = [not torch.equal(a, b) for a, b in zip(sampling.parameters(), last.parameters(), strict=True)]
    assert sum(moved) > len(moved) / 2
    saved = run / "global_step_2" / "actor" / "huggingface"
    assert ids_of(saved, QUESTIONS[0]) == ids_of(source, QUESTIONS[0])
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    return last
