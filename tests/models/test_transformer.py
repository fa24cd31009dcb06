"""Every model family: packed and padded runs give what each sequence gives alone. To add one, add a line to MODELS.

The oracle is attention written out in float64, one sequence at a time, through the model's own forward.
"""

import asyncio
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine_cases import SHAPE, VOCABULARY
from tests.tiers import of_pinned
from verl.commands.certify.float64 import keep_float64
from verl.config.rollout import RolloutConfig
from verl.models.attention.packing import Packing
from verl.models.registry import FAMILIES, Family, capability_table, make_packed, register_family, runs_packed
from verl.plugin.library_versions import give_weights_one_dtype
from verl.utils.errors import PluginError
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import NativeEngine

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 24}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
STATE = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
DEEPSEEK = {
    **ROUTED, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "head_dim": 4, "num_key_value_heads": 4,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = {"sliding_window": 4}

MODELS = [
    ("llama", {}),
    ("mistral", {"sliding_window": None}),
    ("mistral", WINDOW),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen2_moe", SHARED_EXPERT),
    ("qwen3_moe", EXPERTS),
    ("qwen3_next", {**SHARED_EXPERT, **STATE}),
    ("qwen3_5_text", STATE),
    ("qwen3_5_moe_text", {**SHARED_EXPERT, **STATE}),
    ("gemma", {"num_key_value_heads": 1}),
    ("gemma2", {"query_pre_attn_scalar": 8, **WINDOW}),
    ("gemma3_text", {"query_pre_attn_scalar": 8, **WINDOW}),
    ("phi", {}),
    ("phi3", WINDOW),
    ("phimoe", {**LOCAL_EXPERTS, "sliding_window": None}),
    ("deepseek_v2", {**DEEPSEEK, "topk_method": "greedy"}),
    ("deepseek_v3", DEEPSEEK),
    ("gpt_oss", {**LOCAL_EXPERTS, **WINDOW, "rope_parameters": YARN}),
    ("mixtral", {**LOCAL_EXPERTS, "sliding_window": None}),
    ("olmo2", {}),
    ("olmo3", WINDOW),
    ("olmoe", EXPERTS),
    ("glm4", {}),
    ("glm4_moe", ROUTED),
    ("cohere2", WINDOW),
    ("granite", {}),
    ("starcoder2", {"sliding_window": None}),
    ("smollm3", {}),
    ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8}),
    ("jamba", {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}),
    ("bloom", {}),
]
each_model = pytest.mark.parametrize(("name", "changes"), MODELS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(MODELS)])
LENGTHS = (7, 1, 5, 5, 12)


def build(name: str, changes: dict, dtype: torch.dtype = torch.float64, attention: str | None = "plain_test"):
    config = AutoConfig.for_model(name, **{**SHAPE, **changes})
    config._experts_implementation = "eager"  # the grouped kernel has no float64
    torch.manual_seed(0)
    attention = "eager" if name == "bloom" else attention
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()
    give_weights_one_dtype(model, dtype)
    with torch.no_grad():  # biases, norms and sinks away from their neutral start
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def rows_and_direction() -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in LENGTHS]
    return rows, torch.randn(sum(LENGTHS), VOCABULARY, generator=generator, dtype=torch.float64)


def gradients(model: torch.nn.Module, logits: torch.Tensor, direction: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logits * direction).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def run_alone(model, rows):
    return torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows])


def run_packed(model, rows):
    boundaries = torch.tensor([0, *torch.tensor([len(r) for r in rows]).cumsum(0).tolist()])
    return model(
        input_ids=torch.cat(rows)[None],
        position_ids=torch.cat([torch.arange(len(row)) for row in rows])[None],
        cu_seqlens=Packing.of(boundaries, torch.device("cpu")),
        use_cache=False,
    ).logits[0]


def run_padded(model, rows):
    real = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    ids = pad_sequence(rows, batch_first=True)
    return model(input_ids=ids, attention_mask=real.long(), use_cache=False).logits[real]


def check_run(name: str, changes: dict, run, checkpointing: bool) -> None:
    model = build(name, changes)
    keep_float64(model)
    rows, direction = rows_and_direction()
    alone = run_alone(model, rows)
    expected = gradients(model, alone, direction)
    if runs_packed(model.config, wanted=True):
        make_packed(model)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    found_logits = run(model, rows)
    found = gradients(model, found_logits, direction)

    tolerance = 1e-9
    assert (found_logits - alone).norm() <= tolerance * alone.norm()
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        difference = (found[parameter] - gradient).norm().item()
        assert difference <= tolerance * gradient.norm().item() + 1e-12, parameter


@each_model
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
def test_packed_logits_and_gradients_equal_those_of_each_sequence_alone(name, changes, checkpointing):
    if FAMILIES[name].padded_because:
        pytest.skip(f"{name} runs padded: {FAMILIES[name].padded_because}")
    check_run(name, changes, run_packed, checkpointing)


@each_model
def test_padded_logits_and_gradients_equal_those_of_each_sequence_alone(name, changes):
    check_run(name, changes, run_padded, checkpointing=False)


@each_model
def test_the_native_rollout_samples_with_the_logprobs_of_each_sequence_alone(name, changes):
    model = build(name, changes, torch.float32, attention=None)
    if runs_packed(model.config, wanted=True):
        make_packed(model)
    oracle = build(name, changes, torch.float32)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3]]
    engine = NativeEngine(RolloutConfig(dtype="float32", prompt_length=8, response_length=6, max_num_seqs=4), model)

    async def complete():
        sampling = SamplingParams(max_tokens=6, ignore_eos=True, seed=3)
        return await asyncio.gather(
            *(engine.generate(GenerationRequest(i, p, sampling)) for i, p in enumerate(prompts))
        )

    for prompt, [completion] in zip(prompts, asyncio.run(complete()), strict=True):
        tokens = torch.tensor(prompt + completion.token_ids)
        with torch.no_grad():
            logprobs = oracle(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
        expected = logprobs[len(prompt) - 1 : -1].gather(1, tokens[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=1e-3, atol=2e-4)


def test_every_family_has_a_line_in_this_test():
    assert set(FAMILIES) == {name for name, _ in MODELS}


def test_a_family_nobody_tested_runs_padded():
    assert not runs_packed(AutoConfig.for_model("gpt_neox"), wanted=True)


def test_a_user_adds_a_family_with_one_line(monkeypatch):
    monkeypatch.setattr("verl.models.registry.FAMILIES", dict(FAMILIES))
    register_family(Family("gpt_neox", "Pythia"))
    register_family(Family("gpt_neox", "Pythia"))  # a module may be imported twice
    assert runs_packed(AutoConfig.for_model("gpt_neox"), wanted=True)
    with pytest.raises(PluginError, match="registered already, differently"):
        register_family(Family("llama", "mine"))
    with pytest.raises(PluginError, match=r"trait 'windows'.*window"):
        register_family(Family("falcon", traits=("windows",)))


@of_pinned("transformers")
def test_the_documented_table_is_that_of_the_registry():
    page = (Path(__file__).parents[2] / "docs/train/models.md").read_text()
    assert capability_table() in page
