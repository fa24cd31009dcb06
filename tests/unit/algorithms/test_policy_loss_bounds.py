"""Bounds of the policy losses: which tokens they touch, what the metrics say, and that nothing becomes infinite."""

import dataclasses

import pytest
import torch

from tests.unit.algorithms.test_policy_losses import HIGH, LOW, NAMES, C, config_of, full_batch, gradient, total
from verl.algorithms.losses import POLICY_LOSSES, make_actor_loss, with_chosen_tokens
from verl.commands.certify import formulas
from verl.config import ActorConfig, PolicyLossConfig
from verl.data.batch import Batch
from verl.data.random_streams import token_draws
from verl.utils.errors import ConfigError


@pytest.fixture(params=NAMES)
def name(request) -> str:
    return request.param


def clipped_by_definition(name: str, batch: Batch, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Which tokens (T,) a bound takes the gradient from, or whose ratio it cuts."""
    a, log_ratio, mask = batch["advantages"], logprobs - batch["old_logprobs"], batch["loss_mask"]
    up, down, ratio = a > 0, a < 0, log_ratio.exp()
    if name == "gspo":
        lengths = batch.sum_per_sequence(mask.double()).clamp(min=1)
        ratio = (batch.sum_per_sequence(log_ratio * mask) / lengths).exp()[batch.sequence_ids()]
    outside = up & (ratio > 1 + HIGH) | down & (ratio < 1 - LOW)
    match name:
        case "vanilla" | "bypass_mode":
            return {"pg_clipfrac": outside, "pg_clipfrac_lower": down & (ratio > C)}
        case "clip_cov" | "gspo":
            return {"pg_clipfrac": outside}
        case "cispo":
            return {"pg_clipfrac": (ratio > 1 + HIGH) | (ratio < 1 - LOW)}
        case "geo_mean":
            return {"pg_clipfrac": up & (log_ratio > HIGH) | down & (log_ratio < -LOW)}
        case "dppo_tv" | "dppo_kl":
            distance = formulas.total_variation if name == "dppo_tv" else formulas.binary_kl
            pairs = zip(logprobs.exp().tolist(), batch["old_logprobs"].exp().tolist(), mask.tolist(), strict=True)
            far = torch.tensor([distance(*pair) if sampled else 0.0 for *pair, sampled in pairs])
            return {
                "pg_clipfrac": up & (ratio > 1) & (far > HIGH),
                "pg_clipfrac_lower": down & (ratio < 1) & (far > LOW),
            }
    return {}


def test_metrics_say_which_tokens_are_clipped_and_how_far_the_policy_has_moved(name):
    seen: dict[str, bool] = {}
    for seed in range(12):
        batch = full_batch(name, seed)
        some = torch.arange(batch.num_tokens) % 5 > 0  # the others have no advantage, so that nothing clips them
        batch, logprobs = batch.with_columns(advantages=batch["advantages"] * some), batch["current_logprobs"]
        _, metrics = make_actor_loss(config_of(name))({"logprobs": logprobs}, batch.token_columns, batch.cu_seqlens)
        torch.testing.assert_close(metrics["ppo_kl"], batch["old_logprobs"] - logprobs, rtol=1e-12, atol=0)
        expected = clipped_by_definition(name, batch, logprobs)
        assert {n for n in metrics if "clipfrac" in n} == expected.keys()
        for metric, tokens in expected.items():
            assert torch.equal(metrics[metric][batch["loss_mask"]], tokens[batch["loss_mask"]].float()), metric
            seen[metric] = seen.get(metric, False) or bool(tokens.any())
    assert all(seen.values()), seen


def test_what_stands_on_tokens_that_were_not_sampled_changes_nothing(name):
    batch = full_batch(name)
    outside, logprobs = ~batch["loss_mask"], batch["current_logprobs"]
    noisy = {n: torch.where(outside, 3.0, batch[n]) for n in ("old_logprobs", "advantages")}
    other, far = batch.with_columns(**noisy), torch.where(outside, -5.0, logprobs)
    torch.testing.assert_close(total(name, other, far), total(name, batch, logprobs), rtol=1e-12, atol=0)
    ours, expected = gradient(lambda x: total(name, other, x), far), gradient(lambda x: total(name, batch, x), logprobs)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("far", [-1000.0, 1000.0])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_probabilities_far_apart_give_finite_losses_and_gradients_in_float32(name, far, sign):
    batch = full_batch(name)
    columns = {n: c.float() if c.is_floating_point() else c for n, c in batch.token_columns.items()}
    columns["advantages"] = sign * torch.ones(batch.num_tokens)
    leaf = (columns["old_logprobs"] + far).requires_grad_()
    weighted, _ = make_actor_loss(config_of(name))({"logprobs": leaf}, columns, batch.cu_seqlens)
    (ours,) = torch.autograd.grad(weighted.sum(), leaf)
    assert weighted.isfinite().all() and ours.isfinite().all()


@pytest.mark.parametrize(
    ("old", "new", "advantage", "blocked"),
    [(1.0, 1.0, 1.0, False), (0.5, 1.0, 1.0, True), (1.0, 0.5, -1.0, True), (1.0, 0.9, -1.0, False)],
)
@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_a_probability_of_1_has_a_divergence(name, old, new, advantage, blocked):
    """TV 0, 0.5, 0.5 and 0.1; KL(old || new) 0, infinite, ln 2 and -ln 0.9 = 0.105, with bounds 0.25 and 0.15."""
    columns = {"old_logprobs": torch.tensor([old]).log(), "advantages": torch.tensor([advantage])}
    columns |= {"loss_mask": torch.tensor([True]), "loss_weights": torch.ones(1)}
    leaf = torch.tensor([new]).log().requires_grad_()
    loss, _ = make_actor_loss(config_of(name))({"logprobs": leaf}, columns, torch.tensor([0, 1]))
    (ours,) = torch.autograd.grad(loss.sum(), leaf)
    assert float(ours) == (0.0 if blocked else pytest.approx(-advantage * min(new / old, C)))


@pytest.mark.parametrize("bounds", [(-0.5, 2.0), (0.05, 0.6), (-0.3, 0.2), (50.0, 60.0)])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov"])
def test_the_choice_of_tokens_equals_its_definition(mode, share, bounds):
    batch = full_batch("vanilla", seed=4)
    mask, draws = batch["loss_mask"], token_draws(1, 2, batch.sequence_ids(), batch.position_ids())
    settings = {"clip_cov_ratio": share, "kl_cov_ratio": share, "clip_cov_lb": bounds[0], "clip_cov_ub": bounds[1]}
    config = dataclasses.replace(config_of(mode), policy_loss=PolicyLossConfig(loss_mode=mode, **settings))
    found = with_chosen_tokens(batch, config, draws)["chosen_tokens"]
    current, old, a = (batch[n][mask].tolist() for n in ("current_logprobs", "old_logprobs", "advantages"))
    picked = (
        formulas.chosen_by_kl_cov(current, a, share)
        if mode == "kl_cov"
        else formulas.chosen_by_clip_cov(current, old, a, draws[mask].tolist(), bounds, share, (LOW, HIGH))
    )
    assert found[mask].nonzero().flatten().tolist() == sorted(picked) and not found[~mask].any()
    assert (len(picked) > 0) == (share > 0 and (mode == "kl_cov" or bounds[0] < 50))


def test_a_token_that_was_not_sampled_is_never_chosen(monkeypatch):
    everything = dataclasses.replace(POLICY_LOSSES.get("kl_cov"), choose_tokens=lambda b, c, d: torch.ones_like(d) > 0)
    monkeypatch.setitem(POLICY_LOSSES._items, "kl_cov", everything)
    batch = full_batch("kl_cov")
    assert torch.equal(batch["chosen_tokens"], batch["loss_mask"])


@pytest.mark.parametrize("mode", ["vanilla", "bypass_mode", "dppo_tv", "dppo_kl"])
def test_a_bound_of_the_ratio_inside_the_trust_region_is_refused(mode):
    with pytest.raises(ConfigError, match=r"clip_ratio_c=1\.0 must be greater than 1"):
        make_actor_loss(config_of(mode, clip_ratio_c=1.0))


def test_bounds_of_the_covariance_in_the_wrong_order_are_refused():
    losses = PolicyLossConfig(loss_mode="clip_cov", clip_cov_lb=5.0, clip_cov_ub=1.0)
    with pytest.raises(ConfigError, match=r"clip_cov_lb=5\.0 must be below clip_cov_ub=1\.0"):
        make_actor_loss(ActorConfig(policy_loss=losses))


def test_all_tokens_of_an_answer_have_the_same_loss_in_gmpo():
    batch = full_batch("geo_mean")
    columns = batch.token_columns, batch.cu_seqlens
    _, metrics = make_actor_loss(config_of("geo_mean"))({"logprobs": batch["current_logprobs"]}, *columns)
    for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        assert len(metrics["pg_loss"][start:stop].unique()) == 1
