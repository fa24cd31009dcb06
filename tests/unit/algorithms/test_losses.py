import dataclasses
import math

import pytest
import torch

from tests.unit.algorithms.algorithm_cases import random_batch
from verl.algorithms.aggregation import loss_weights
from verl.algorithms.losses import make_actor_loss, make_value_loss
from verl.config import ActorConfig, CriticConfig, PolicyLossConfig
from verl.config.algorithm import LOSS_AGG_MODES
from verl.data.micro_batches import MicroBatching, split_micro_batches
from verl.utils.errors import ConfigError

CLIPS = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=2.0)


def dual_clip_naively(logprob, old, advantage, low, high, c):
    """One token, case by case: arXiv 1707.06347 eq. 7 and 1912.09729 eq. 5."""
    ratio = math.exp(min(max(logprob - old, -20.0), 20.0))
    objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if advantage < 0:
        objective = max(objective, c * advantage)
    return -objective


def normal(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def uniform(n: int) -> torch.Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.fixture
def batch():
    out = random_batch()
    return out.with_columns(loss_weights=loss_weights(out, "token-mean", dtype=torch.float64))


@pytest.fixture
def logprobs(batch):
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64)
    return (batch["old_logprobs"] + 0.8 * noise) * batch["loss_mask"]


def test_vanilla_equals_the_naive_case_by_case_loss(batch, logprobs):
    weighted, metrics = make_actor_loss(CLIPS)({"logprobs": logprobs}, batch.token_columns, None)
    columns = zip(*(x.tolist() for x in (logprobs, batch["old_logprobs"], batch["advantages"])), strict=True)
    expected = torch.tensor([dual_clip_naively(*c, 0.1, 0.3, 2.0) for c in columns], dtype=torch.float64)
    torch.testing.assert_close(metrics["pg_loss"], expected)
    torch.testing.assert_close(weighted, expected * batch["loss_weights"])
    torch.testing.assert_close(metrics["ppo_kl"], batch["old_logprobs"] - logprobs)


def test_vanilla_clips_on_all_sides_in_this_test_data(batch, logprobs):
    _, metrics = make_actor_loss(CLIPS)({"logprobs": logprobs}, batch.token_columns, None)
    ratio, positive = (logprobs - batch["old_logprobs"]).exp(), batch["advantages"] > 0
    negative = batch["advantages"] < 0
    clipped = (positive & (ratio > 1.3)) | (negative & (ratio < 0.9))
    torch.testing.assert_close(metrics["pg_clipfrac"], clipped.float())
    torch.testing.assert_close(metrics["pg_clipfrac_lower"], (negative & (ratio > 2.0)).float())
    assert clipped[positive].any() and clipped[negative].any() and metrics["pg_clipfrac_lower"].any()


def test_clip_ratio_sets_both_sides_unless_they_are_set(batch, logprobs):
    both = ActorConfig(clip_ratio=0.05), ActorConfig(clip_ratio_low=0.05, clip_ratio_high=0.05)
    first, second = (make_actor_loss(c)({"logprobs": logprobs}, batch.token_columns, None)[0] for c in both)
    wide, _ = make_actor_loss(ActorConfig())({"logprobs": logprobs}, batch.token_columns, None)
    torch.testing.assert_close(first, second)
    assert not torch.equal(first, wide)


def test_vanilla_gradient_equals_finite_differences(batch, logprobs):
    loss = make_actor_loss(CLIPS)

    def total(x):
        return loss({"logprobs": x}, batch.token_columns, None)[0]

    leaf = logprobs.clone().requires_grad_()
    total(leaf).sum().backward()
    step = 1e-6
    differences = (total(logprobs + step) - total(logprobs - step)) / (2 * step)
    torch.testing.assert_close(leaf.grad, differences, rtol=1e-6, atol=1e-9)


def test_a_huge_log_ratio_gives_a_finite_loss_and_gradient(batch):
    far = torch.full((batch.num_tokens,), 1000.0, dtype=torch.float64, requires_grad=True)
    weighted, _ = make_actor_loss(CLIPS)({"logprobs": far}, batch.token_columns, None)
    weighted.sum().backward()
    assert weighted.isfinite().all() and far.grad.isfinite().all()


@pytest.mark.parametrize("kl_loss_type", ["k1", "low_var_kl", "k3+"])
def test_entropy_bonus_and_kl_loss_are_added_per_token(batch, logprobs, kl_loss_type):
    entropy = uniform(batch.num_tokens)
    plain, _ = make_actor_loss(CLIPS)({"logprobs": logprobs}, batch.token_columns, None)
    config = dataclasses.replace(
        CLIPS, entropy_coeff=0.3, use_kl_loss=True, kl_loss_coef=0.7, kl_loss_type=kl_loss_type
    )
    loss = make_actor_loss(config)
    assert loss.outputs == ("logprobs", "entropy") and "ref_logprobs" in loss.columns
    weighted, metrics = loss({"logprobs": logprobs, "entropy": entropy}, batch.token_columns, None)
    d = batch["ref_logprobs"] - logprobs
    kl = -d if kl_loss_type == "k1" else (d.exp() - d - 1).clamp(max=10)
    torch.testing.assert_close(weighted, plain + batch["loss_weights"] * (0.7 * kl - 0.3 * entropy))
    torch.testing.assert_close(metrics["kl_loss"], kl)
    torch.testing.assert_close(metrics["entropy_loss"], entropy)
    assert (metrics["kl_coef"] == 0.7).all()


