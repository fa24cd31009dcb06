"""Counted operations of every family against torch's own counter, which watches a forward pass."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.models.test_transformer import MODELS, STATE, VOCABULARY, build
from verl.models.flops import AttentionCost, FlopCounts, attended_pairs, peak_flops
from verl.models.registry import FAMILIES

LENGTH = 11
WATCHED = [m for m in MODELS if "state" not in FAMILIES[m[0]].traits and not FAMILIES[m[0]].padded_because]


def watched_flops(model) -> int:
    """One forward over LENGTH tokens; torch counts attention over all pairs, and rotary angles as a product."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(3, 3 + LENGTH)[None], use_cache=False)
    by_module = counter.get_flop_counts()
    rotary = sum(sum(counts.values()) for name, counts in by_module.items() if name.endswith("rotary_emb"))
    return counter.get_total_flops() - rotary


@pytest.mark.parametrize(("name", "changes"), WATCHED, ids=lambda x: x if isinstance(x, str) else "")
def test_counts_equal_what_torch_sees_but_for_the_causal_half(name, changes):
    model = build(name, changes)
    counts = FlopCounts.of(model)
    all_pairs = sum(layer.per_pair * LENGTH**2 for layer in counts.attention)
    assert (counts.per_token + counts.per_head_token) * LENGTH + all_pairs == watched_flops(model)
    assert counts.per_head_token == 2 * VOCABULARY * model.config.hidden_size


@pytest.mark.parametrize(("length", "window"), [(1, None), (7, None), (7, 3), (3, 7), (5, 1)])
def test_pairs_are_those_that_a_causal_window_lets_through(length, window):
    seen = [(q, k) for q in range(length) for k in range(length) if k <= q and q - k < (window or length)]
    assert attended_pairs(length, window) == len(seen)


@pytest.mark.parametrize(("name", "changes"), [("llama", {}), ("qwen3_5_text", STATE)])
def test_attention_is_half_of_the_cost_at_the_attention_length(name, changes):
    counts = FlopCounts.of(build(name, changes))
    length = round(counts.attention_length)
    quadratic = sum(layer.flops([length]) for layer in counts.attention if layer.window is None)
    assert quadratic == pytest.approx(counts.forward([length], length) / 2, rel=2 / length)


def test_layers_with_a_state_cost_the_same_for_every_token():
    counts = FlopCounts.of(build("qwen3_5_text", STATE))
    state = 4 * 8 * 8
    assert AttentionCost(6 * state, 1) in counts.attention and len(counts.attention) == 2


def test_an_update_is_three_forwards_and_two_where_weights_are_frozen():
    model = build("llama", {})
    lengths, rows = [5, 9], 10
    whole = FlopCounts.of(model)
    assert whole.update(lengths, rows) == pytest.approx(3 * whole.forward(lengths, rows))
    model.requires_grad_(False)
    frozen = FlopCounts.of(model)
    attention = sum(layer.flops(lengths) for layer in frozen.attention)
    assert frozen.update(lengths, rows) == pytest.approx(2 * frozen.forward(lengths, rows) + attention)


def test_the_peak_of_a_cpu_is_measured_once():
    assert peak_flops(torch.device("cpu"), torch.float32) > 1e8
    assert peak_flops(torch.device("cpu"), torch.float32) == peak_flops(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H20", 148),
        ("NVIDIA H800 PCIe", 756),
    ],
)
def test_the_peak_of_a_gpu_is_its_makers(monkeypatch: pytest.MonkeyPatch, name: str, teraflops: int):
    """Dense bfloat16, of the data sheets; cards of one family differ."""
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(get_device_name=lambda _: name))
    assert peak_flops.__wrapped__(torch.device("cuda"), torch.bfloat16) == teraflops * 1e12
