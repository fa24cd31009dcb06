"""LoRA trains what W + s B A with leaves A and B would, and is that model wherever it leaves the engine."""

import asyncio
import dataclasses

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.engine_cases import (
    SquaredLogprob,
    SquaredValue,
    build_engine,
    naive_logprobs,
    random_batch,
    save_tiny_model,
    tiny_qwen3,
)
from tests.ranks import run_ranks
from verl.commands.certify.float64 import keep_float64
from verl.commands.merge import main as merge_main
from verl.config import load_config
from verl.config.rollout import RolloutConfig
from verl.data.micro_batches import MicroBatching
from verl.trainer.ppo.rollout_setup import build_standalone_engine
from verl.utils.errors import CheckpointError, ConfigError
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import NativeEngine

RANK, ALPHA = 4, 10
LORA = {"lora_rank": RANK, "lora_alpha": ALPHA}
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), tiny_qwen3(attention_bias=True))


def build(folder, value_head=False, model=None, **how):
    """An engine whose adapters are away from their start, where B is 0."""
    engine = build_engine(folder, value_head=value_head, model={**LORA, **(model or {})}, **how)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trained(engine).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    engine.weights.copy_to_model()
    return engine


def trained(engine) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in engine.weights.named_parameters if parameter.requires_grad}


def plain_model(folder, value_head=False):
    kind = AutoModelForTokenClassification if value_head else AutoModelForCausalLM
    labels = {"num_labels": 1} if value_head else {}
    model = kind.from_pretrained(folder, dtype=torch.float64, attn_implementation="plain_test", **labels).eval()
    keep_float64(model)
    return model


def written_out(model, leaves) -> dict[str, torch.Tensor]:
    """The parameters of a plain model with W + s B A in the place of W."""
    weights = dict(model.named_parameters())
    for name in leaves:
        if ".lora_A." in name:
            layer = name.partition(".lora_A.")[0]
            b, a = leaves[f"{layer}.lora_B.default.weight"], leaves[name]
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"].detach() + ALPHA / RANK * (b @ a)
        elif ".lora_" not in name:
            weights[name] = leaves[name]
    return weights


def loss_written_out(model, leaves, batch, value_head=False):
    """The loss of a batch, one sequence at a time, by autograd through the product B A."""
    weights, total = written_out(model, leaves), 0.0
    run = lambda **inputs: functional_call(model, weights, (), inputs)  # noqa: E731
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        tokens, columns = batch["tokens"][start:end], {n: c[start:end] for n, c in batch.token_columns.items()}
        if value_head:
            values = run(input_ids=tokens[None], use_cache=False).logits[0, :, 0]
            outputs = {"values": torch.cat([values.new_zeros(1), values[:-1]])}
            losses, _ = SquaredValue()(outputs, columns)
        else:
            logp = naive_logprobs(run, tokens)[:-1]
            outputs = {"logprobs": logp.gather(1, tokens[1:, None])[:, 0], "entropy": -(logp.exp() * logp).sum(-1)}
            outputs = {name: torch.cat([value.new_zeros(1), value]) for name, value in outputs.items()}
            losses, _ = SquaredLogprob()(outputs, columns)
        total = total + (losses * columns["loss_mask"]).sum()
    return total


