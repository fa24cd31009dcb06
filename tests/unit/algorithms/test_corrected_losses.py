"""Losses on corrected mini-batches against their definition in verl.commands.certify.formulas."""

import itertools
import math

import pytest
import torch

from tests.unit.algorithms.test_rollout_correction import pair, settings
from verl.algorithms.aggregation import loss_weights
from verl.algorithms.losses import make_actor_loss
from verl.algorithms.rollout_correction import correct
from verl.commands.certify import formulas
from verl.config import ActorConfig, PolicyLossConfig, RolloutCorrectionConfig
from verl.config.algorithm import LOSS_AGG_MODES
from verl.data.batch import Batch

LOW, HIGH, C = 0.2, 0.3, 3.0


def loss_config(mode: str) -> ActorConfig:
    return ActorConfig(
        policy_loss=PolicyLossConfig(loss_mode=mode), clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=C
    )


MODES = {  # loss_mode, correction
    "decoupled": ("vanilla", {"rollout_is": "token"}),
    "decoupled sequence": ("gspo", {"rollout_is": "sequence", "rollout_is_threshold": "0.5_1.5"}),
    "geometric": ("geo_mean", {"rollout_is": "token"}),
    "reinforce": ("bypass_mode", {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}),
    "ppo_clip": ("bypass_mode", {"bypass_mode": True, "rollout_is": "token"}),
}
REJECTION = {"rollout_rs": "token_k2,seq_max_k3", "rollout_rs_threshold": "0.09,0.3"}


def corrected(case: str, agg: str, seed: int = 5) -> tuple[Batch, torch.Tensor, RolloutCorrectionConfig]:
    """A mini-batch ready for the loss, the policy's log-probs, and the correction."""
    config, (batch, logprobs) = settings(**MODES[case][1], **REJECTION), pair(seed)
    batch, _ = correct(batch, logprobs, config)
    old = batch["rollout_logprobs"] if config.bypass_mode else logprobs
    weights = loss_weights(batch, agg, 9.0, torch.float64)
    return batch.with_columns(old_logprobs=old, loss_weights=weights), logprobs, config


def weighted_loss(case: str, batch: Batch, logprobs: torch.Tensor, config: RolloutCorrectionConfig) -> torch.Tensor:
    loss = make_actor_loss(loss_config(MODES[case][0]), correction=config)
    columns = {n: batch[n] for n in (*loss.columns, *loss.optional_columns) if n in batch}
    return loss({"logprobs": logprobs}, columns, batch.cu_seqlens)[0].sum()


def by_definition(case: str, batch: Batch, logprobs: torch.Tensor, config: RolloutCorrectionConfig, agg: str):
    """Loops over answers and their kept tokens; a rejected token counts in no mean."""
    start, rows, groups = batch.cu_seqlens.tolist(), [], []
    for i, (a, b) in enumerate(itertools.pairwise(start)):
        kept = [t for t in range(a, b) if batch["loss_mask"][t]]
        if not kept:
            continue
        x, old, adv = ([c[t] for t in kept] for c in (logprobs, batch["old_logprobs"], batch["advantages"]))
        if case == "decoupled sequence":
            row = formulas.gspo(x, old, adv, LOW, HIGH)
        elif case == "geometric":
            log_weights = [math.log(batch["rollout_is_weights"][t]) for t in kept]
            weight = math.exp(math.fsum(log_weights) / len(kept))
            rows.append(torch.stack([weight * formulas.geo_mean(x, old, adv, LOW, HIGH)] * len(kept)))
            groups.append(int(batch["group_ids"][i]))
            continue
        elif case == "reinforce":
            row = [formulas.policy_gradient(*pair_) for pair_ in zip(x, adv, strict=True)]
        else:
            row = [formulas.vanilla(*three, LOW, HIGH, C) for three in zip(x, old, adv, strict=True)]
        if config.weighs_loss:
            row = [one * batch["rollout_is_weights"][t] for one, t in zip(row, kept, strict=True)]
        rows.append(torch.stack(row))
        groups.append(int(batch["group_ids"][i]))
    return formulas.aggregated(rows, groups, agg, 9.0)


