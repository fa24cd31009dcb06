"""Families with layers that carry a state: trained padded, they give what `transformers` gives for each sequence alone.

The oracle is the library's own model in float64, one sequence at a time, and the loss written out.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tests.conftest import ROOT
from tests.engine_cases import SHAPE, VOCABULARY, SquaredLogprob, build_engine, random_batch, save_tiny_model
from tests.models.test_transformer import EXPERTS, STATE
from tests.tiers import of_pinned, soak
from verl.models.flops import FlopCounts
from verl.utils.errors import ConfigError

SSM = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 2, "pad_token_id": 0}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 4}
LINEAR = {**STATE, "linear_num_key_heads": 4}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
MODELS = {
    "bamba": {**SHAPE, **MAMBA_2, "attn_layer_indices": [1]},
    "falcon_h1": {**SHAPE, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 4,
                  "lm_head_multiplier": 0.3},
    "falcon_mamba": {**SSM, "state_size": 4},
    "granitemoehybrid": {**SHAPE, **MAMBA_2, "layer_types": ["mamba", "attention"], "num_local_experts": 4,
                         "num_experts_per_tok": 2, "shared_intermediate_size": 48, "logits_scaling": 3.0},
    "inkling_text": {**SHAPE, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4,
                     "rel_extent": 16, "sliding_window_size": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
                     "n_shared_experts": 1, "moe_intermediate_size": 24},
    "jamba": {**SHAPE, **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
              "mamba_dt_rank": 4},
    "kimi_linear": {**SHAPE, **MIXED, "num_key_value_heads": 4, "moe_intermediate_size": 24, "kv_lora_rank": 16,
                    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_local_experts": 4,
                    "num_experts_per_tok": 2, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": {**SHAPE, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {**SHAPE, **EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba": {**SSM, "state_size": 4},
    "mamba2": {**SSM, "num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 4, "expand": 2},
    "minimax": {**SHAPE, **MIXED, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 4},
    "nemotron_h": {**SHAPE, "layers_block_type": ["mamba", "attention", "mamba", "moe"], "num_hidden_layers": 4,
                   "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 4,
                   "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                   "moe_shared_expert_intermediate_size": 24},
    "olmo_hybrid": {**SHAPE, **LINEAR},
    "qwen3_5_moe_text": {**SHAPE, **EXPERTS, "shared_expert_intermediate_size": 24, **STATE},
    "qwen3_5_text": {**SHAPE, **STATE},
    "qwen3_next": {**SHAPE, **EXPERTS, "shared_expert_intermediate_size": 24, **STATE},
    "qwen4_exp_text": {**SHAPE, **EXPERTS, **STATE, "shared_expert_intermediate_size": 24, "hc_count": 2,
                       "hc_lowrank": 8,
                       "ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1,
                       "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16,
                       "indexer_compress_ratio": 2},
    "recurrent_gemma": {**SHAPE, "block_types": ["recurrent", "attention"], "attention_window_size": 4},
    "rwkv": {**SSM, "context_length": 64},
    "xlstm": {**SSM, "num_heads": 2, "chunk_size": 4, "mode": "train"},
    "zamba": {**SHAPE, "attention_head_dim": 16, "n_mamba_heads": 2, "mamba_d_state": 4, "mamba_dt_rank": 4,
              "layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4, "num_key_value_heads": 4},
    "zamba2": {**SHAPE, "attention_head_dim": 16, "n_mamba_heads": 8, "mamba_d_state": 8, "chunk_size": 4,
               "layers_block_type": ["mamba", "hybrid"], "num_key_value_heads": 4, "mamba_headdim": 8},
    "zaya": {**SHAPE, **EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip
MODELS = {name: values for name, values in MODELS.items() if name in CONFIG_MAPPING}  # kimi_linear: transformers 5.17


def engine_outputs(folder, batch, packed):
    """(log-probs, gradients by name) of the training engine."""
    engine = build_engine(folder, model={"use_remove_padding": packed})
    engine.forward_backward(batch, SquaredLogprob())
    return engine.forward(batch)["logprobs"], {n: g.clone() for n, g in engine.weights.local_gradients()}


def library_outputs(folder, batch):
    """The same of `transformers`, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model.set_experts_implementation("eager")
    logprobs, loss = [], 0.0
    for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        tokens = batch["tokens"][start:end]
        log_p = torch.log_softmax(model(input_ids=tokens[None], use_cache=False).logits[0], -1)
        chosen = torch.cat([log_p.new_zeros(1), log_p[:-1].gather(1, tokens[1:, None])[:, 0]])
        entropy = torch.cat([log_p.new_zeros(1), -(log_p.exp() * log_p).sum(-1)[:-1]])
        squares = (chosen - batch["targets"][start:end]) ** 2 - 0.3 * entropy
        loss = loss + (squares * batch["loss_weights"][start:end])[batch["loss_mask"][start:end]].sum()
        logprobs.append(chosen.detach() * batch["loss_mask"][start:end])
    loss.backward()
    return torch.cat(logprobs), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


