"""The certificate: every built-in loss earns it, and every wrong normaliser that others shipped is caught and named."""

import dataclasses
import importlib.util
import itertools
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from tests.engine_cases import SHAPE, save_tiny_model
from tests.tiers import slow, soak
from verl.algorithms import losses
from verl.algorithms.losses import POLICY_LOSSES, register_policy_loss
from verl.cli import main
from verl.commands.certify import comparison as certifying
from verl.commands.certify import plain_gradient
from verl.commands.certify.certificate import Certificate
from verl.commands.certify.comparison import certify
from verl.commands.certify.subject import critic_subject
from verl.config import load_config
from verl.config.algorithm import LOSS_AGG_MODES
from verl.data.batch import Batch
from verl.data.trajectory import Trajectory
from verl.utils.errors import ConfigError
from verl.workers.engine.torch_engine import TorchEngine

ACTOR, CRITIC, CORRECTION = "actor_rollout_ref.actor", "critic", "algorithm.rollout_correction"
FP64 = (f"{ACTOR}.fsdp_config.model_dtype=fp64", "critic.fsdp.model_dtype=fp64")  # float64 only: half the work
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", *FP64)
ORACLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_one_file.py"


def run(*overrides: str, **options) -> Certificate:
    return certify(load_config([*GRPO, *overrides]), tiny=True, num_sequences=9, longest=24, **options)


BUILT_IN = [n for n in POLICY_LOSSES.names() if POLICY_LOSSES.get(n).function.__module__.startswith("verl.algo")]
IN_CI = ["vanilla", "gspo", "geo_mean", "kl_cov", "bypass_mode"]  # by token, by sequence, chosen tokens, other terms


@pytest.mark.parametrize("name", [*IN_CI[:1], *slow(IN_CI[1:]), *soak(name for name in BUILT_IN if name not in IN_CI)])
def test_every_built_in_policy_loss_is_certified(name):
    needed = {"dro": f"{ACTOR}.policy_loss.dro_beta=0.5", "bypass_mode": f"{CORRECTION}.bypass_mode=True"}
    more = [needed[name]] if name in needed else []
    certificate = run(f"{ACTOR}.policy_loss.loss_mode={name}", f"{ACTOR}.entropy_coeff=0.01", *more)
    assert certificate.holds, certificate.verdict()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[], [f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.loss_type=reinforce"]])
def test_losses_times_importance_weights_are_certified(mode):
    certificate = run(f"{CORRECTION}.rollout_is=token", *mode)
    assert certificate.holds, certificate.verdict()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*LOSS_AGG_MODES[::2], *soak(LOSS_AGG_MODES[1::2])])
