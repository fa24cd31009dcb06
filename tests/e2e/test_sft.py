"""Supervised fine-tuning on a tiny model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e import jobs
from verl.config import load_config
from verl.trainer.sft_trainer import run_sft


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    return tmp_path


def train(folder: Path, run: str, *extra: str) -> dict[str, float]:
    overrides = [
        f"model.path={folder / 'model'}",
        "model.enable_gradient_checkpointing=False",
        f"data.train_files={folder / 'data' / 'worked.jsonl'}",
        f"data.val_files={folder / 'data' / 'worked.jsonl'}",
        "data.train_batch_size=2",
        "data.max_length=64",
        "optim.lr=1e-2",
        "engine.dtype=float32",
        "trainer.total_training_steps=8",
        "trainer.logger=[file]",
        "trainer.project_name=e2e",
        f"trainer.experiment_name={run}",
        f"trainer.default_local_dir={folder / run}",
        *extra,
    ]
    return run_sft(load_config(overrides, config_name="sft_trainer"))


def test_the_loss_falls_and_is_the_mean_over_trained_tokens(folder: Path):
    last = train(folder, "run", "trainer.test_freq=4", "trainer.total_training_steps=40")
    rows = jobs.metrics(folder, "run")
    assert rows[1]["train/loss"] > 2.0 > 1.0 > last["train/loss"]
    assert last["val/loss"] < 1.0


def test_the_loss_is_that_of_transformers(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train(folder, "run", "data.train_batch_size=4", "trainer.total_training_steps=1")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    total, count = 0.0, 0
    for line in (folder / "data" / "worked.jsonl").read_text().splitlines():
        prompt, answer = (m["content"] for m in json.loads(line)["messages"])
        ids = tokenizer(prompt + answer + "<eos>", return_tensors="pt")["input_ids"]
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        trained = int((labels != -100).sum())
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * trained
        count += trained
    assert jobs.metrics(folder, "run")[1]["train/loss"] == pytest.approx(total / count, rel=1e-5)


def test_a_resumed_run_continues_bit_for_bit(folder: Path):
    train(folder, "whole", "trainer.save_freq=2")
    train(folder, "parts", "trainer.save_freq=2", "trainer.total_training_steps=4", "optim.total_training_steps=8")
    train(folder, "parts", "trainer.save_freq=2")
    whole, parts = (
        load_file(folder / run / "global_step_8" / "model" / "huggingface" / "model.safetensors")
        for run in ("whole", "parts")
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