REFUSED = {name: MODELS[name] for name in ("inkling_text", "recurrent_gemma", "xlstm")}  # by what they do to logits
TRAINED = [name for name in MODELS if name not in REFUSED]
IN_CI = ("bamba", "falcon_h1", "lfm2", "mamba2", "minimax", "nemotron_h")


@pytest.mark.parametrize("name", [*IN_CI, *soak(name for name in TRAINED if name not in IN_CI)])
def test_a_family_with_a_state_trains_padded_as_each_sequence_alone(tmp_path, name):
    folder = save_tiny_model(tmp_path, AutoConfig.for_model(name, **MODELS[name]))
    batch = random_batch()
    logprobs, gradients = engine_outputs(folder, batch, packed=False)
    expected, expected_gradients = library_outputs(folder, batch)
    torch.testing.assert_close(logprobs.double(), expected.double(), rtol=1e-5, atol=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in expected_gradients.items():
        difference = (gradients[parameter] - gradient).norm().item()
        assert difference <= 1e-5 * gradient.norm().item() + 1e-7, parameter


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_whose_logits_are_more_than_a_product_is_refused_in_one_line(tmp_path, name):
    folder = save_tiny_model(tmp_path, AutoConfig.for_model(name, **REFUSED[name]))
    with pytest.raises(ConfigError, match=f"'{name}' scales or bounds its logits .* train another") as caught:
        build_engine(folder)
    assert "\n" not in str(caught.value)


def built_on_meta(name):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **MODELS[name]))


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_counted_whatever_the_layers_are(name):
    counts = FlopCounts.of(built_on_meta(name))
    assert counts.update([5, 9], 10) > 0 and counts.attention_length > 0


def test_only_layers_that_attend_to_pairs_cost_by_the_pair():
    names = ("bamba", "mamba2", "minimax", "nemotron_h")
    costs = {name: FlopCounts.of(built_on_meta(name)).attention for name in names}
    assert [len(costs[name]) for name in names] == [1, 0, 1, 1]
    assert costs["bamba"][0].per_pair == 4 * SHAPE["num_attention_heads"] * SHAPE["head_dim"]


WORDS = r"has_previous_state|recurrent_(state|gate)|slope_rate|mlstm|rwkv_linear_attention"


def test_every_family_of_the_library_with_such_layers_is_in_the_list():
    if f"transformers=={transformers.__version__}" not in (ROOT / "constraints.txt").read_text().splitlines():
        pytest.skip("the list is that of the release that constraints.txt pins")
    found = set()
    for config, model in AutoModelForCausalLM._model_mapping.items():
        kind = model[0] if isinstance(model, tuple) else model
        if re.search(WORDS, Path(inspect.getfile(kind)).read_text()):
            found.add(config.model_type)
    assert found - WHOLE_MODELS == MODELS.keys()


WHOLE_MODELS = {"qwen3_5", "qwen3_5_moe", "qwen4_exp"}  # of pictures and text, of which the text part is trained


@of_pinned("transformers")
def test_the_page_lists_what_trains_and_what_is_refused():
    page = " ".join(Path("docs/train/models.md").read_text().split())
    assert f"train padded: {', '.join(f'`{name}`' for name in sorted(TRAINED))}" in page
    assert f"are refused: {', '.join(f'`{name}`' for name in sorted(REFUSED))}" in page