def test_every_aggregation_is_certified_with_entropy_kl_and_temperature(mode):
    terms = (f"{ACTOR}.entropy_coeff=0.02", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1")
    certificate = run(f"{ACTOR}.loss_agg_mode={mode}", "actor_rollout_ref.rollout.temperature=0.7", *terms)
    assert certificate.holds, certificate.verdict()


@pytest.mark.slow
def test_a_critic_and_its_policy_are_certified_in_their_own_type_too():
    certificate = certify(load_config([]), tiny=True, num_sequences=9, longest=24)
    assert {row.role for row in certificate.rows} == {"actor", "critic"}
    assert certificate.holds, certificate.verdict()
    assert all(0 < row.own_error < 1e-4 for row in certificate.rows)


OPTIONS = ("entropy_checkpointing=True", "entropy_from_logits_with_chunking=True", "ulysses_sequence_parallel_size=2")
OWN = [*(f"{ACTOR}.{option}" for option in OPTIONS), "actor_rollout_ref.model.use_fused_kernels=True"]


@pytest.mark.slow
@pytest.mark.parametrize("own", [*soak([[]]), OWN], ids=["defaults", "options"])
def test_two_ranks_that_share_the_model_and_its_sequences_are_certified(own):
    """Also where the configuration has options of its own beside those that the certificate tries."""
    certificate = run(*own, num_ranks=2)
    assert {"sharded", "Ulysses", "prefix sharing"} <= {row.dimension for row in certificate.rows}
    assert certificate.holds, certificate.verdict()


@pytest.mark.slow
def test_ranks_that_do_not_divide_the_heads_are_certified_without_sharing_sequences():
    certificate = run(num_ranks=3)  # of 4 heads
    assert "sharded" in {row.dimension for row in certificate.rows} and certificate.holds, certificate.verdict()
    assert "Ulysses" not in {row.dimension for row in certificate.rows}


@pytest.mark.slow
def test_adapters_are_certified_with_a_gradient_in_each(monkeypatch):
    comparisons = []

    class Kept(certifying.GradientComparison):
        def __init__(self, *args):
            super().__init__(*args)
            comparisons.append(self)

    monkeypatch.setattr(certifying, "GradientComparison", Kept)
    settings = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.model.lora_rank=4"]
    certificate = certify(load_config(settings), tiny=True, num_sequences=9, longest=24)
    assert certificate.holds, certificate.verdict()
    (comparison,) = comparisons
    assert {name.split(".")[-3] for name in comparison.expected} == {"lora_A", "lora_B"}
    assert all(gradient.norm() > 0 for gradient in comparison.expected.values())


@pytest.mark.slow
def test_a_critic_with_adapters_is_certified_on_two_ranks(monkeypatch):
    monkeypatch.setattr(certifying, "subjects", lambda config: [critic_subject(config)])
    certificate = run("critic.enable=True", "critic.model.lora_rank=4", num_ranks=2)
    assert {row.role for row in certificate.rows} == {"critic"}
    assert {"sharded", "Ulysses"} <= {row.dimension for row in certificate.rows}
    assert certificate.holds, certificate.verdict()


@pytest.mark.slow
def test_a_family_with_experts_is_certified(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    save_tiny_model(tmp_path, AutoConfig.for_model("qwen3_moe", **{**SHAPE, **experts}))
    certificate = run(f"actor_rollout_ref.model.path={tmp_path}", num_ranks=2)
    assert certificate.holds, certificate.verdict()
    assert [row.setting for row in certificate.rows if row.dimension == "experts"] == ["divided over 2 ranks"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", *soak(["gpt_oss", "phimoe"])])
def test_a_family_with_sizes_of_its_own_is_made_small_and_certified(tmp_path, family):
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    certificate = run(f"actor_rollout_ref.model.path={tmp_path}")
    assert certificate.holds, certificate.verdict()


@pytest.mark.slow
def test_fine_tuning_is_certified():
    certificate = certify(
        load_config(["engine.model_dtype=fp64"], "sft_trainer"), tiny=True, num_sequences=9, longest=24
    )
    assert certificate.holds, certificate.verdict()


def test_the_definition_equals_the_one_file_example():
    spec = importlib.util.spec_from_file_location("grpo_one_file", ORACLE)
    oracle = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(oracle)
    settings = oracle.Settings(clip_dual=1.5, entropy_coeff=0.01, kl_coeff=0.2, aggregation="seq-mean-token-mean")
    model = oracle.tiny_model().double()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 10, (4, 9), generator=generator)
    mask = torch.rand(4, 9, generator=generator) < 0.6
    mask[:, 0] = False
    old, ref, advantages = torch.randn(3, 4, 9, generator=generator, dtype=torch.float64)
    old, ref = old / 4 - 2.5, ref / 4 - 2.5
    expected = oracle.grpo_gradient(model, tokens, mask, advantages, old * mask, ref * mask, s=settings)
    model.zero_grad()

    batch = Batch.pack([Trajectory(t, m, torch.zeros(9), group_id=0) for t, m in zip(tokens, mask, strict=True)])
    columns = {"old_logprobs": old * mask, "ref_logprobs": ref * mask, "advantages": advantages}
    config = load_config(
        [
            f"{ACTOR}.clip_ratio_high=0.28",
            f"{ACTOR}.clip_ratio_c=1.5",
            f"{ACTOR}.entropy_coeff=0.01",
            f"{ACTOR}.use_kl_loss=True",
            f"{ACTOR}.kl_loss_coef=0.2",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        ]
    ).actor_rollout_ref.actor
    model.set_attn_implementation(plain_gradient.NAIVE_ATTENTION)
    batch = batch.with_columns(**{name: column.flatten() for name, column in columns.items()})
    found = plain_gradient.gradient(model, batch, plain_gradient.actor_loss(config, losses.ActorLoss(config), 1.0), 1.0)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


# --- wrong normalisers ------------------------------------------------------------------------------------------


def token_mean(mask: torch.Tensor) -> torch.Tensor:
    return mask.double() / mask.sum().clamp(min=1)


def replace_loss_weights(monkeypatch, weights_of) -> None:
    """Every micro-batch gets the weights `weights_of(its batch, number of micro-batches, weights so far)`."""
    original = TorchEngine._micro_batches

    def micro_batches(self, batch, columns, micro):
        parts = list(original(self, batch, columns, micro))
        for part in parts:
            weights = weights_of(part.batch, len(parts), part.batch["loss_weights"])
            yield dataclasses.replace(part, batch=part.batch.with_columns(loss_weights=weights))

    monkeypatch.setattr(TorchEngine, "_micro_batches", micro_batches)


def test_a_mean_of_micro_batch_means_is_caught(monkeypatch):
    replace_loss_weights(monkeypatch, lambda batch, parts, weights: token_mean(batch["loss_mask"]) / parts)
    culprits = run().failed_dimensions("actor")
    assert "micro-batch size" in culprits and "whole mini-batch" not in culprits


@pytest.mark.slow
def test_token_counts_of_the_micro_batch_are_caught(monkeypatch):
    replace_loss_weights(monkeypatch, lambda batch, parts, weights: token_mean(batch["loss_mask"]))
    culprits = run().failed_dimensions("actor")
    assert {"micro-batch size", "packing order", "accumulation", "data parallel"} <= set(culprits)
    assert "whole mini-batch" not in culprits


@pytest.mark.slow
def test_a_sequence_mean_over_the_padded_length_is_caught(monkeypatch):
    def padded(batch, parts, weights):
        return batch["loss_mask"].double() / batch.lengths.max() / batch.num_sequences / parts

    replace_loss_weights(monkeypatch, padded)
    certificate = run(f"{ACTOR}.loss_agg_mode=seq-mean-token-mean")
    assert "whole mini-batch" in certificate.failed_dimensions("actor")
    assert "the loss, its aggregation or its weights are wrong" in certificate.verdict()


@pytest.mark.slow
def test_a_critic_that_counts_its_own_tokens_is_caught(monkeypatch):
    replace_loss_weights(monkeypatch, lambda batch, parts, weights: token_mean(batch["loss_mask"]))
    certificate = run("critic.enable=True")
    assert "micro-batch size" in certificate.failed_dimensions("critic")


@pytest.fixture
def registered(monkeypatch):
    """Register a loss for one test."""
    monkeypatch.setattr(POLICY_LOSSES, "_items", dict(POLICY_LOSSES._items))
    return register_policy_loss


def test_a_loss_that_reduces_by_itself_is_caught(registered):
    @registered("reduces", per_token=False)
    def reduces(logprobs, old_logprobs, advantages, batch, config):
        return -(advantages * (logprobs - old_logprobs).exp()).mean().expand_as(logprobs), {}

    assert "whole mini-batch" in run(f"{ACTOR}.policy_loss.loss_mode=reduces").failed_dimensions("actor")


@pytest.mark.slow
def test_a_loss_that_looks_at_its_neighbours_is_caught(registered):
    @registered("centred")
    def centred(logprobs, old_logprobs, advantages, batch, config):
        return -(advantages - advantages.mean()) * (logprobs - old_logprobs).exp(), {}

    certificate = run(f"{ACTOR}.policy_loss.loss_mode=centred")
    assert {"micro-batch size", "head mode"} <= set(certificate.failed_dimensions("actor"))


@pytest.mark.slow
def test_a_loss_with_a_number_per_sequence_is_certified(registered):
    @registered("per sequence", per_token=False)
    def per_sequence(logprobs, old_logprobs, advantages, batch, config):
        log_ratios = (logprobs - old_logprobs) * batch["loss_mask"]
        parts = [slice(*bounds) for bounds in itertools.pairwise(batch.cu_seqlens.tolist())]
        return torch.cat([-advantages[part] * log_ratios[part].mean().exp() for part in parts]), {}

    certificate = run(f"{ACTOR}.policy_loss.loss_mode=per sequence")
    assert certificate.holds, certificate.verdict()


def gain(logprobs, old_logprobs, advantages):
    return -advantages * (logprobs - old_logprobs).exp()


NO_LOSS = {
    "at random": (lambda *a: (gain(*a) * torch.rand(len(a[0])), {}), "differs by .* from itself when computed again"),
    "reduced": (lambda *a: (gain(*a).mean(), {}), r"losses of shape \(\); .* one loss per token"),
    "without metrics": (gain, "returned Tensor; it must return"),
    "detached": (lambda *a: (gain(*a).detach(), {}), "does not depend on what the model says"),
    "nothing": (lambda *a: (0 * gain(*a), {}), "norm 0.0: nothing to compare"),
}


@pytest.mark.parametrize("name", NO_LOSS)
def test_a_loss_that_nothing_can_be_said_about_is_refused_with_the_reason(registered, name):
    loss, why = NO_LOSS[name]
    registered("no loss")(lambda logprobs, old, advantages, batch, config: loss(logprobs, old, advantages))
    with pytest.raises(ConfigError, match=why):
        run(f"{ACTOR}.policy_loss.loss_mode=no loss")


def test_distillation_is_refused():
    with pytest.raises(ConfigError, match="no teacher to check the distillation loss with"):
        run("distillation.enabled=True", "distillation.teacher_models.teacher_model.model_path=/no/teacher")


@pytest.mark.slow
def test_a_gradient_that_depends_on_the_order_is_caught(monkeypatch):
    original = TorchEngine._micro_batches

    def without_the_last_token(self, batch, columns, micro):
        for part in original(self, batch, columns, micro):
            weights = part.batch["loss_weights"].clone()
            weights[-1] = 0
            yield dataclasses.replace(part, batch=part.batch.with_columns(loss_weights=weights))

    monkeypatch.setattr(TorchEngine, "_micro_batches", without_the_last_token)
    assert not run().holds


# --- the command --------------------------------------------------------------------------------------------------


SMALL = ("--tiny", "--sequences=5", "--length=12")


def test_the_command_prints_json_and_succeeds(capsys):
    assert main(["certify", "--json", *SMALL, *GRPO]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["holds"] and len(printed["rows"]) > 15
    assert all(row["float64_error"] < 1e-10 for row in printed["rows"])


def test_the_command_fails_and_names_the_culprit(capsys, monkeypatch):
    replace_loss_weights(monkeypatch, lambda batch, parts, weights: weights / parts)
    assert main(["certify", *SMALL, *GRPO]) == 1
    out = capsys.readouterr().out
    assert "VIOLATION: the gradient changes with micro-batch size" in out.replace("\n", " ")
    assert "most of it in" in out


@pytest.mark.slow
def test_the_parameter_that_is_off_is_named(monkeypatch):
    original = TorchEngine.forward_backward

    def spoils_one(self, batch, loss, micro=None, temperature=1.0):
        result = original(self, batch, loss, micro, temperature)
        gradient = self.model.get_submodule("model.layers.1.mlp.up_proj").weight.grad
        if gradient is not None:  # a part without a sampled token has none
            gradient.mul_(1.5)
        return result

    monkeypatch.setattr(TorchEngine, "forward_backward", spoils_one)
    failed = [row for row in run().rows if not row.ok]
    assert failed and {row.worst for row in failed} == {"model.layers.1.mlp.up_proj.weight"}


def test_the_command_explains_a_mistake(capsys):
    assert main(["certify", *GRPO]) == 2
    assert "--tiny" in capsys.readouterr().err
    assert losses.get_policy_loss("vanilla")
