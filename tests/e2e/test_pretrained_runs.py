"""Training and serving a real pretrained model, as examples/pretrained does, in steps of a few tokens."""

import json
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.conftest import import_or_skip
from tests.e2e import jobs
from tests.e2e.serving import serving
from tests.pretrained import QUESTIONS, assert_saved_as_published, ids_of, logprobs_alone, read_model, train_two_steps
from verl.commands.serve import command
from verl.config import load_config

pytestmark = pytest.mark.slow

APART = ["trainer.device=cpu", f"{jobs.ARR}.hybrid_engine=False", f"{jobs.ARR}.rollout.n_gpus_per_node=1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    return tmp_path


def test_two_steps_with_a_rollout_apart_are_received_match_and_are_saved(folder: Path, smollm2: Path):
    rows = train_two_steps(folder, smollm2, "apart", *APART)
    for step in (1, 2):
        assert rows[step]["weight_sync/tensors_read_back"] == rows[step]["weight_sync/tensors_sent"] > 0
        assert rows[step]["weight_sync/parameters_not_read_back"] == 0
        assert rows[step]["training/rollout_probs_diff_max"] < 1e-4
    assert_saved_as_published(folder / "apart" / "run", smollm2)


def test_adapters_train_and_are_saved_beside_the_merged_model(folder: Path, smollm2: Path):
    peft = import_or_skip("peft")
    lora = [f"{jobs.ARR}.model.lora_rank=4", f"{jobs.ARR}.model.lora_alpha=64", f"{jobs.ARR}.actor.optim.lr=1e-3"]
    rows = train_two_steps(folder, smollm2, "lora", *lora)
    assert all(rows[step]["training/rollout_probs_diff_max"] < 1e-4 for step in (1, 2))
    merged = assert_saved_as_published(folder / "lora" / "run", smollm2)
    adapters = folder / "lora" / "run" / "global_step_2" / "actor" / "lora_adapter"
    beside = peft.PeftModel.from_pretrained(read_model(smollm2), adapters).eval()
    ids = torch.tensor(ids_of(smollm2, QUESTIONS[0]))
    torch.testing.assert_close(logprobs_alone(beside, ids), logprobs_alone(merged, ids), rtol=0, atol=1e-3)


def test_serve_answers_as_generate_does(smollm2: Path):
    overrides = [f"{jobs.ARR}.model.path={smollm2}", f"{jobs.ARR}.rollout.dtype=float32"]
    server = command.build_server(load_config(overrides), command._parser().parse_args([]))
    body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "temperature": 0, "max_tokens": 16}
    with serving(server) as address:
        request = urllib.request.Request(f"{address}/chat/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=120) as reply:
            [choice] = json.loads(reply.read())["choices"]
    prompt = ids_of(smollm2, QUESTIONS[0])
    answer = read_model(smollm2).generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16)[0, len(prompt) :]
    text = AutoTokenizer.from_pretrained(smollm2).decode(answer, skip_special_tokens=True)
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop") and text
