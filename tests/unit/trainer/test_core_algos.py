"""The door for outside algorithms, used the way the outside world does: padded (bs, T) tensors in, agg_loss out."""

from enum import Enum

import pytest
import torch

from tests.unit.algorithms.algorithm_cases import random_batch
from tests.unit.trainer.padded_cases import outside_grpo, padded_by_hand, weights_of
from verl.algorithms import losses
from verl.algorithms.advantages import ADVANTAGES
from verl.algorithms.aggregation import loss_weights
from verl.config import ActorConfig, PolicyLossConfig, RolloutCorrectionConfig
from verl.config.algorithm import PADDED_AGG_MODES
from verl.data.micro_batches import MicroBatching, split_micro_batches
from verl.doors import core_algos
from verl.trainer.ppo.core_algos import (
    AdvantageEstimator,
    agg_loss,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    kl_penalty,
    register_adv_est,
    register_policy_loss,
)
from verl.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def forget_what_a_test_registers(monkeypatch):
    monkeypatch.setattr(ADVANTAGES, "_items", dict(ADVANTAGES._items))
    monkeypatch.setattr(losses.POLICY_LOSSES, "_items", dict(losses.POLICY_LOSSES._items))
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", dict(core_algos.ADV_ESTIMATOR_REGISTRY))
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", dict(core_algos.POLICY_LOSS_REGISTRY))


def outside_ppo(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    """A clipped loss with a sequence-level factor and a KL term, reduced by two calls of agg_loss."""
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = torch.clamp(ratio, 1 - config.clip_ratio_low, 1 + config.get("clip_ratio_high", 0.2))
    sequence_ratio = ((log_prob - old_log_prob) * response_mask).sum(-1, keepdim=True) / response_mask.sum(-1).clamp(1)[
        :, None
    ]
    losses = torch.maximum(-advantages * ratio, -advantages * clipped) * torch.exp(sequence_ratio)
    pg_loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    penalty = kl_penalty(log_prob, old_log_prob, "k2")
    kl_loss = agg_loss(
        loss_mat=penalty, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
    )
    return pg_loss + 0.1 * kl_loss, {"actor/outside": pg_loss.detach().item()}


def config_for(name: str, mode: str = "token-mean") -> ActorConfig:
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name), loss_agg_mode=mode, loss_scale_factor=9)


def with_weights(mode: str):
    batch = random_batch()
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logprobs = (batch["old_logprobs"] + 0.4 * noise) * batch["loss_mask"]
    return batch.with_columns(loss_weights=loss_weights(batch, mode, 9, torch.float64), logprobs=logprobs)


def gradient(loss, batch):
    leaf = batch["logprobs"].clone().requires_grad_()
    weighted, metrics = loss({"logprobs": leaf}, batch.token_columns, batch.cu_seqlens)
    weighted.sum().backward()
    return leaf.grad, weighted.detach(), metrics


@pytest.mark.parametrize("mode", PADDED_AGG_MODES)
def test_an_outside_loss_gives_the_gradient_of_the_padded_computation(mode):
    register_policy_loss("outside_ppo")(outside_ppo)
    batch = with_weights(mode)
    ours, weighted, _ = gradient(losses.make_actor_loss(config_for("outside_ppo", mode)), batch)

    leaf = batch["logprobs"].clone().requires_grad_()
    padded = {name: padded_by_hand(batch, name) for name in ("old_logprobs", "advantages")}
    mask = padded_by_hand(batch, "loss_mask").long()

    class Config:
        clip_ratio_low = 0.2
        global_batch_info = {"loss_scale_factor": 9}  # noqa: RUF012
        get = staticmethod(lambda name, default: default)

    rows = padded_by_hand(batch.with_columns(logprobs=leaf), "logprobs")
    loss, _ = outside_ppo(padded["old_logprobs"], rows, padded["advantages"], mask, mode, Config)
    loss.backward()
    torch.testing.assert_close(weighted.sum(), loss.detach())
    torch.testing.assert_close(ours, leaf.grad)


@pytest.mark.parametrize("mode", PADDED_AGG_MODES)
@pytest.mark.parametrize("max_tokens", [12, 17])
def test_an_outside_loss_does_not_depend_on_the_micro_batch_split(mode, max_tokens):
    register_policy_loss("outside_ppo")(outside_ppo)
    loss, batch = losses.make_actor_loss(config_for("outside_ppo", mode)), with_weights(mode)
    assert not loss.per_token
    whole = batch.with_columns(gradient=gradient(loss, batch)[0])
    for indices in split_micro_batches(batch, MicroBatching(max_tokens=max_tokens)):
        part, _, _ = gradient(loss, batch.select(indices))
        torch.testing.assert_close(part, whole.select(indices)["gradient"])


def test_an_outside_losss_metrics_arrive_without_the_actor_prefix():
    register_policy_loss("outside_ppo")(outside_ppo)
    _, _, metrics = gradient(losses.make_actor_loss(config_for("outside_ppo")), with_weights("token-mean"))
    assert {"outside", "pg_loss"} == metrics.keys()
    assert metrics["outside"].unique().numel() == 1 and metrics["outside"].isfinite().all()


