"""The engine's sums: packed equals one sequence at a time, and no split changes a gradient."""

import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from tests.engine_cases import (
    SHAPE,
    SquaredLogprob,
    SquaredValue,
    build_engine,
    naive_logprobs,
    random_batch,
    save_tiny_model,
    tiny_qwen3,
)
from verl.commands.certify.float64 import keep_float64
from verl.config import HFModelConfig
from verl.data.micro_batches import MicroBatching
from verl.models.load import load_tokenizer, load_value_model
from verl.utils.errors import CheckpointError, ConfigError
from verl.workers.engine.micro_batch_forward import limit_to_cpu_cache
from verl.workers.rollout.native.engine import parameter_versions

HEADS = ["eager", "chunked", "fused"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def untied_folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("untied"), tiny_qwen3(tie_word_embeddings=False))


def gradients(engine) -> dict[str, torch.Tensor]:
    taken = {name: p.grad.clone() for name, p in engine.weights.named_parameters}
    engine.optimizer.zero_grad()
    return taken


def naive_gradient(model, batch, temperature):
    """(loss, gradients, logprobs): one unpacked sequence at a time, plain log-softmax over all logits."""
    total, columns = 0.0, []
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        tokens = batch["tokens"][start:end]
        table = naive_logprobs(model, tokens, temperature)[:-1]
        logprobs = table.gather(1, tokens[1:, None])[:, 0]
        entropy = -(table.exp() * table).sum(-1)
        weights, targets = (batch[n][start + 1 : end].double() for n in ("loss_weights", "targets"))
        losses = (logprobs - targets) ** 2 - 0.3 * entropy
        loss = (losses * weights).sum()
        loss.backward()
        total += float(loss)
        columns.append(torch.cat([torch.zeros(1), logprobs.detach()]) * batch["loss_mask"][start:end])
    return total, {n: p.grad for n, p in model.named_parameters()}, torch.cat(columns)


@pytest.mark.parametrize("mode", HEADS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_gradient_equals_one_sequence_at_a_time_in_float64(folder, untied_folder, mode, tied, packed):
    where = folder if tied else untied_folder
    batch = random_batch()
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float64, attn_implementation="plain_test")
    keep_float64(model)
    loss, expected, logprobs = naive_gradient(model, batch, temperature=0.7)
    engine = build_engine(where, head_mode=mode, model={"use_remove_padding": packed})
    result = engine.forward_backward(batch, SquaredLogprob(), MicroBatching(max_tokens=20), temperature=0.7)
    assert result.metrics.values()["loss"] == pytest.approx(loss, rel=1e-10)
    torch.testing.assert_close(result.outputs["logprobs"], logprobs, rtol=1e-10, atol=1e-12)
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("mode", ["eager", "chunked"])
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_gradient_does_not_depend_on_the_micro_batch_split(folder, mode, per_token, checkpointing):
    batch = random_batch()
    engine = build_engine(folder, head_mode=mode, model={"enable_gradient_checkpointing": checkpointing})
    engine.forward_backward(batch, SquaredLogprob(per_token))
    whole = gradients(engine)
    for micro in (MicroBatching(max_tokens=12), MicroBatching(max_tokens=25), MicroBatching(max_sequences=1)):
        found = engine.forward_backward(batch, SquaredLogprob(per_token), micro)
        for name, gradient in gradients(engine).items():
            torch.testing.assert_close(gradient, whole[name], rtol=1e-10, atol=1e-13)
        assert found.metrics.values()["logprob"] == pytest.approx(
            float(found.outputs["logprobs"][batch["loss_mask"]].mean())
        )


def test_a_cpu_cuts_a_large_token_budget_smaller_and_the_gradient_stays(folder, monkeypatch):
    batch, engine, budget = random_batch(), build_engine(folder), MicroBatching(max_tokens=1000)
    engine.forward_backward(batch, SquaredLogprob(), budget)
    whole = gradients(engine)
    monkeypatch.setattr("verl.workers.engine.micro_batch_forward.CPU_TOKEN_BUDGET", 5)
    assert limit_to_cpu_cache(batch, budget).max_tokens == 11, "the longest sequence"
    for asked in (MicroBatching(), MicroBatching(max_sequences=2), MicroBatching(max_tokens=10, plan=((0,),))):
        assert limit_to_cpu_cache(batch, asked) is asked
    engine.forward_backward(batch, SquaredLogprob(), budget)
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-10, atol=1e-13)