def gradient(function, logprobs: torch.Tensor) -> torch.Tensor:
    leaf = logprobs.clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)[0]


@pytest.mark.parametrize("agg", LOSS_AGG_MODES)
@pytest.mark.parametrize("case", MODES)
def test_loss_and_gradient_equal_the_definition_over_the_tokens_that_are_kept(case, agg):
    batch, logprobs, config = corrected(case, agg)
    assert batch["rejected_tokens"].any() and batch["loss_mask"].any()
    value, expected = weighted_loss(case, batch, logprobs, config), by_definition(case, batch, logprobs, config, agg)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    ours = gradient(lambda x: weighted_loss(case, batch, x, config), logprobs)
    theirs = gradient(lambda x: by_definition(case, batch, x, config, agg), logprobs)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert (ours != 0).any() and (ours[~batch["loss_mask"]] == 0).all()


def test_the_gradient_of_reinforce_is_minus_weight_times_advantage():
    batch, logprobs, config = corrected("reinforce", "token-mean")
    ours = gradient(lambda x: weighted_loss("reinforce", batch, x, config), logprobs)
    by_hand = [
        -min(math.exp(float(logprobs[t] - batch["rollout_logprobs"][t])), 2.0) * float(batch["advantages"][t])
        if batch["loss_mask"][t]
        else 0.0
        for t in range(batch.num_tokens)
    ]
    expected = torch.tensor(by_hand, dtype=torch.float64) / int(batch["loss_mask"].sum())
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", MODES)
def test_the_metric_of_the_policy_loss_is_the_loss_that_is_trained(case):
    batch, logprobs, config = corrected(case, "token-mean")
    loss = make_actor_loss(loss_config(MODES[case][0]), correction=config)
    weighted, metrics = loss({"logprobs": logprobs}, batch.token_columns, batch.cu_seqlens)
    torch.testing.assert_close(metrics["pg_loss"] * batch["loss_weights"], weighted, rtol=1e-12, atol=0)


def test_loss_type_is_of_bypass_mode_alone():
    batch, logprobs, _ = corrected("ppo_clip", "token-mean")
    plain, reinforce = (
        make_actor_loss(loss_config("vanilla"), correction=settings(loss_type=name, rollout_is="token"))(
            {"logprobs": logprobs + 0.4}, batch.with_columns(rollout_is_weights=batch["advantages"]).token_columns, None
        )[0]
        for name in ("ppo_clip", "reinforce")
    )
    assert torch.equal(plain, reinforce) and plain.any()


@pytest.mark.parametrize("parts", [[[0, 1, 2], [3, 4, 5]], [[5], [0], [3], [1, 2], [4]], [[4, 2, 0, 5, 3, 1]]])
@pytest.mark.parametrize("case", MODES)
def test_no_cut_into_micro_batches_and_no_order_changes_the_gradient(case, parts):
    batch, logprobs, config = corrected(case, "seq-mean-token-mean")
    batch = batch.with_columns(token_indices=torch.arange(batch.num_tokens), now=logprobs)
    whole = gradient(lambda x: weighted_loss(case, batch, x, config), logprobs)
    summed = torch.zeros_like(whole)
    for indices in parts:
        part = batch.select(torch.tensor(indices))
        summed[part["token_indices"]] = gradient(lambda x, part=part: weighted_loss(case, part, x, config), part["now"])
    torch.testing.assert_close(summed, whole, rtol=1e-10, atol=1e-12)


def test_a_loss_that_is_weighed_needs_the_weights():
    loss = make_actor_loss(loss_config("vanilla"), correction=settings(rollout_is="token"))
    assert "rollout_is_weights" in loss.columns
    for plain in (None, settings(bypass_mode=True, rollout_is="token")):
        assert "rollout_is_weights" not in make_actor_loss(loss_config("vanilla"), correction=plain).columns
