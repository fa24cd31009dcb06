"""The decoders against the model's own forward over whole sequences."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.weight_layouts import use_layout
from verl.config.rollout import RolloutConfig
from verl.models.decoder import ragged_attention
from verl.models.decoder.device_graphs import GraphedDecode, capture_sizes
from verl.models.decoder.generic import GenericDecoder
from verl.models.decoder.lean_weights import why_not_lean
from verl.models.decoder.weight_layouts import WeightLayout
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import NativeEngine

TINY = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LEAN = {
    "qwen3, tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, untied, odd head size": ("qwen3", {"head_dim": 12, "tie_word_embeddings": False}),
    "qwen2, biases": ("qwen2", {}),
    "qwen2, sliding layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "mistral, sliding everywhere": ("mistral", {"sliding_window": 6}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn, gelu, biases, no groups": (
        "llama",
        {
            "rope_parameters": YARN, "hidden_act": "gelu", "attention_bias": True, "mlp_bias": True,
            "num_key_value_heads": 4,
        },
    ),
}  # fmt: skip
GENERIC = {
    "gemma2: soft caps, sliding": ("gemma2", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "phi3": ("phi3", {}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gpt2: learned positions": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "llama, dynamic rope": ("llama", {"rope_parameters": DYNAMIC}),
    "qwen3_next: recurrent layers": (
        "qwen3_next",
        {
            "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 4,
        },
    ),
}  # fmt: skip


def tiny_model(family: str, extra: dict) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**TINY, **extra})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # biases and norms away from their neutral start, logits away from uniform
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def requests(lengths: list[int], n: int, new: int) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(5)
    params = SamplingParams(temperature=0.8, n=n, max_tokens=new)
    return [
        GenerationRequest(i, torch.randint(3, 61, (length,), generator=generator).tolist(), params)
        for i, length in enumerate(lengths)
    ]


def largest_error(model: PreTrainedModel, asked: list[GenerationRequest], got: list) -> float:
    """Largest difference between the completions' log-probs and the model's own, one whole sequence at a time."""
    worst = 0.0
    for request, completions in zip(asked, got, strict=True):
        for completion in completions:
            assert completion.token_ids
            ids = torch.tensor([request.prompt_ids + completion.token_ids])
            with torch.no_grad():
                logits = model(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
            expected = (logits / request.sampling.temperature).log_softmax(-1)
            expected = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            worst = max(worst, float((expected - torch.tensor(completion.logprobs)).abs().max()))
    return worst


LAYOUTS = [WeightLayout(torch.float32, merged, onednn) for merged in (True, False) for onednn in (True, False)]
CASES = [*((name, layout) for name in LEAN for layout in LAYOUTS), *((name, LAYOUTS[-1]) for name in GENERIC)]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=[f"{name}, {layout.name}" for name, layout in CASES])
def test_logprobs_equal_the_models_own_on_every_family(
    name: str, layout: WeightLayout, monkeypatch: pytest.MonkeyPatch
):
    use_layout(monkeypatch, layout.merged, layout.onednn)
    family, extra = {**LEAN, **GENERIC}[name]
    model = tiny_model(family, extra)
    assert bool(why_not_lean(model)) == (name in GENERIC)
    config = RolloutConfig(dtype="float32", prompt_length=24, response_length=20, max_num_seqs=5)
    engine = NativeEngine(config, model)
    asked = requests([3, 17, 24, 9, 3, 24], n=2, new=20)
    got = engine.core.run(asked, tuple(range(2, 9)))
    assert largest_error(model, asked, got) < 1e-5
    lengths = {len(c.token_ids) for group in got for c in group}
    assert len(lengths) > 1, "all completions are equally long: rows never moved"


def test_long_runs_shift_the_shared_column_without_changing_anything():
    model = tiny_model("qwen3", {"head_dim": 16})
    config = RolloutConfig(dtype="float32", max_model_len=60, max_num_seqs=4)
    engine = NativeEngine(config, model)
    asked = [
        replace(request, sampling=replace(request.sampling, max_tokens=4 + request.request_id % 7))
        for request in requests([4, 50, 7, 30, 45, 5, 20, 8, 11, 40] * 3, n=3, new=10)
    ]
    shifts = []
    shift = engine.core._shift
    engine.core._shift = lambda by: (shifts.append(by), shift(by))
    got = engine.core.run(asked, ())
    assert largest_error(model, asked, got) < 1e-5
    assert min(shifts) < 0


def test_a_longer_prompt_that_joins_moves_the_column_to_the_right():
    model = tiny_model("qwen3", {"head_dim": 16})
    engine = NativeEngine(RolloutConfig(dtype="float32", max_model_len=60, max_num_seqs=4), model)
    first, second = requests([3, 40], n=1, new=12)
    states = [engine.core.submit(first, ())]
    engine.core.step()
    states.append(engine.core.submit(second, ()))
    while not all(state.done for state in states):
        engine.core.step()
    assert largest_error(model, [first, second], [state.result() for state in states]) < 1e-5


def test_the_lean_path_reads_the_modules_own_tensors(monkeypatch: pytest.MonkeyPatch):
    use_layout(monkeypatch, onednn=False)
    model = tiny_model("llama", {}).bfloat16()
    engine = NativeEngine(RolloutConfig(dtype="bfloat16"), model)
    weights = engine.decoder.weights
    assert weights.copied_bytes == 0
    assert weights.layers[1].down.weight.data_ptr() == model.model.layers[1].mlp.down_proj.weight.data_ptr()


@pytest.mark.parametrize("name", LEAN)
def test_bfloat16_in_the_kernels_layout_rounds_no_more_than_in_place(name: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny_model(*LEAN[name]).bfloat16()
    exact = copy.deepcopy(model).double()
    asked = requests([3, 17, 24, 9], n=2, new=20)

    def error(onednn: bool, merged: bool) -> float:
        use_layout(monkeypatch, merged, onednn)
        engine = NativeEngine(RolloutConfig(dtype="bfloat16", prompt_length=24, response_length=20), model)
        return largest_error(exact, asked, engine.core.run(asked))

    in_place = error(False, False)
    assert error(True, False) < 1.5 * in_place + 0.01
    assert error(True, True) < 1.5 * in_place + 0.01


def test_padding_prompts_to_one_width_does_not_reach_their_logits():
    model = tiny_model("mistral", {"sliding_window": 6})
    config = RolloutConfig(dtype="float32", prompt_length=24, response_length=8)
    asked = requests([2, 24, 13], n=1, new=8)
    together = NativeEngine(config, model).core.run(asked)
    alone = [NativeEngine(config, model).core.run([request])[0] for request in asked]
    assert [c[0].token_ids for c in together] == [c[0].token_ids for c in alone]


def more_samples_than_rows(family: str, monkeypatch: pytest.MonkeyPatch):
    """A model, twelve samples of prompts of several lengths, and a config with seven rows for them."""
    use_layout(monkeypatch)
    asked = requests([3, 17, 24, 9, 3, 24], n=2, new=20)
    config = RolloutConfig(dtype="float32", prompt_length=24, response_length=20, max_num_seqs=7)
    return tiny_model(family, {"sliding_window": 6}), asked, config


def flash_by_loops(q, keys, values, queries, begins, counts, most, scale):
    """What the varlen flash kernel computes, row by row."""
    rows = [slice(begin, begin + count) for begin, count in zip(begins.tolist(), counts.tolist(), strict=False)]
    assert queries.tolist() == list(range(len(rows) + 1)) and int(counts.max()) <= most
    parts = [
        F.scaled_dot_product_attention(
            q[b, None, :, None], *(x[at].transpose(0, 1)[None] for x in (keys, values)), scale=scale, enable_gqa=True
        )
        for b, at in enumerate(rows)
    ]
    return torch.cat(parts).squeeze(2)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_rows_read_from_their_own_columns_on_give_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch):
    model, asked, config = more_samples_than_rows(family, monkeypatch)
    masked = NativeEngine(config, model).core.run(asked, tuple(range(2, 9)))
    monkeypatch.setattr(ragged_attention, "flash_varlen", flash_by_loops)
    engine = NativeEngine(config, model)
    engine.decoder.attends_ragged = True
    assert tokens_of(engine.core.run(asked, tuple(range(2, 9)))) == tokens_of(masked)

    engine.decoder.graphs = GraphedDecode(engine.decoder, [2, 4, 8], lambda: lambda step, warm_up: step)
    engine.core.free_cache()
    engine.core._ensure_rows(8)
    assert tokens_of(engine.core.run(asked, tuple(range(2, 9)))) == tokens_of(masked)


def tokens_of(completions):
    return [c.token_ids for group in completions for c in group]


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_graphed_steps_pad_the_batch_and_give_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch):
    model, asked, config = more_samples_than_rows(family, monkeypatch)
    eager = NativeEngine(config, model).core.run(asked, tuple(range(2, 9)))

    engine = NativeEngine(config, model)
    captured, warmed = [], []

    def capture(step, warm_up):  # a device would record the step here; the shapes and the static inputs are the same
        captured.append(step().shape[0])
        warmed.append(warm_up)
        return step

    engine.decoder.graphs = GraphedDecode(engine.decoder, [2, 4, 8], lambda: capture)
    engine.core._ensure_rows(8)
    got = engine.core.run(asked, tuple(range(2, 9)))
    assert tokens_of(got) == tokens_of(eager)
    assert sorted(set(captured)) == [2, 4, 8] and len(captured) <= 6

    once = len(captured)
    engine.core.free_cache()  # a sleeping engine keeps no graphs; the next ones need no workspaces
    engine.core._ensure_rows(8)
    assert engine.core.run(asked, tuple(range(2, 9))) == got
    assert captured[once:] == captured[:once] and warmed == [True] * once + [False] * once


def test_graphs_are_captured_again_only_when_tensors_moved():
    model = tiny_model("llama", {}).bfloat16()
    engine = NativeEngine(RolloutConfig(dtype="float16", prompt_length=8, response_length=8), model)
    engine.decoder.allocate(2, 64)
    before = engine.decoder.addresses()
    engine.decoder.refresh(model, 1)
    assert engine.decoder.addresses() == before
    engine.decoder.allocate(4, 64)
    assert engine.decoder.addresses() != before


def test_recurrent_models_take_prompts_of_one_length_at_a_time():
    decoders = {name: GenericDecoder(tiny_model(*GENERIC[name])) for name in GENERIC}
    assert [name for name, decoder in decoders.items() if not decoder.supports_padded_prompts] == [
        "qwen3_next: recurrent layers"
    ]


def test_capture_sizes_follow_the_config_and_the_rows():
    assert capture_sizes(None, 48) == [1, 2, 4, 8, 16, 32, 48]
    assert capture_sizes([8, 512, 64], 48) == [8, 48]