def test_forward_gives_results_in_input_order_and_zero_outside_the_mask(folder):
    batch, engine = random_batch(), build_engine(folder)
    out = engine.forward(batch, ("logprobs", "entropy"), MicroBatching(max_tokens=14))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="plain_test")
    keep_float64(model)
    _, _, expected = naive_gradient(model, batch, 1.0)
    torch.testing.assert_close(out["logprobs"], expected, rtol=1e-10, atol=1e-12)
    assert not out["logprobs"].requires_grad
    assert bool((out["entropy"][~batch["loss_mask"]] == 0).all())
    assert bool((out["entropy"][batch["loss_mask"]] > 0).all())


def test_sequences_nobody_sampled_from_add_nothing(folder):
    batch, engine = random_batch(), build_engine(folder)
    mask = batch["loss_mask"].clone()
    mask[batch.cu_seqlens[1] : batch.cu_seqlens[2]] = False
    batch = batch.with_columns(loss_mask=mask, loss_weights=batch["loss_weights"] * mask)
    engine.forward_backward(batch, SquaredLogprob(), MicroBatching(max_sequences=1))
    whole = gradients(engine)
    engine.forward_backward(batch.select([0, 2, 3, 4, 5]), SquaredLogprob())
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, whole[name])


def test_critic_values_start_at_zero_and_learn(folder):
    batch, engine = random_batch(), build_engine(folder, value_head=True)
    assert bool((engine.forward(batch, ("values",))["values"] == 0).all())
    first = engine.forward_backward(batch, SquaredValue()).metrics.values()["vf_loss"]
    for _ in range(30):
        engine.optim_step()
        last = engine.forward_backward(batch, SquaredValue()).metrics.values()["vf_loss"]
    assert last < 0.2 * first


def test_critic_values_are_those_of_the_state_before_the_token(folder, tmp_path):
    batch, engine = random_batch(), build_engine(folder, value_head=True)
    engine.forward_backward(batch, SquaredValue())
    engine.optim_step()
    engine.save(tmp_path / "saved", ("hf_model",))
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved" / "huggingface", dtype=torch.float64)
    keep_float64(model)
    values = engine.forward(batch, ("values",), MicroBatching(max_tokens=16))["values"]
    start, end = int(batch.cu_seqlens[2]), int(batch.cu_seqlens[3])
    alone = model.eval()(input_ids=batch["tokens"][None, start:end]).logits[0, :, 0]
    mask = batch["loss_mask"][start:end]
    torch.testing.assert_close(values[start:end][mask], alone[:-1][mask[1:]].detach())


def test_bf16_compute_keeps_fp32_masters_and_adds_gradients_in_fp32(folder):
    engine = build_engine(folder, dtype="fp32")
    mixed = build_engine(folder, model_dtype="fp32", dtype="bf16")
    batch = random_batch()
    assert {p.dtype for p in mixed.model.parameters()} == {torch.bfloat16}
    assert {t.dtype for _, t in mixed.export_weights()} == {torch.float32}
    for e in (engine, mixed):
        e.forward_backward(batch, SquaredLogprob(), MicroBatching(max_sequences=2))
    plain, rounded = gradients(engine), gradients(mixed)
    for name, gradient in rounded.items():
        assert gradient.dtype == torch.float32
        cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), plain[name].flatten(), dim=0)
        assert cosine > 0.97, name


def test_small_updates_survive_bf16_compute(folder):
    engine = build_engine(folder, model_dtype="fp32", dtype="bf16", optim={"lr": 1e-6, "weight_decay": 0.0})
    before = {name: tensor.clone() for name, tensor in engine.export_weights()}
    for _ in range(3):
        engine.forward_backward(random_batch(), SquaredLogprob())
        engine.optim_step()
    assert all(not torch.equal(before[name], tensor) for name, tensor in engine.export_weights())


def test_after_a_step_the_model_computes_with_the_rounded_trained_values(folder):
    engine = build_engine(folder, model_dtype="fp32", dtype="bf16")
    engine.forward_backward(random_batch(), SquaredLogprob())
    engine.optim_step()
    computed = dict(engine.model.named_parameters())
    for name, trained in engine.export_weights():
        assert torch.equal(computed[name], trained.to(torch.bfloat16)), name


