"""A real pretrained model computes and answers as `transformers` alone does."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from scripts.get_smollm2 import FILES
from tests.engine_cases import build_engine
from tests.pretrained import QUESTIONS, ids_of, logprobs_alone, read_model
from verl.config.rollout import RolloutConfig
from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching
from verl.data.trajectory import Trajectory
from verl.models.load import load_causal_lm
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import NativeEngine

LENGTH = 12
CLOSE = 1e-3  # logits of two tokens: either may be the greedy one


@pytest.fixture(scope="module")
def alone(smollm2: Path) -> PreTrainedModel:
    return read_model(smollm2)


def test_the_folder_is_a_plain_model_with_its_licence_and_template(smollm2: Path):
    assert {path.name for path in smollm2.iterdir()} == set(FILES)
    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config and (config["dtype"], config["num_hidden_layers"]) == ("bfloat16", 30)
    assert "Apache-2.0" in (smollm2 / "README.md").read_text()
    assert "Apache License" in (smollm2 / "LICENSE").read_text()
    text = AutoTokenizer.from_pretrained(smollm2).decode(ids_of(smollm2, QUESTIONS[0]))
    assert text.endswith(f"<|im_start|>user\n{QUESTIONS[0]}<|im_end|>\n<|im_start|>assistant\n")


def test_log_probs_packed_and_with_shared_prompts_are_those_of_transformers(smollm2: Path, alone: PreTrainedModel):
    tokenizer, rows = AutoTokenizer.from_pretrained(smollm2), []
    answers = ("42", "17 + 25 = 32.", "The answer is forty-two, I think.", "Apples!", "79<|im_end|>")
    for group, question in enumerate(QUESTIONS[:2]):
        for answer in answers[group:]:
            ids = tokenizer(answer)["input_ids"]
            rows.append(Trajectory.from_completion(ids_of(smollm2, question), ids, [0.0] * len(ids), group_id=group))
    batch = Batch.pack(rows)
    expected = torch.cat([logprobs_alone(alone, ids) for ids in batch["tokens"].split(batch.lengths.tolist())])
    engine, sampled = build_engine(smollm2, dtype="fp32"), batch["loss_mask"].bool()
    for micro in (MicroBatching(), MicroBatching(share_prefixes=True)):
        found = engine.forward(batch, ("logprobs",), micro)["logprobs"]
        torch.testing.assert_close(found[sampled], expected[sampled], rtol=0, atol=1e-4)


def test_greedy_answers_of_the_native_engine_are_those_of_generate(smollm2: Path, alone: PreTrainedModel):
    engine = NativeEngine(
        RolloutConfig(dtype="float32", prompt_length=64, response_length=LENGTH, max_num_seqs=4),
        load_causal_lm(smollm2),
        AutoTokenizer.from_pretrained(smollm2),
    )
    prompts = [ids_of(smollm2, question) for question in QUESTIONS]

    async def answers() -> list:
        greedy = SamplingParams(temperature=0.0, max_tokens=LENGTH)
        return await asyncio.gather(*(engine.generate(GenerationRequest(i, p, greedy)) for i, p in enumerate(prompts)))

    for prompt, [completion] in zip(prompts, asyncio.run(answers()), strict=True):
        told = alone.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=LENGTH, output_logits=True,
            return_dict_in_generate=True, attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        )  # fmt: skip
        expected = told.sequences[0, len(prompt) :].tolist()
        differ = [a != b for a, b in zip(completion.token_ids, expected, strict=False)]
        if any(differ):
            first, second = told.logits[differ.index(True)][0].topk(2).values.tolist()
            assert first - second < CLOSE, (completion.token_ids, expected)
        else:
            assert completion.token_ids == expected