def test_entropy_is_asked_for_only_when_it_is_used():
    assert make_actor_loss(ActorConfig()).outputs == ("logprobs",)
    assert make_actor_loss(ActorConfig(calculate_entropy=True)).outputs == ("logprobs", "entropy")
    assert make_actor_loss(ActorConfig(), observe_entropy=True).outputs == ("logprobs", "entropy")


def test_an_observed_entropy_is_reported_and_changes_no_loss(batch, logprobs):
    outputs = {"logprobs": logprobs, "entropy": uniform(batch.num_tokens)}
    plain, _ = make_actor_loss(CLIPS)(outputs, batch.token_columns, None)
    loss, metrics = make_actor_loss(dataclasses.replace(CLIPS, calculate_entropy=True))(outputs, batch.token_columns)
    assert torch.equal(loss, plain) and torch.equal(metrics["entropy_loss"], outputs["entropy"])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("max_tokens", [12, 17, 1000])
def test_the_gradient_does_not_depend_on_the_micro_batch_split(mode, max_tokens, logprobs):
    batch = random_batch()
    batch = batch.with_columns(loss_weights=loss_weights(batch, mode, 9, torch.float64), logprobs=logprobs)
    loss = make_actor_loss(CLIPS)

    def gradient(part):
        leaf = part["logprobs"].clone().requires_grad_()
        loss({"logprobs": leaf}, part.token_columns, part.cu_seqlens)[0].sum().backward()
        return leaf.grad

    whole = gradient(batch)
    for indices in split_micro_batches(batch, MicroBatching(max_tokens=max_tokens)):
        part = batch.select(indices)
        expected = batch.with_columns(gradient=whole).select(indices)["gradient"]
        torch.testing.assert_close(gradient(part), expected)


def test_without_old_logprobs_the_policy_is_its_own_old_one_and_still_has_a_gradient(batch, logprobs):
    def gradient(**columns):
        leaf = logprobs.clone().requires_grad_()
        kept = {n: c for n, c in batch.token_columns.items() if n != "old_logprobs"}
        make_actor_loss(CLIPS)({"logprobs": leaf}, {**kept, **columns}, None)[0].sum().backward()
        return leaf.grad

    torch.testing.assert_close(gradient(), gradient(old_logprobs=logprobs))
    torch.testing.assert_close(gradient(), -batch["advantages"] * batch["loss_weights"])


def test_a_per_token_loss_runs_on_any_slice_of_tokens(batch, logprobs):
    loss = make_actor_loss(CLIPS)
    whole, _ = loss({"logprobs": logprobs}, batch.token_columns, None)
    assert loss.per_token
    columns = {name: column[5:11] for name, column in batch.token_columns.items()}
    torch.testing.assert_close(loss({"logprobs": logprobs[5:11]}, columns, None)[0], whole[5:11])


def test_value_loss_equals_the_naive_definition_and_finite_differences(batch):
    values = batch["values"] + normal(batch.num_tokens)
    loss = make_value_loss(CriticConfig(cliprange_value=0.4))

    def naive(v, old, target):
        near = min(max(v, old - 0.4), old + 0.4)
        return 0.5 * max((v - target) ** 2, (near - target) ** 2)

    columns = [values.tolist(), batch["values"].tolist(), batch["returns"].tolist()]
    expected = torch.tensor([naive(*c) for c in zip(*columns, strict=True)], dtype=torch.float64)
    leaf = values.clone().requires_grad_()
    weighted, metrics = loss({"values": leaf}, batch.token_columns, None)
    torch.testing.assert_close(weighted, expected * batch["loss_weights"])
    torch.testing.assert_close(metrics["vpred_mean"], values)
    weighted.sum().backward()
    step = 1e-6
    up, down = (loss({"values": values + s}, batch.token_columns, None)[0] for s in (step, -step))
    torch.testing.assert_close(leaf.grad, (up - down) / (2 * step), rtol=1e-6, atol=1e-8)
    unclipped = 0.5 * (values - batch["returns"]).square()
    torch.testing.assert_close(metrics["vf_clipfrac"], (expected > unclipped + 1e-12).float())
    assert metrics["vf_clipfrac"].any()


def test_losses_that_cannot_be_used_are_refused_before_the_first_step():
    with pytest.raises(ConfigError, match=r"loss_mode=dro needs policy_loss\.dro_beta above 0; it is None"):
        make_actor_loss(ActorConfig(policy_loss=PolicyLossConfig(loss_mode="dro")))
    with pytest.raises(ConfigError, match="did you mean 'vanilla'"):
        make_actor_loss(ActorConfig(policy_loss=PolicyLossConfig(loss_mode="vanila")))
    with pytest.raises(ConfigError, match=r"clip_ratio_c=1\.0 must be greater than 1"):
        make_actor_loss(ActorConfig(clip_ratio_c=1.0))
    with pytest.raises(ConfigError, match="unknown KL estimator"):
        make_actor_loss(ActorConfig(use_kl_loss=True, kl_loss_type="k9"))


def test_masked_tokens_have_no_gradient(batch, logprobs):
    leaf = logprobs.clone().requires_grad_()
    make_actor_loss(CLIPS)({"logprobs": leaf}, batch.token_columns, None)[0].sum().backward()
    assert (leaf.grad[~batch["loss_mask"]] == 0).all() and (leaf.grad != 0).any()
