"""Advantage estimators from outside, for padded (bs, T) tensors, on packed batches."""

import numpy as np
import pytest
import torch

from tests.unit.algorithms.algorithm_cases import random_batch
from tests.unit.trainer.padded_cases import outside_grpo, padded_by_hand, weights_of
from verl.algorithms import advantages
from verl.algorithms.advantages import ADVANTAGES, compute_advantages, with_token_rewards
from verl.config import AlgorithmConfig
from verl.data.batch import Batch
from verl.doors import core_algos
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, register_adv_est
from verl.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def forget_what_a_test_registers(monkeypatch):
    monkeypatch.setattr(ADVANTAGES, "_items", dict(ADVANTAGES._items))
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", dict(core_algos.ADV_ESTIMATOR_REGISTRY))


def test_an_outside_estimator_equals_our_grpo_on_packed_batches():
    register_adv_est("outside_grpo")(outside_grpo)
    batch = with_token_rewards(random_batch(masks=("pps", "ppsssspppsss", "pssp", "psssssssp", "pssspsp", "ppppsssss")))
    ours = compute_advantages(batch, AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False))
    theirs = compute_advantages(batch, AlgorithmConfig(adv_estimator="outside_grpo"))
    torch.testing.assert_close(theirs["advantages"], ours["advantages"])
    torch.testing.assert_close(theirs["returns"], ours["returns"])


def test_an_outside_estimator_gets_what_it_names_and_its_masked_values_are_dropped():
    seen = {}

    @register_adv_est("curious")
    def curious(token_level_rewards, response_mask, config, values, gamma, lam):
        seen.update(values=values, gamma=gamma, adv_estimator=config["adv_estimator"], mask=response_mask)
        return torch.ones_like(values), torch.full_like(values, 2.0)

    batch = with_token_rewards(random_batch())
    out = compute_advantages(batch, AlgorithmConfig(adv_estimator="curious", gamma=0.5))
    torch.testing.assert_close(out["advantages"], batch["loss_mask"].double())
    torch.testing.assert_close(out["returns"], 2 * batch["loss_mask"].double())
    width = seen["values"].shape[1]
    torch.testing.assert_close(seen["values"], padded_by_hand(batch, "values")[:, :width])
    assert (seen["gamma"], seen["adv_estimator"], width) == (0.5, "curious", 10)


def test_an_estimator_that_cannot_be_served_or_returns_another_shape_is_told_why():
    @register_adv_est("needs_more")
    def needs_more(token_level_rewards, response_mask, reward_baselines):
        raise AssertionError("not called")

    @register_adv_est("sums")
    def sums(token_level_rewards, response_mask, **kwargs):
        assert kwargs.keys() == {"config", "index"}
        return token_level_rewards.sum(-1), token_level_rewards.sum(-1)

    batch = with_token_rewards(random_batch())
    with pytest.raises(ConfigError, match=r"needs \['reward_baselines'\].*available: \["):
        compute_advantages(batch, AlgorithmConfig(adv_estimator="needs_more"))
    with pytest.raises(ConfigError, match=r"'sums' returned \[\(6,\), \(6,\)\].*\(6, 10\)"):
        compute_advantages(batch, AlgorithmConfig(adv_estimator="sums"))


def test_padded_built_ins_equal_the_packed_ones():
    masks = ("pssss", "pspps", "psssp")
    batch = with_token_rewards(random_batch(masks=masks))
    shape = (len(masks), 5)
    rewards, values, mask = (batch[n].view(shape) for n in ("token_rewards", "values", "loss_mask"))
    ours = compute_advantages(batch, AlgorithmConfig(adv_estimator="gae", gamma=0.9, lam=0.8))
    theirs = get_adv_estimator_fn("gae")(rewards, values, mask.long(), 0.9, 0.8)
    torch.testing.assert_close(theirs[0], ours["advantages"].view(shape))
    torch.testing.assert_close(theirs[1], ours["returns"].view(shape))
    index = np.array(["a", "a", "b"], dtype=object)
    ours = compute_advantages(batch, AlgorithmConfig(adv_estimator="grpo"))
    torch.testing.assert_close(
        get_adv_estimator_fn("grpo")(rewards, mask.long(), index)[0].flatten(), ours["advantages"]
    )


def test_an_estimator_gets_weights_squares_arrays_and_the_padded_batch_by_name():
    seen = {}

    @register_adv_est("curious")
    def curious(
        token_level_rewards,
        response_mask,
        rollout_is_weights,
        sum_pi_squared,
        reward_baselines,
        non_tensor_batch,
        batch,
    ):
        seen.update(locals())
        return token_level_rewards * response_mask, token_level_rewards * response_mask

    config = AlgorithmConfig(adv_estimator="curious", gdpo_reward_keys=["format"])
    entry = advantages.get_advantage("curious")
    assert set(entry.columns_for(config)) == {"reward_baselines", "rollout_is_weights", "reward_parts.format"}
    assert entry.outputs == ("sum_pi_squared",)
    packed = random_batch()
    first = int(packed["loss_mask"].nonzero()[0])
    rejected = torch.zeros_like(packed["loss_mask"])
    rejected[first] = True
    packed = with_token_rewards(
        packed.with_columns(
            loss_mask=packed["loss_mask"] & ~rejected,
            rejected_tokens=rejected,
            rollout_is_weights=weights_of(packed),
            sum_pi_squared=weights_of(packed) / 3,
            reward_baselines=torch.arange(6.0),
            **{"reward_parts.format": torch.arange(6.0) / 2},
        )
    )
    advantages.compute_advantages(packed, config)
    whole = packed.with_columns(loss_mask=packed.sampled_mask())  # rows begin at the first sampled token
    width = seen["response_mask"].shape[1]

    def by_hand(of: Batch, name: str) -> torch.Tensor:
        rows = padded_by_hand(of, name)
        assert (rows[:, width:] == 0).all()
        return rows[:, :width]

    for name in ("rollout_is_weights", "sum_pi_squared"):
        torch.testing.assert_close(seen[name], by_hand(whole, name))
        torch.testing.assert_close(seen["batch"][name], seen[name])
    torch.testing.assert_close(seen["response_mask"], by_hand(whole.with_columns(m=packed["loss_mask"].long()), "m"))
    torch.testing.assert_close(seen["batch"]["responses"], by_hand(whole, "tokens"))
    torch.testing.assert_close(seen["batch"]["rollout_log_probs"], by_hand(whole, "rollout_logprobs"))
    assert seen["reward_baselines"].tolist() == [0, 1, 2, 3, 4, 5]
    assert seen["non_tensor_batch"]["format"].tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
    assert seen["non_tensor_batch"]["uid"].tolist() == packed["group_ids"].tolist()
    with pytest.raises(KeyError, match=r"no 'style' .* but format, uid; .*gdpo_reward"):
        seen["non_tensor_batch"]["style"]
