"""Tiny random reward models, and what `transformers` says of a sequence."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedConfig


def save_reward_model(
    folder: Path, config: PreTrainedConfig, tokenizer: Path | None = None, labels: int = 1, seed: int = 1
) -> Path:
    """A random classifier in `folder`, its scores well apart; with the tokenizer of another folder."""
    torch.manual_seed(seed)
    config.num_labels = labels
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    for path in tokenizer.iterdir() if tokenizer else ():
        if "token" in path.name or "template" in path.name:
            shutil.copy(path, folder)
    return folder


def oracle_scores(folder: Path, sequences: Sequence[Sequence[int]], dtype: torch.dtype = torch.float64) -> list[float]:
    """One sequence after the other, unpadded, by the library's own class and attention."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([ids])).logits[0, 0]) for ids in sequences]