@pytest.mark.parametrize("value_head", [False, True], ids=["policy", "critic"])
@pytest.mark.parametrize(
    "how",
    [{}, {"use_remove_padding": False}, {"enable_gradient_checkpointing": False}, {"target_modules": ["q_proj"]}],
    ids=["packed", "padded", "stored", "queries"],
)
def test_gradient_and_optimiser_step_equal_those_of_the_product_written_out(folder, value_head, how):
    engine, batch = build(folder, value_head, model=how, optim={"lr": 1e-2, "clip_grad": 0.05}), random_batch()
    model = plain_model(folder, value_head)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in trained(engine).items()}
    wanted = set(how.get("target_modules", LINEAR))
    assert {name.split(".")[-4] for name in leaves if ".lora_" in name} == wanted
    assert any("score" in name for name in leaves) == value_head

    loss_written_out(model, leaves, batch, value_head).backward()
    engine.forward_backward(batch, SquaredValue() if value_head else SquaredLogprob(), MicroBatching(max_tokens=16))
    for name, parameter in trained(engine).items():
        torch.testing.assert_close(parameter.grad, leaves[name].grad, rtol=1e-9, atol=1e-12)

    optimizer = torch.optim.AdamW(leaves.values(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.01)
    norm = torch.nn.utils.clip_grad_norm_(leaves.values(), 0.05)
    optimizer.step()
    assert engine.optim_step().values()["grad_norm"] == pytest.approx(float(norm))
    for name, parameter in trained(engine).items():
        torch.testing.assert_close(parameter.detach(), leaves[name].detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_reference_is_the_base_model_bit_for_bit(folder, dtype):
    base, engine, batch = build_engine(folder, dtype), build(folder, dtype=dtype), random_batch()
    expected = base.forward(batch)["logprobs"]
    assert not torch.equal(engine.forward(batch)["logprobs"], expected)
    engine.forward_backward(batch, SquaredLogprob())
    engine.optim_step()
    with engine.disable_adapter():
        assert torch.equal(engine.forward(batch)["logprobs"], expected)
    engine.forward_backward(batch, SquaredLogprob())  # and its adapters still learn
    assert all(parameter.grad.abs().sum() > 0 for parameter in trained(engine).values())


def test_new_adapters_change_nothing_and_follow_the_seed(folder):
    batch = random_batch()
    engine, again, other = (build_engine(folder, "fp32", model=LORA, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(engine.forward(batch)["logprobs"], build_engine(folder, "fp32").forward(batch)["logprobs"])
    first, second, third = (next(iter(trained(e).values())) for e in (engine, again, other))
    assert torch.equal(first, second) and not torch.equal(first, third)


def test_the_base_may_be_in_bfloat16_while_adapters_learn_in_float32(folder):
    engine = build(folder, dtype="bf16", optim={"lr": 1e-6})
    before = {name: value.clone() for name, value in trained(engine).items()}
    assert {value.dtype for value in before.values()} == {torch.float32}
    assert {p.dtype for _, p in engine.weights.named_parameters if not p.requires_grad} == {torch.bfloat16}
    engine.forward_backward(random_batch(), SquaredLogprob())
    engine.optim_step()
    assert all(not torch.equal(before[name], value) for name, value in trained(engine).items())
    assert {tensor.dtype for _, tensor in engine.export_weights()} == {torch.bfloat16}


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 20)[None], use_cache=False).logits


@pytest.mark.parametrize("value_head", [False, True], ids=["policy", "critic"])
def test_the_adapter_folder_is_read_by_pefts_own_loader(folder, tmp_path, value_head):
    engine = build(folder, value_head)
    engine.save(tmp_path / "saved", ("model",))
    model = peft.PeftModel.from_pretrained(plain_model(folder, value_head), tmp_path / "saved" / "lora_adapter")
    torch.testing.assert_close(logits_of(model), logits_of(engine.model), rtol=1e-9, atol=1e-11)
    found = dict(model.merge_and_unload().named_parameters())
    for name, tensor in engine.export_weights():
        name = name.replace("score.", "score.modules_to_save.default.") if name not in found else name
        torch.testing.assert_close(tensor, found[name].detach(), rtol=1e-12, atol=1e-12)


def test_what_is_published_apart_has_the_names_of_the_folder_and_makes_the_merged_weights(folder, tmp_path):
    engine = build(folder)
    engine.save(tmp_path / "saved", ("model",))
    apart, alone = dict(engine.export_adapters(True)), dict(engine.export_adapters(False))
    assert alone.keys() == load_file(tmp_path / "saved" / "lora_adapter" / "adapter_model.safetensors").keys()
    base = dict(plain_model(folder).named_parameters())
    assert apart.keys() == base.keys() | alone.keys()
    for name, merged in engine.export_weights():
        assert torch.equal(apart[name], base[name])
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in alone:
            product = alone[f"{layer}.lora_B.weight"] @ alone[f"{layer}.lora_A.weight"]
            torch.testing.assert_close(base[name] + product, merged, rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(merged, base[name])


def test_the_merged_folder_loads_in_transformers(folder, tmp_path):
    engine = build(folder, dtype="fp32")
    engine.save(tmp_path / "saved", ("hf_model",))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "huggingface", attn_implementation="plain_test")
    torch.testing.assert_close(logits_of(model), logits_of(engine.model), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits_of(plain_model(folder)).float(), logits_of(model), rtol=1e-2)
    plain = {name for name, _ in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}
    assert {name for name, _ in engine.export_weights()} == plain


def test_adapters_saved_before_are_where_training_starts(folder, tmp_path):
    engine = build(folder, dtype="fp32")
    engine.save(tmp_path / "saved", ("model",))
    path = tmp_path / "saved" / "lora_adapter"
    started = build_engine(folder, "fp32", model={"lora_adapter_path": str(path)})
    expected = trained(engine)
    assert trained(started).keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in trained(started).items())
    batch = random_batch()
    assert torch.equal(started.forward(batch)["logprobs"], engine.forward(batch)["logprobs"])
    with pytest.raises(ConfigError, match=r"lora_rank=8, but the adapters in .* have rank 4"):
        build_engine(folder, model={"lora_rank": 8, "lora_adapter_path": str(path)})
    wider = save_tiny_model(tmp_path / "wider", tiny_qwen3(intermediate_size=40))
    with pytest.raises(CheckpointError, match=r"6 tensors differ: .* is \(4, 48\), not"):
        build_engine(wider, model={"lora_adapter_path": str(path)})


@pytest.mark.parametrize("only_adapters", [False, True], ids=["all", "adapters"])
def test_a_resumed_engine_goes_on_bit_for_bit(folder, tmp_path, only_adapters):
    def learn(engine, seed):
        engine.forward_backward(random_batch(seed), SquaredLogprob())
        engine.optim_step()

    def lora_engine(seed):
        engine = build_engine(folder, "fp32", model=LORA, seed=seed)
        engine.checkpoint_config = dataclasses.replace(engine.checkpoint_config, save_lora_only=only_adapters)
        return engine

    first = lora_engine(0)
    learn(first, 0)
    first.save(tmp_path / "saved")
    learn(first, 1)
    second = lora_engine(5)
    second.load(tmp_path / "saved", ("model", "optimizer", "extra"))
    learn(second, 1)
    assert all(torch.equal(value, trained(second)[name]) for name, value in trained(first).items())
    saved = load_file(tmp_path / "saved" / "model_world_size_1_rank_0.safetensors")
    assert all(".lora_" in name for name in saved) == only_adapters
    assert (tmp_path / "saved" / "huggingface" / "model.safetensors").exists() != only_adapters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_native_rollout_samples_from_merged_weights(folder, dtype):
    engine = build(folder, dtype="fp32")
    rollout = NativeEngine(RolloutConfig(dtype=dtype, prompt_length=8, response_length=8, max_num_seqs=4), engine.model)
    assert rollout.generic_reason == ""

    def sample():
        return asyncio.run(rollout.generate(GenerationRequest(0, [5, 6, 7], SamplingParams(max_tokens=8, seed=1))))[0]

    for version in range(2):
        completion = sample()
        ids = torch.tensor([[5, 6, 7, *completion.token_ids]])
        merged = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="plain_test").eval()
        merged.load_state_dict(dict(engine.export_weights()), strict=False)
        with torch.no_grad():
            logp = merged.to(getattr(torch, dtype))(input_ids=ids, use_cache=False).logits[0, 2:-1].float()
        expected = logp.log_softmax(-1).gather(1, ids[0, 3:, None])[:, 0]
        tolerance = 1e-4 if dtype == "float32" else 0.05
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=tolerance)
        engine.forward_backward(random_batch(), SquaredLogprob())
        engine.optim_step()
        asyncio.run(rollout.update_weights(engine.model, version + 1))


