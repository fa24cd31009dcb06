"""PF-PPO draws sequences as often as its definition says, by numbers that depend on seed, step and sequence only."""

import math

import pytest
import torch

from tests.unit.algorithms.algorithm_cases import random_batch
from verl.algorithms.policy_filtration import draw, filtration_probabilities, resample_by_score
from verl.commands.certify import formulas
from verl.config import load_config
from verl.config.algorithm import PFPPOConfig
from verl.data.random_streams import sequence_draws, token_draws
from verl.utils.errors import ConfigError, DataError
from verl.workers.engine_worker import MiniBatches

METHODS = [("pow", 2.0), ("pow", 0.5), ("pow", 0.0), ("max_min", 2.0), ("max_random", 2.0)]
SCORES = [[1.5, -0.25, 0.0, 2.0, 2.0, -3.0], [0.0, 0.0, 1.0, 1.0, 0.0, 1.0], [0.0] * 6, [-1.0] * 6]


def settings(method: str, power: float = 2.0) -> PFPPOConfig:
    return PFPPOConfig(reweight_method=method, weight_pow=power)


def scored(scores: list[float]):
    return random_batch().with_columns(rewards=torch.tensor(scores, dtype=torch.float64))


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize(("method", "power"), METHODS)
def test_the_probability_of_each_sequence_is_that_of_the_definition(method, power, scores):
    found = filtration_probabilities(torch.tensor(scores), settings(method, power))
    expected = formulas.policy_filtration(scores, method, power)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize(("method", "power"), METHODS)
def test_even_draws_choose_each_sequence_as_often_as_its_probability(method, power, scores):
    """In closed form: of the numbers (k + 1/2) / K a sequence gets K times its probability, to one number."""
    count = 30_000
    even = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    chosen = draw(filtration_probabilities(torch.tensor(scores), settings(method, power)), even)
    expected = count * torch.tensor(formulas.policy_filtration(scores, method, power))
    assert (torch.bincount(chosen, minlength=6) - expected).abs().max() <= 1


def test_hashed_draws_choose_each_sequence_as_often_as_expected():
    batch, counts, steps = scored(SCORES[0]).with_columns(group_ids=torch.arange(6)), torch.zeros(6), 400
    for step in range(steps):
        trained, _ = resample_by_score(batch, settings("pow"), sequence_draws(7, step, 6))
        counts += torch.bincount(trained["group_ids"], minlength=6)
    probability = torch.tensor(formulas.policy_filtration(SCORES[0], "pow", 2.0))
    deviation = (6 * steps * probability * (1 - probability)).sqrt()
    assert ((counts - 6 * steps * probability).abs() <= 4 * deviation).all() and counts[2] == 0


def test_a_draw_depends_on_seed_step_and_sequence_and_on_nothing_else():
    draws = sequence_draws(1, 2, 1000)
    assert torch.equal(draws[:10], sequence_draws(1, 2, 10)) and draws.min() >= 0 and draws.max() < 1
    assert abs(float(draws.mean()) - 0.5) < 4 / math.sqrt(12 * 1000)
    zeros = torch.zeros(1000, dtype=torch.int64)
    for other in (sequence_draws(1, 3, 1000), sequence_draws(2, 2, 1000), token_draws(1, 2, torch.arange(1000), zeros)):
        assert not torch.isclose(draws, other).any()


def test_whole_sequences_are_repeated_and_the_metrics_say_how_many_are_left():
    batch = scored(SCORES[0])
    trained, metrics = resample_by_score(batch, settings("max_min"), torch.tensor([0.0, 0.2, 0.4, 0.6, 0.7, 0.999]))
    assert trained["rewards"].tolist() == [2.0, 2.0, 2.0, 2.0, -3.0, -3.0]  # numbers 3, 3, 4, 4, 5, 5
    expected = batch.select([3, 3, 4, 4, 5, 5])
    assert all(torch.equal(trained[name], expected[name]) for name in ("tokens", "loss_mask", "group_ids", "rewards"))
    found = metrics.values()
    assert found == {"training/pf_ppo/distinct_sequences": 3, "training/pf_ppo/score": pytest.approx(1 / 3)}


def test_mini_batches_are_as_many_and_as_large_as_without_it():
    groups = torch.tensor([4, 4, 9, 9, 5, 5])
    batch = scored([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]).with_columns(group_ids=groups)
    trained, _ = resample_by_score(batch, settings("pow"), sequence_draws(1, 1, 6))
    assert trained["group_ids"].tolist() == [4] * 6  # of one prompt only
    minis = [mini for _, mini in MiniBatches(1, 1, shuffle=False, seed=0).split(trained, 1)]
    assert [mini.num_sequences for mini in minis] == [2, 2, 2]


def test_weights_that_no_number_can_hold_are_refused():
    with pytest.raises(DataError, match=r"weight_pow=100.0 makes weights of scores up to 10000.0"):
        filtration_probabilities(torch.tensor([1.0, -1e4]), settings("pow", 100.0))


def test_other_estimators_than_gae_are_refused():
    with pytest.raises(ConfigError, match=r"for the estimator gae only, and algorithm.adv_estimator=grpo"):
        load_config(["algorithm.use_pf_ppo=True", "algorithm.adv_estimator=grpo"])
