"""Parameters are counted from headers or a configuration, without weights."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3MoeConfig

from verl.config import HFModelConfig
from verl.models.parameter_counts import ParameterCounts, model_parameters, stored_parameters

V, D, F, L, E = 50, 16, 24, 2, 4
SIZES = {"vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False, "pad_token_id": 0}
ATTENTION = 2 * D * 16 + 2 * D * 8 + 2 * 8  # q and o, k and v, two norms of a head
LAYER = ATTENTION + 2 * D
OUTSIDE = 2 * V * D + D


def test_parameters_are_counted_from_the_headers_of_the_files(tmp_path: Path):
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "model-1.safetensors", metadata={"f": "pt"})
    save_file({"mlp.experts.0.c": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    assert stored_parameters(tmp_path) == ParameterCounts(24, experts=2, trained=24)
    (tmp_path / "model-3.safetensors").write_bytes(b"\xff" * 9)
    assert stored_parameters(tmp_path) == ParameterCounts(0)


def test_a_configuration_alone_is_enough(tmp_path: Path):
    Qwen3Config(**SIZES, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    whole = OUTSIDE + L * (LAYER + 3 * D * F)
    assert model_parameters(HFModelConfig(path=str(tmp_path))) == ParameterCounts(whole, 0, whole)


def test_experts_are_counted_apart_and_adapters_are_all_that_trains(tmp_path: Path):
    Qwen3MoeConfig(
        **SIZES, num_experts=E, num_experts_per_tok=2, moe_intermediate_size=12, decoder_sparse_step=1,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    experts = L * E * 3 * D * 12
    whole = OUTSIDE + L * (LAYER + E * D) + experts
    assert model_parameters(HFModelConfig(path=str(tmp_path))) == ParameterCounts(whole, experts, whole)
    shutil.rmtree(tmp_path)
    Qwen3Config(**SIZES, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    adapted = HFModelConfig(path=str(tmp_path), lora_rank=4, target_modules=["q_proj", "down_proj"])
    counts, trained = model_parameters(adapted), L * 4 * ((D + 16) + (F + D))
    assert counts == ParameterCounts(OUTSIDE + L * (LAYER + 3 * D * F) + trained, 0, trained)
