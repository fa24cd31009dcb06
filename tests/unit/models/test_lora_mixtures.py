"""LoRA in mixtures of experts: experts that are one tensor get none, every linear layer below the head does."""

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine_cases import SHAPE, SquaredLogprob, build_engine, random_batch, save_tiny_model
from tests.unit.models.test_lora import LORA, build, trained

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "head_dim": 4,
}  # fmt: skip
MLP = ("gate_proj", "up_proj", "down_proj")
FAMILIES = {  # settings, and the linear layers besides attention
    "all experts": ("qwen3_moe", EXPERTS, set()),
    "one dense": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [0]}, {f"model.layers.0.mlp.{m}" for m in MLP}),
    "deepseek": (
        "deepseek_v3",
        DEEPSEEK,
        {f"model.layers.{place}.{m}" for place in ("0.mlp", "1.mlp.shared_experts") for m in MLP},
    ),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_all_linear_adapts_dense_layers_and_passes_over_experts_that_are_one_tensor(tmp_path, case):
    family, changes, dense = FAMILIES[case]
    engine = build_engine(save_tiny_model(tmp_path, AutoConfig.for_model(family, **{**SHAPE, **changes})), model=LORA)
    engine.forward_backward(random_batch(), SquaredLogprob())  # in float64, which the grouped kernel has not
    adapted = {name.partition(".lora_")[0] for name in trained(engine)}
    assert {name for name in adapted if ".self_attn." not in name} == dense
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SHAPE, **changes}))
    linear = {name for name, m in model.named_modules() if type(m) is torch.nn.Linear and name != "lm_head"}
    assert adapted == linear and any(".self_attn." in name for name in adapted)


def test_excluded_dense_layers_have_none(tmp_path):
    folder = save_tiny_model(tmp_path, AutoConfig.for_model("deepseek_v3", **{**SHAPE, **DEEPSEEK}))
    engine = build_engine(folder, model={**LORA, "exclude_modules": ["up_proj"]})
    leaves = {name.partition(".lora_")[0].rpartition(".")[2] for name in trained(engine)}
    assert {"gate_proj", "down_proj"} <= leaves and "up_proj" not in leaves


def test_adapters_of_dense_layers_go_to_peft_and_come_back(tmp_path):
    folder = save_tiny_model(tmp_path / "model", AutoConfig.for_model("deepseek_v3", **{**SHAPE, **DEEPSEEK}))
    engine = build(folder, dtype="fp32")
    engine.save(tmp_path / "saved", ("model", "hf_model"))
    adapters = tmp_path / "saved" / "lora_adapter"
    base, plain, merged = (
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval()
        for f in (folder, folder, tmp_path / "saved" / "huggingface")
    )
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        loaded = peft.PeftModel.from_pretrained(base, str(adapters)).eval()(input_ids=ids).logits
        expected, without = merged(input_ids=ids).logits, plain(input_ids=ids).logits
    torch.testing.assert_close(loaded, expected, rtol=0, atol=1e-5)
    assert (loaded - without).abs().max() > 1e-2
    again = build_engine(folder, "fp32", model={"lora_adapter_path": str(adapters), "lora_alpha": 10})
    assert trained(again).keys() == trained(engine).keys()
    assert all(torch.equal(trained(again)[name], value) for name, value in trained(engine).items())
    assert any(".mlp." in name for name in load_file(adapters / "adapter_model.safetensors"))
