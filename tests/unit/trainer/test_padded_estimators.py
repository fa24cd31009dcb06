"""The padded estimators and the padded value loss that published code calls by name, against numbers by hand."""

import numpy as np
import pytest
import torch

from tests.unit.algorithms.test_estimators import by_definition
from verl.config import AlgorithmConfig
from verl.data.batch import Batch
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
        ("rloo_vectorized", [1.0, -1.0, 1.0, -1.0, 0.0]),
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
    with pytest.raises(DataError, match="1 prompts have one"):
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


PADDED_MASK = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1]])
BY_NAME = [n for n in core_algos.ADV_ESTIMATOR_REGISTRY if n not in ("gae", "remax")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mask", [PADDED_MASK, torch.ones(6, 1)], ids=["tool turns", "one token"])
@pytest.mark.parametrize("name", [*BY_NAME, "remax"])
def test_a_padded_estimator_equals_the_definition_of_its_packed_one(name, mask, dtype):
    """Also where every row has one token: what belongs to rows must not be taken for what belongs to tokens."""
    generator = torch.Generator().manual_seed(3)
    rewards = torch.randn(mask.shape, generator=generator).to(dtype) * mask
    baselines = torch.rand(6, generator=generator).to(dtype)
    numbers = torch.tensor([0, 0, 1, 1, 1, 1]) if name == "grpo_passk" else torch.tensor([0, 0, 1, 1, 1, 2])
    width, config = mask.shape[1], AlgorithmConfig(adv_estimator=name, gamma=0.8)
    middle = [] if name == "reinforce_plus_plus" else [baselines] if name == "remax" else [np.array(list("xxaaab"))]
    if name == "grpo_passk":
        middle = [np.array(list("xxaaaa"))]
    columns = {"loss_mask": mask.flatten().bool(), "token_rewards": rewards.flatten().double()}
    of_rows = {"group_ids": numbers, "reward_baselines": baselines.double()}
    expected = by_definition(name, Batch(torch.arange(7) * width, columns, of_rows), config)
    function = core_algos.ADV_ESTIMATOR_REGISTRY[name]
    order = (rewards, *middle, mask) if name == "remax" else (rewards, mask, *middle)
    found, _ = function(*order, config=config)
    assert found.dtype == dtype
    bound = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=bound, atol=bound)


def test_epsilon_and_f_norm_are_those_of_the_call():
    rewards, mask, index = torch.tensor([[1.0], [3.0]]), torch.ones(2, 1), np.array([0, 0])
    deviation = 2**0.5
    grpo, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, index, epsilon=1.0)
    assert grpo.flatten().tolist() == pytest.approx([-1 / (deviation + 1), 1 / (deviation + 1)])
    best, _ = core_algos.compute_grpo_passk_outcome_advantage(rewards, mask, index, epsilon=1.0)
    assert best.flatten().tolist() == pytest.approx([0, 2 / (deviation + 1)])
    gpg, _ = core_algos.compute_gpg_outcome_advantage(rewards, mask, index, f_norm=4.0)
    assert gpg.flatten().tolist() == pytest.approx([-0.25, 0.25])