def token_losses(old_log_prob, log_prob, advantages):
    return -advantages * torch.exp(log_prob - old_log_prob)


def by_itself(old, new, adv, mask, mode, info):
    return (token_losses(old, new, adv) * mask).sum() / mask.sum()


def partly_by_itself(old, new, adv, mask, mode, info):
    return agg_loss(token_losses(old, new, adv), mask, mode, **info) + 0.1 * (new * mask).mean()


def squared(old, new, adv, mask, mode, info):
    return agg_loss(token_losses(old, new, adv), mask, mode, **info) ** 2


def larger_of_two(old, new, adv, mask, mode, info):
    return torch.maximum(agg_loss(token_losses(old, new, adv), mask, mode), agg_loss(new, mask, mode))


def divided_by_its_own_value(old, new, adv, mask, mode, info):
    loss = agg_loss(token_losses(old, new, adv), mask, mode, **info)
    return loss / loss.detach().abs()


def scaled_by_the_micro_batch(old, new, adv, mask, mode, info):
    return agg_loss(token_losses(old, new, adv), mask, mode, **info) * mask.sum()


def normalised_inside_the_micro_batch(old, new, adv, mask, mode, info):
    return agg_loss(token_losses(old, new, (adv - adv.mean()) / adv.std()), mask, mode, **info)


def random_tokens(old, new, adv, mask, mode, info):
    return agg_loss(token_losses(old, new, adv) * torch.rand(new.shape), mask, mode, **info)


def another_mode(old, new, adv, mask, mode, info):
    return agg_loss(token_losses(old, new, adv), mask, "seq-mean-token-mean", **info)


def one_loss_per_sequence(old, new, adv, mask, mode, info):
    return agg_loss(token_losses(old, new, adv).mean(-1), mask, mode, **info)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (by_itself, "does not come from agg_loss"),
        (partly_by_itself, "another way than through agg_loss"),
        (squared, "not a sum of multiples"),
        (larger_of_two, "not linear"),
        (divided_by_its_own_value, "not linear"),
        (scaled_by_the_micro_batch, "changes with its micro-batch"),
        (normalised_inside_the_micro_batch, "changes with its micro-batch"),
        (random_tokens, "or is random"),
        (another_mode, "set the key to seq-mean-token-mean"),
        (one_loss_per_sequence, "one loss per token is needed"),
    ],
)
def test_a_loss_whose_gradient_would_depend_on_the_split_is_refused_before_training(body, reason):
    @register_policy_loss("broken")
    def broken(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        loss = body(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config.global_batch_info)
        return loss, {}

    with pytest.raises(ConfigError, match=f"'broken' cannot be used.*{reason}.*agg_loss"):
        losses.make_actor_loss(config_for("broken"))


def test_a_loss_may_mask_tokens_out_and_the_divisor_stays():
    def only_positive(old, new, adv, mask, mode, info):
        return agg_loss(token_losses(old, new, adv), mask * (adv > 0), mode, **info)

    @register_policy_loss("only_positive")
    def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        return only_positive(
            old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config.global_batch_info
        ), {}

    batch = with_weights("token-mean")
    _, weighted, _ = gradient(losses.make_actor_loss(config_for("only_positive")), batch)
    every = token_losses(batch["old_logprobs"], batch["logprobs"], batch["advantages"])
    expected = (every * batch["loss_mask"] * (batch["advantages"] > 0)).sum() / batch["loss_mask"].sum()
    torch.testing.assert_close(weighted.sum(), expected)


def test_the_probe_leaves_the_random_stream_alone():
    register_policy_loss("outside_ppo")(outside_ppo)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    losses.make_actor_loss(config_for("outside_ppo"))
    assert torch.equal(torch.rand(3), expected)


def test_the_vanilla_loss_of_the_door_inside_an_outside_loss_equals_the_built_in_one():
    @register_policy_loss("wrapped")
    def wrapped(**kwargs):
        return core_algos.compute_policy_loss_vanilla(**kwargs)

    batch = with_weights("seq-mean-token-mean")
    wrapped_gradient, _, metrics = gradient(losses.make_actor_loss(config_for("wrapped", "seq-mean-token-mean")), batch)
    ours, _, _ = gradient(losses.make_actor_loss(config_for("vanilla", "seq-mean-token-mean")), batch)
    torch.testing.assert_close(wrapped_gradient, ours)
    assert {"pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"} <= metrics.keys()


def test_registering_twice_is_an_error_for_another_function_only():
    register_adv_est("outside_grpo")(outside_grpo)
    register_adv_est("outside_grpo")(outside_grpo)
    register_policy_loss("outside_ppo")(outside_ppo)
    register_policy_loss("outside_ppo")(outside_ppo)
    assert get_adv_estimator_fn("outside_grpo") is outside_grpo
    assert get_policy_loss_fn("outside_ppo") is outside_ppo
    with pytest.raises(ConfigError, match="already registered"):
        register_adv_est("grpo")(outside_grpo)
    with pytest.raises(ConfigError, match="already registered"):
        register_policy_loss("vanilla")(outside_ppo)
    with pytest.raises(ConfigError, match="has no padded form"):
        get_adv_estimator_fn(AdvantageEstimator.OPTIMAL_TOKEN_BASELINE)


@pytest.mark.parametrize("mode", PADDED_AGG_MODES)
def test_agg_loss_outside_a_registered_loss_equals_our_weights(mode):
    batch = random_batch()
    losses_T = torch.randn(batch.num_tokens, dtype=torch.float64) * batch["loss_mask"]
    mask = padded_by_hand(batch, "loss_mask").long()
    rows = padded_by_hand(batch.with_columns(x=losses_T), "x")
    expected = (losses_T * loss_weights(batch, mode, 9, torch.float64)).sum()
    torch.testing.assert_close(agg_loss(rows, mask, mode, loss_scale_factor=9), expected)


def test_the_padded_value_loss_is_half_the_larger_squared_error():
    vpreds, values = torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[0.0, 3.0, 0.0]])
    loss, clipfrac = core_algos.compute_value_loss(
        vpreds, torch.tensor([[2.0, 2.0, 0.0]]), values, torch.tensor([[1, 1, 0]]), cliprange_value=0.5
    )
    assert float(loss) == pytest.approx(0.5 * ((0.5 - 2.0) ** 2 + 1.0) / 2)
    assert float(clipfrac) == 0.5


