"""Floating-point operations of a model, counted from its modules and the true lengths of its sequences.

A multiplication and an addition count as two. Matrix products, convolutions and attention are counted. Norms,
activations, the scans of Mamba layers and the recomputation of gradient checkpointing are not: the count is what a step
needs, so that MFU compares runs with different performance options.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from transformers import PreTrainedConfig

# dense bfloat16 matmul FLOPs per second, from the vendors' data sheets; the first key in the device's name counts
PUBLISHED_PEAK_FLOPS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H20": 148e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "MI355": 2500e12,
    "MI325": 1307e12,
    "MI300": 1307e12,
    "910B": 354e12,
}


@dataclass(frozen=True)
class AttentionCost:
    """One attention layer: operations per (query, key) pair, and its window in tokens."""

    per_pair: int
    window: int | None

    def flops(self, lengths: Iterable[int]) -> int:
        return self.per_pair * sum(attended_pairs(length, self.window) for length in lengths)


@dataclass(frozen=True)
class FlopCounts:
    """Operations of one model: per token, per token that goes through the head, and per pair in attention."""

    per_token: int
    per_head_token: int
    trained_share: float  # share of the products whose weight gets a gradient
    attention: tuple[AttentionCost, ...]

    @classmethod
    def of(cls, model: nn.Module) -> "FlopCounts":
        """The counts of `model`. Call it after freezing parameters and before sharding them."""
        body, head, trained = 0, 0, 0
        head_module = model.get_output_embeddings() or getattr(model, "score", None)
        for name, module in model.named_modules():
            for parameter_name, parameter in module.named_parameters(recurse=False):
                count = _product_flops(f"{name}.{parameter_name}", module, parameter, model.config)
                head, body = (head + count, body) if module is head_module else (head, body + count)
                trained += count if parameter.requires_grad else 0
        return cls(body, head, trained / max(1, body + head), tuple(_attention_costs(model.config)))

    @property
    def attention_length(self) -> float:
        """Tokens of a sequence whose attention costs as much as everything else; infinite without full attention."""
        per_pair = sum(layer.per_pair for layer in self.attention if layer.window is None)
        windows = sum(layer.per_pair * layer.window for layer in self.attention if layer.window is not None)
        # each token attends to half of the sequence on average
        return 2 * (self.per_token + self.per_head_token + windows) / per_pair if per_pair else float("inf")

    def forward(self, lengths: Sequence[int], head_tokens: int) -> float:
        """One forward over sequences of these lengths, `head_tokens` tokens of which go through the head."""
        layers = sum(attention.flops(lengths) for attention in self.attention)
        return float(self.per_token * sum(lengths) + self.per_head_token * head_tokens + layers)

    def update(self, lengths: Sequence[int], head_tokens: int) -> float:
        """Forward and backward, which repeats each product for its input, and for its weight if that is trained."""
        products = self.per_token * sum(lengths) + self.per_head_token * head_tokens
        attention = self.forward(lengths, head_tokens) - products
        return (2 + self.trained_share) * products + 3 * attention


def attended_pairs(length: int, window: int | None) -> int:
    """(query, key) pairs of causal attention, where each token attends to itself and to window - 1 tokens before."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def _product_flops(name: str, module: nn.Module, parameter: nn.Parameter, config: PreTrainedConfig) -> int:
    """Operations per token of the product with one parameter."""
    if parameter.dim() < 2 or isinstance(module, nn.Embedding):
        return 0
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    experts = experts or getattr(config, "n_routed_experts", None) or 0
    per_token = getattr(config, "num_experts_per_tok", None) or 0
    if ".experts." in name and experts:
        if "bias" in name:
            return 0
        return 2 * parameter.numel() * per_token // experts
    return 2 * parameter.numel()


def _attention_costs(config: PreTrainedConfig) -> Iterable[AttentionCost]:
    """The layers that mix tokens. Names differ by family; a kind of layer that is not known costs nothing here."""

    def number(*names: str) -> int:
        return next((value for name in names if isinstance(value := getattr(config, name, None), int) and value), 0)

    heads = number("num_attention_heads")
    size = number("head_dim", "attention_head_dim") or config.hidden_size // max(1, heads)
    keys = number("qk_nope_head_dim") + config.qk_rope_head_dim if number("qk_nope_head_dim") else size
    values = number("v_head_dim") or keys
    window = number("sliding_window") or None
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    for kind in kinds or ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers:
        if kind == "linear_attention":  # per token: state times key, state update by value, state times query
            state = number("linear_num_value_heads", "linear_num_heads")  # 0: Mamba's scan under this name
            state *= number("linear_key_head_dim", "linear_head_dim") * number(
                "linear_value_head_dim", "linear_head_dim"
            )
            if state:
                yield AttentionCost(6 * state, 1)
        elif heads and ("attention" in kind or kind == "hybrid"):  # Zamba's hybrid: attention and Mamba in one
            yield AttentionCost(2 * heads * (keys + values), window if kind == "sliding_attention" else None)


@dataclass(frozen=True)
class Speed:
    """The operation counts of an engine's model, and the peak per second of all its ranks together."""

    counts: FlopCounts
    peak_flops: float

    def mfu(self, flops: float, seconds: float) -> float:
        """`flops` needed operations in `seconds`, as a share of the peak."""
        return flops / (seconds * self.peak_flops) if seconds > 0 else 0.0


@cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Matmul operations per second of a device: published if known, else measured once."""
    if device.type != "cpu" and dtype in (torch.bfloat16, torch.float16):
        name_of = getattr(torch.get_device_module(device), "get_device_name", lambda _: "")  # not all modules have it
        for known, published in PUBLISHED_PEAK_FLOPS.items():
            if known.lower() in name_of(device).lower():
                return published
    for size in (1024, 2048, 4096, 8192):
        a = torch.ones(size, size, dtype=dtype, device=device)
        seconds = min(_matmul_seconds(a) for _ in range(4))
        if seconds > 1e-3:  # long enough to hide the launch
            break
    return 2 * size**3 / seconds


def _matmul_seconds(a: torch.Tensor) -> float:
    start = time.perf_counter()
    (a @ a)[0, 0].item()  # waits for the device
    return time.perf_counter() - start