def test_a_step_counts_as_a_change_of_every_parameter_so_that_nobody_samples_from_it_unpublished(folder):
    engine = build_engine(folder)
    assert engine.optimizer.defaults["fused"]  # torch does not count what fused kernels write
    before = parameter_versions(engine.model)
    engine.forward_backward(random_batch(), SquaredLogprob())
    engine.optim_step()
    assert all(now > then for now, then in zip(parameter_versions(engine.model), before, strict=True))


FAMILIES = [
    ("granite", {"logits_scaling": 3.0}),  # divides its logits
    ("phi", {}),  # a bias in the head
    ("gpt_neox", {}),  # runs padded
]


@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_other_families_give_the_log_probs_of_their_own_logits(tmp_path, family, changes):
    config = AutoConfig.for_model(family, **{**SHAPE, **changes})
    folder = save_tiny_model(tmp_path, config)
    batch, engine = random_batch(), build_engine(folder)
    found = engine.forward(batch, ("logprobs",), MicroBatching(max_tokens=30), temperature=0.7)["logprobs"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="plain_test").eval()
    keep_float64(model)
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        tokens, mask = batch["tokens"][start:end], batch["loss_mask"][start:end]
        alone = naive_logprobs(model, tokens, 0.7)[:-1].gather(1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(found[start:end][mask], alone[mask[1:]].detach(), rtol=1e-10, atol=1e-12)


def test_experts_train_in_float64_though_their_grouped_kernel_has_none(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    folder = save_tiny_model(tmp_path, AutoConfig.for_model("qwen3_moe", **SHAPE, **experts))
    found = []
    for dtype in ("fp32", "fp64"):
        engine = build_engine(folder, dtype)
        with engine.train_mode():
            engine.forward_backward(random_batch(), SquaredLogprob())
        found.append(gradients(engine))
    for name, gradient in found[1].items():
        torch.testing.assert_close(found[0][name].double(), gradient, rtol=1e-3, atol=1e-5)


def test_logits_that_are_bounded_are_refused_by_name(tmp_path):
    folder = save_tiny_model(tmp_path, AutoConfig.for_model("gemma2", **SHAPE, query_pre_attn_scalar=8))
    with pytest.raises(ConfigError, match=r"gemma2.*final_logit_softcapping"):
        build_engine(folder)
    build_engine(folder, model={"override_config": {"final_logit_softcapping": None}}).forward(random_batch())


LONG = {"rope_theta": 1e4, "original_max_position_embeddings": 10, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
STRETCHED = {"dynamic": {"rope_theta": 1e4, "factor": 4.0}, "longrope": LONG}


@pytest.mark.parametrize("kind", STRETCHED)
def test_sequences_that_change_the_rotary_frequencies_of_their_neighbours_are_refused(tmp_path, kind):
    rope = {"rope_type": kind, **STRETCHED[kind]}
    engine = build_engine(save_tiny_model(tmp_path, tiny_qwen3(max_position_embeddings=10, rope_parameters=rope)))
    batch = random_batch()  # one sequence has 11 tokens
    with pytest.raises(ConfigError, match=rf"has 11 tokens, but rope_type={kind} .* more than 10, .* at 10 or less"):
        engine.forward(batch)
    short = batch.select([i for i, length in enumerate(batch.lengths.tolist()) if length <= 10])
    one, whole = (engine.forward(short, micro=MicroBatching(max_sequences=n))["logprobs"] for n in (1, 9))
    torch.testing.assert_close(one, whole, rtol=1e-12, atol=1e-12)


def test_a_non_finite_gradient_is_skipped_counted_and_named(folder, caplog):
    batch, engine = random_batch(), build_engine(folder)
    before = {name: tensor.clone() for name, tensor in engine.export_weights()}
    engine.forward_backward(batch, SquaredLogprob())
    engine.model.model.layers[1].mlp.up_proj.weight.grad[0, 0] = float("nan")
    with caplog.at_level(logging.WARNING):
        metrics = engine.optim_step().values()
    assert metrics["skipped"] == 1 and "grad_norm" not in metrics
    assert "layers.1.mlp.up_proj.weight" in caplog.text
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.export_weights())
    engine.forward_backward(batch, SquaredLogprob())
    assert engine.optim_step().values()["skipped"] == 0
    assert engine.skipped_steps == 1


def test_compute_type_auto_is_the_parameters_type_on_a_cpu(folder):
    engine = build_engine(folder, model_dtype="fp32", dtype="auto")
    assert engine.compute_dtype == torch.float32 and not engine.weights.has_master_copies


def test_training_in_float16_is_refused_and_running_forward_in_it_is_not(folder):
    for settings in ({"dtype": "fp16"}, {"mixed_precision": {"reduce_dtype": "fp16"}}):
        with pytest.raises(ConfigError, match=r"training in float16 is refused: .* use dtype=bf16"):
            build_engine(folder, **{"dtype": "fp32", "model_dtype": "fp32", **settings})
    assert build_engine(folder, dtype="fp16", forward_only=True).forward(random_batch())["logprobs"].isfinite().all()


def test_dropout_is_off_unless_asked_for(tmp_path):
    folder = save_tiny_model(tmp_path, tiny_qwen3(attention_dropout=0.5))
    batch, engine = random_batch(), build_engine(folder)
    first, second = (engine.forward_backward(batch, SquaredLogprob()).outputs["logprobs"] for _ in range(2))
    assert torch.equal(first, second)
    noisy = build_engine(folder, model={"override_config": {"attention_dropout": 0.5}})
    first, second = (noisy.forward_backward(batch, SquaredLogprob()).outputs["logprobs"] for _ in range(2))
    assert not torch.equal(first, second)


def test_an_engine_that_only_runs_forward_has_no_optimizer_and_refuses_to_train(folder):
    engine = build_engine(folder, forward_only=True)
    assert engine.optimizer is None and not any(p.requires_grad for p in engine.model.parameters())
    engine.forward(random_batch())
    with pytest.raises(ConfigError, match="only runs forward"):
        engine.forward_backward(random_batch(), SquaredLogprob())


def test_an_engine_that_only_runs_forward_holds_its_weights_in_the_type_it_computes_in(folder):
    batch, types = random_batch(), {"model_dtype": "fp32", "dtype": "bf16"}
    expected = build_engine(folder, **types).forward(batch)["logprobs"]
    engine = build_engine(folder, **types, forward_only=True)
    assert (
        {p.dtype for p in engine.model.parameters()}
        == {p.dtype for _, p in engine.weights.named_parameters}
        == {torch.bfloat16}
    )
    assert torch.equal(engine.forward(batch)["logprobs"], expected) and not engine.weights.has_master_copies


def test_mistakes_with_the_model_folder_are_explained(tmp_path, folder):
    with pytest.raises(ConfigError, match="not a folder"):
        build_engine(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        build_engine(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match="init_random"):
        build_engine(tmp_path / "empty")
    build_engine(tmp_path / "empty", model={"override_config": {"init_random": True}})
    with pytest.raises(CheckpointError, match="does not fit"):
        build_engine(folder, model={"override_config": {"intermediate_size": 64}})
    with pytest.raises(ConfigError, match="num_hiden_layers"):
        build_engine(folder, model={"override_config": {"num_hiden_layers": 3}})
    (tmp_path / "empty" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CheckpointError, match=r"cannot be read .*: it was not downloaded whole"):
        build_engine(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"model\.external_lib=nowhere: there is no module 'nowhere'"):
        build_engine(folder, model={"external_lib": "nowhere"})
    with pytest.raises(ConfigError, match=r"external_lib.*libs/mine\.py': there is no file"):
        build_engine(folder, model={"external_lib": "libs/mine.py"})
    with pytest.raises(ConfigError, match="empty holds no tokenizer with a vocabulary"):
        load_tokenizer(HFModelConfig(path=str(tmp_path / "empty")))


@pytest.mark.parametrize("structure_only", [False, True])
def test_a_family_whose_value_head_has_another_name_is_no_critic_on_any_rank(tmp_path, structure_only):
    save_tiny_model(tmp_path, AutoConfig.for_model("gpt_neox", **SHAPE))
    with pytest.raises(ConfigError, match="'gpt_neox' has no linear head named score; it can score nothing"):
        load_value_model(tmp_path, structure_only=structure_only)


def test_a_token_without_embedding_and_an_output_that_is_not_there_are_named(folder):
    batch, engine = random_batch(), build_engine(folder)
    with pytest.raises(ConfigError, match="values"):
        engine.forward(batch, ("values",))
    batch["tokens"][5] = 61
    with pytest.raises(ConfigError, match="token 61 is not among the 61"):
        engine.forward_backward(batch, SquaredLogprob())