def test_a_published_loss_may_assert_the_class_of_its_config():
    from verl.workers.config import ActorConfig as PublishedActorConfig

    @register_policy_loss("asserts")
    def asserts(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **kwargs):
        assert isinstance(config, PublishedActorConfig) and "global_batch_info" in config
        assert config.get("clip_ratio") == config["clip_ratio"] == config.clip_ratio == 0.3
        losses = token_losses(old_log_prob, log_prob, advantages)
        return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}

    config = ActorConfig(
        strategy="fsdp", rollout_n=4, clip_ratio=0.3, policy_loss=PolicyLossConfig(loss_mode="asserts")
    )
    assert config.rollout_n == 4 and losses.make_actor_loss(config) is not None


def test_a_plain_enum_member_registers_under_its_value():
    class Mine(Enum):
        OURS = "ours_by_enum"

    register_adv_est(Mine.OURS)(outside_grpo)
    assert get_adv_estimator_fn("ours_by_enum") is get_adv_estimator_fn(Mine.OURS) is outside_grpo


def test_names_that_are_unknown_or_taken_are_value_errors():
    for get in (get_adv_estimator_fn, get_policy_loss_fn):
        with pytest.raises(ValueError, match="nothing_like_it"):
            get("nothing_like_it")
    with pytest.raises(ValueError, match="'gspo' works on packed batches"):
        get_policy_loss_fn("gspo")
    with pytest.raises(ValueError, match="'grpo' is already registered"):
        register_adv_est("grpo")(outside_grpo)
    with pytest.raises(ValueError, match="'vanilla' is already registered"):
        register_policy_loss("vanilla")(outside_ppo)


def test_an_outside_loss_gets_the_importance_weights_and_they_are_not_applied_twice():
    @register_policy_loss("weighed")
    def weighed(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        token_loss = -advantages * log_prob
        token_loss = token_loss if rollout_is_weights is None else token_loss * rollout_is_weights
        return agg_loss(token_loss, response_mask, loss_agg_mode), {}

    batch = with_weights("token-mean").with_columns(rollout_is_weights=weights_of(random_batch()))
    loss = losses.make_actor_loss(config_for("weighed"), correction=RolloutCorrectionConfig(rollout_is="token"))
    leaf = batch["logprobs"].clone().requires_grad_()
    loss({"logprobs": leaf}, batch.token_columns, batch.cu_seqlens)[0].sum().backward()
    expected = -batch["advantages"] * batch["rollout_is_weights"] * batch["loss_weights"]
    torch.testing.assert_close(leaf.grad, expected.to(leaf.dtype), rtol=1e-10, atol=1e-12)
    assert not losses.get_policy_loss("weighed").function.ignores_weights(config_for("weighed"))


def test_a_loss_of_another_form_is_refused_with_what_it_lacks():
    @register_policy_loss("older")
    def older(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None):
        return agg_loss(token_losses(old_log_prob, log_prob, advantages), response_mask, loss_agg_mode), {}

    @register_policy_loss("bare")
    def bare(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        return agg_loss(token_losses(old_log_prob, log_prob, advantages), response_mask, loss_agg_mode)

    for name, said in {
        "older": "cannot be called: .*'rollout_is_weights'.*add what is missing",
        "bare": r".*returned Tensor; it must return \(loss, metrics",
    }.items():
        with pytest.raises(ConfigError, match=f"'{name}' {said}"):
            losses.make_actor_loss(config_for(name))