def started(folder, adapters, **how):
    return build_engine(folder, model={"lora_adapter_path": str(adapters)}, **how)


def train_a_shard(folder, adapters, rows):
    engine = started(folder, adapters)
    mine = random_batch().select(rows[engine.rank])
    engine.forward_backward(mine, SquaredLogprob(), MicroBatching(max_sequences=2))
    gradients = {name: gradient.clone().numpy() for name, gradient in engine.weights.full_gradients()}
    with engine.disable_adapter():
        base = engine.forward(mine)["logprobs"].numpy()
    engine.optim_step()
    published = (*engine.export_weights(), *engine.export_adapters(False))
    return gradients, base, {name: tensor.clone().numpy() for name, tensor in published}


def save_shards(folder, adapters, rows, where):
    engine = started(folder, adapters, dtype="fp32")
    engine.forward_backward(random_batch().select(rows[engine.rank]), SquaredLogprob())
    engine.optim_step()
    engine.save(where)


ROWS = [[0, 3, 4], [1, 2, 5]]


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    where = tmp_path_factory.mktemp("adapters")
    build(folder).save(where, ("model",))
    return where / "lora_adapter"


def test_two_ranks_of_shards_train_like_one(folder, adapters):
    whole, _, changed = train_a_shard(folder, adapters, [list(range(6))])
    for rank, (found, base, weights) in enumerate(run_ranks(2, train_a_shard, folder, adapters, ROWS)):
        assert found.keys() == whole.keys() and all(".lora_" in name for name in found)
        for name, gradient in whole.items():
            assert abs(found[name] - gradient).max() <= 1e-10 * abs(gradient).max() + 1e-13
        for name, tensor in changed.items():
            assert abs(weights[name] - tensor).max() <= 1e-9
        alone = build_engine(folder).forward(random_batch().select(ROWS[rank]))["logprobs"].numpy()
        assert abs(base - alone).max() < 1e-12


