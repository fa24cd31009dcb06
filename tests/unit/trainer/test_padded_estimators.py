"""The padded estimators and the padded value loss that published code calls by name, against numbers by hand."""

import numpy as np
import pytest
import torch

from verl.config import AlgorithmConfig
from verl.trainer.ppo import core_algos
from verl.utils.errors import DataError


def test_the_value_loss_takes_the_counts_of_the_whole_mini_batch():
    columns = (
        torch.tensor([[1.0, 3.0]]),
        torch.tensor([[2.0, 2.0]]),
        torch.tensor([[1.0, 3.0]]),
        torch.tensor([[1, 1]]),
    )
    loss, _ = core_algos.compute_value_loss(*columns, 0.5, "token-mean", dp_size=2, batch_num_tokens=8)
    assert float(loss) == pytest.approx(0.5 * 2.0 / 8 * 2)


SCORES = [1.0, 0.0, 3.0, 2.0, 5.0]  # two groups of two, and a row alone
LENGTHS = [1, 3, 2, 2, 4]
INDEX = np.array(["a", "a", "b", "b", "c"], dtype=object)


def outcome(name, *middle, **kwargs):
    """(advantage on the first token of each row, all advantages, the mask) of one of the padded estimators."""
    mask = (torch.arange(4)[None] < torch.tensor(LENGTHS)[:, None]).long()
    rewards = torch.zeros(5, 4, dtype=torch.float64)
    rewards[torch.arange(5), torch.tensor(LENGTHS) - 1] = torch.tensor(SCORES, dtype=torch.float64)
    function = getattr(core_algos, f"compute_{name}_outcome_advantage")
    advantages, returns = function(rewards, *middle, response_mask=mask, **kwargs)
    assert advantages.shape == returns.shape == mask.shape and (advantages[mask == 0] == 0).all()
    return advantages[:, 0].tolist(), advantages, mask


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rloo", [1.0, -1.0, 1.0, -1.0, 5.0]),
        ("rloo_vectorized", [1.0, -1.0, 1.0, -1.0, 5.0]),
        ("opo", [1 - 1 / 4, -1 / 4, 3 - 10 / 4, 2 - 10 / 4, 5.0]),
        ("gpg", [0.5 * 5 / 4, -0.5 * 5 / 4, 0.5 * 5 / 4, -0.5 * 5 / 4, 5.0 * 5 / 4]),
        ("grpo", [0.5 / (0.5**0.5), -0.5 / (0.5**0.5)] * 2 + [5.0]),
        ("grpo_vectorized", [0.5 / (0.5**0.5), -0.5 / (0.5**0.5)] * 2 + [5.0]),
    ],
)
def test_a_padded_estimator_gives_the_numbers_of_its_formula(name, expected):
    assert outcome(name, index=INDEX)[0] == pytest.approx(expected, rel=1e-5)


def test_passk_rewards_the_lead_of_the_best_and_needs_two_rows():
    rewards, mask = torch.tensor([[1.0], [0.0], [4.0], [1.5]]), torch.ones(4, 1)
    advantages, _ = core_algos.compute_grpo_passk_outcome_advantage(
        rewards, mask, np.array([0, 0, 0, 0]), norm_adv_by_std_in_grpo=False
    )
    assert advantages.flatten().tolist() == [0, 0, 2.5, 0]
    with pytest.raises(DataError, match="row 4 is alone"):
        outcome("grpo_passk", index=INDEX)


def test_whitened_estimators_have_mean_0_and_variance_1_and_remax_subtracts_the_greedy_score():
    for name, arguments in (("reinforce_plus_plus_baseline", {"index": INDEX}), ("reinforce_plus_plus", {})):
        _, advantages, mask = outcome(name, **arguments)
        sampled = advantages[mask.bool()]
        assert float(sampled.mean()) == pytest.approx(0, abs=1e-6) and float(sampled.var()) == pytest.approx(
            1, rel=1e-5
        )
    first, _, _ = outcome("remax", torch.tensor([1.0, 1.0, 0.0, 0.0, 2.0]))
    assert first == [0.0, -1.0, 3.0, 2.0, 3.0]
    returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        torch.tensor([[1.0, 0.0, 2.0, 9.0]]), torch.tensor([[1, 0, 1, 0]]), config=AlgorithmConfig(gamma=0.5)
    )[1]
    assert returns.tolist() == [[2.0, 0.0, 2.0, 0.0]]  # what was not sampled is skipped, and not discounted
