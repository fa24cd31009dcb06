"""Every packed model family: sequences laid end to end give what each gives alone. To add one, add a line."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine_cases import SHAPE, VOCABULARY
from verl.models.attention import use_packed_attention
from verl.models.attention_kernels import Packing
from verl.models.registry import FAMILIES, runs_packed

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

MODELS = [
    ("llama", {}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 4}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("gemma", {"num_key_value_heads": 1}),
    ("gemma2", {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    ("gemma3_text", {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    ("phi", {}),
    ("phi3", {"sliding_window": None}),
    ("olmo2", {}),
    ("granite", {}),
    ("starcoder2", {"sliding_window": None}),
    ("smollm3", {}),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24}),
    ("qwen3_moe", EXPERTS),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
]
LENGTHS = (7, 1, 5, 5, 12)


def build(name: str, changes: dict) -> torch.nn.Module:
    config = AutoConfig.for_model(name, **{**SHAPE, **changes})
    config._experts_implementation = "eager"  # the grouped kernel has no float64
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="plain_test").eval()


def gradients(model: torch.nn.Module, logits: torch.Tensor, direction: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logits * direction).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "changes"), MODELS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(MODELS)])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
def test_packed_logits_and_gradients_equal_those_of_each_sequence_alone(name, changes, checkpointing):
    model = build(name, changes)
    assert runs_packed(model.config, wanted=True)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in LENGTHS]
    direction = torch.randn(sum(LENGTHS), VOCABULARY, generator=generator, dtype=torch.float64)
    alone = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows])
    expected = gradients(model, alone, direction)

    use_packed_attention(model)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    boundaries = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    packed = model(
        input_ids=torch.cat(rows)[None],
        position_ids=torch.cat([torch.arange(n) for n in LENGTHS])[None],
        cu_seqlens=Packing.of(boundaries, torch.device("cpu")),
        use_cache=False,
    ).logits[0]
    found = gradients(model, packed, direction)

    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-11)
    assert found.keys() == expected.keys()
    tolerance = 1e-6 if name.startswith("gemma") else 1e-9  # Gemma's norm takes its gradient in float32
    for parameter, gradient in expected.items():
        assert (found[parameter] - gradient).norm() <= tolerance * gradient.norm() + 1e-12, parameter


def test_every_family_that_may_run_packed_is_tested():
    packed = {family.name for family in FAMILIES.values() if not family.padded_because}
    assert packed == {name for name, _ in MODELS}


def test_a_family_nobody_tested_runs_padded():
    config = AutoConfig.for_model("gpt_neox")
    assert not runs_packed(config, wanted=True)