def test_shards_of_two_ranks_are_saved_merged_and_apart_and_loaded_by_one(folder, adapters, tmp_path):
    run_ranks(2, save_shards, folder, adapters, ROWS, tmp_path / "saved")
    engine = build(folder, dtype="fp32")
    engine.load(tmp_path / "saved", ("model", "optimizer"))
    expected = logits_of(engine.model)
    assert not torch.allclose(expected, logits_of(started(folder, adapters, dtype="fp32").model), rtol=1e-3)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "huggingface")
    apart = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "saved" / "lora_adapter"
    )
    for model in (merged, apart):
        torch.testing.assert_close(logits_of(model.eval()), expected, rtol=1e-4, atol=1e-4)


def test_shards_merged_by_the_command_and_joined_by_peft_are_the_trained_model(folder, adapters, tmp_path):
    run_ranks(2, save_shards, folder, adapters, ROWS, tmp_path / "saved")
    assert merge_main(["--local_dir", str(tmp_path / "saved"), "--target_dir", str(tmp_path / "merged")]) == 0
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(one, other) for one, other in zip(base.parameters(), plain.parameters(), strict=True))
    joined = peft.PeftModel.from_pretrained(base, tmp_path / "merged" / "lora_adapter").merge_and_unload()
    engine = build(folder, dtype="fp32")
    engine.load(tmp_path / "saved", ("model",))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "huggingface")
    for other in (logits_of(engine.model), logits_of(exported)):
        torch.testing.assert_close(logits_of(joined), other, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits_of(joined), logits_of(plain), rtol=1e-3)


def mixed_types(folder, adapters):
    engine = started(folder, adapters, dtype="bf16")
    kinds = {(p.dtype, p.requires_grad) for _, p in engine.weights.named_parameters}
    engine.forward_backward(random_batch().select(ROWS[engine.rank]), SquaredLogprob())
    norm = engine.optim_step().values()["grad_norm"]
    return kinds, norm


def test_shards_of_a_bfloat16_base_have_adapters_in_float32(folder, adapters):
    alone = started(folder, adapters, dtype="bf16")
    alone.forward_backward(random_batch(), SquaredLogprob())
    expected = alone.optim_step().values()["grad_norm"]
    for kinds, norm in run_ranks(2, mixed_types, folder, adapters):
        assert kinds == {(torch.bfloat16, False), (torch.float32, True)}
        assert norm == pytest.approx(expected, rel=0.02)


def test_generation_without_a_trainer_takes_the_adapters_or_refuses(folder, adapters):
    given = [f"actor_rollout_ref.model.path={folder}", f"actor_rollout_ref.model.lora_adapter_path={adapters}"]
    rollout = ["actor_rollout_ref.rollout.dtype=float32", "data.max_prompt_length=8", "data.max_response_length=8"]
    config = load_config([*given, *rollout])
    request = GenerationRequest(0, [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8))
    [completion] = asyncio.run(build_standalone_engine(config, None).generate(request))
    ids = torch.tensor([[5, 6, 7, *completion.token_ids]])
    merged = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="plain_test").eval()
    merged.load_state_dict(dict(started(folder, adapters, dtype="fp32").export_weights()), strict=False)
    with torch.no_grad():
        expected = merged(input_ids=ids, use_cache=False).logits[0, 2:-1].log_softmax(-1).gather(1, ids[0, 3:, None])
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected[:, 0], rtol=0, atol=1e-4)
    tgi = ["actor_rollout_ref.rollout.name=tgi", "actor_rollout_ref.rollout.server.url=http://127.0.0.1:1"]
    with pytest.raises(ConfigError, match="has no effect on a server that runs already"):
        build_standalone_engine(load_config([*given, *tgi]), None)
