"""Shapes of Qwen3 models, random weights for them on any device, and the log-probs that `transformers` gives alone."""

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

# hidden, intermediate, layers, heads, key/value heads, head size, vocabulary
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 16, 256),
    "1M": (128, 512, 4, 4, 2, 32, 128),
    "30M": (512, 1536, 8, 8, 4, 64, 8192),
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151936),
    "4B": (2560, 9728, 36, 32, 8, 128, 151936),
}


def model_config(name: str, longest: int, **more: Any) -> Qwen3Config:
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary = SHAPES[name]
    return Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, tie_word_embeddings=True,
        max_position_embeddings=longest, eos_token_id=1, pad_token_id=0, bos_token_id=2, **more,
    )  # fmt: skip


def random_model(config: Qwen3Config, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Qwen3ForCausalLM:
    """A model in eval mode, drawn on `device` itself: no copy from the host."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # unlike a cast, it leaves the frequencies of the rotary embedding in float32
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def small_model(seed: int = 0) -> Qwen3ForCausalLM:
    """Three layers in float32 on the CPU. Weights are large, so that log-probs differ."""
    config = Qwen3Config(
        vocab_size=4099, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True,
        eos_token_id=1, pad_token_id=0, bos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    return random_model(config, torch.device("cpu"), torch.float32, seed)


def expected_logprobs(model: Qwen3ForCausalLM, ids: list[int]) -> torch.Tensor:
    """(len - 1,) of each token after the first, by transformers in float64 on the CPU."""
    with torch.no_grad():
        logits = model.double()(torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
