"""The scale of the critic's targets equals its closed form in float64, and its loss that of the unscaled values."""

import json

import pytest
import torch

from tests.unit.algorithms.algorithm_cases import random_batch
from verl.algorithms.losses import make_value_loss
from verl.algorithms.value_normalization import RATE, SMALLEST_DEVIATION, ReturnScale
from verl.config import CriticConfig


def seen(*batches):
    scale = ReturnScale()
    for batch in batches:
        scale.observe(batch)
    return scale


def test_the_scale_is_the_weighted_mean_and_deviation_of_the_returns_of_the_steps():
    batches = [random_batch(seed) for seed in range(4)]
    returns = [batch["returns"][batch["loss_mask"]].double() * 3 + 7 for batch in batches]
    batches = [b.with_columns(returns=(b["returns"] * 3 + 7) * b["loss_mask"]) for b in batches]
    weights = torch.tensor([(1 - RATE) ** (3 - i) for i in range(4)], dtype=torch.float64)
    weights = weights / weights.sum()
    mean = sum(w * r.mean() for w, r in zip(weights, returns, strict=True))
    variance = sum(w * (r - mean).square().mean() for w, r in zip(weights, returns, strict=True))
    scale = seen(*batches)
    assert scale.mean == pytest.approx(float(mean), rel=1e-12)
    assert scale.deviation == pytest.approx(float(variance.sqrt()), rel=1e-12)


def test_one_step_gives_its_own_mean_and_deviation():
    batch = random_batch()
    returns, scale = batch["returns"][batch["loss_mask"]], seen(batch)
    assert scale.mean == pytest.approx(float(returns.mean()), rel=1e-12)
    assert scale.deviation == pytest.approx(float(returns.std(unbiased=False)), rel=1e-12)


def test_before_the_first_step_nothing_is_scaled_and_tokens_nobody_sampled_are_zero():
    batch, mask = random_batch(), random_batch()["loss_mask"]
    ones = torch.ones(batch.num_tokens, dtype=torch.float64)
    for column in (ReturnScale().restore(ones, batch), ReturnScale().normalize(ones, batch)):
        assert (column[mask] == 1).all() and (column[~mask] == 0).all()
    scale = seen(batch)
    assert (scale.restore(ones, batch)[~mask] == 0).all() and (scale.normalize(ones, batch)[~mask] == 0).all()


def test_values_are_restored_to_what_they_were():
    batch = random_batch()
    scale = seen(batch)
    there_and_back = scale.restore(scale.normalize(batch["values"], batch), batch)
    torch.testing.assert_close(there_and_back, batch["values"], rtol=1e-12, atol=1e-12)


def test_targets_hold_the_critics_own_predictions_and_returns_of_mean_0_and_deviation_1():
    first, batch = random_batch(1), random_batch(2)
    scale = seen(first)
    predicted = torch.randn(batch.num_tokens, dtype=torch.float64) * batch["loss_mask"]
    targets = ReturnScale()
    targets.load_state_dict(scale.state_dict())
    made = targets.update_and_normalize(batch.with_columns(values=scale.restore(predicted, batch)))
    torch.testing.assert_close(made["values"], predicted, rtol=1e-12, atol=1e-12)
    scale.observe(batch)
    expected = (batch["returns"] - scale.mean) / scale.deviation * batch["loss_mask"]
    torch.testing.assert_close(made["returns"], expected, rtol=1e-12, atol=1e-12)
    fresh = ReturnScale().update_and_normalize(batch)["returns"][batch["loss_mask"]]
    assert float(fresh.mean()) == pytest.approx(0, abs=1e-12)
    assert float(fresh.std(unbiased=False)) == pytest.approx(1, rel=1e-12)


def test_the_loss_is_that_of_the_restored_values_divided_by_the_variance():
    batch = random_batch()
    scale = seen(batch)
    new = torch.randn(batch.num_tokens, dtype=torch.float64)
    weights = torch.rand(batch.num_tokens, dtype=torch.float64) * batch["loss_mask"]

    def loss(values, columns, clip):
        made = make_value_loss(CriticConfig(cliprange_value=clip))
        return made({"values": values}, {**columns, "loss_weights": weights, "loss_mask": batch["loss_mask"]}, None)[0]

    small = {name: scale.normalize(batch[name], batch) for name in ("values", "returns")}
    large = {name: batch[name] for name in ("values", "returns")}
    ours = loss(new, small, 0.5)
    theirs = loss(new * scale.deviation + scale.mean, large, 0.5 * scale.deviation)
    torch.testing.assert_close(ours * scale.deviation**2, theirs, rtol=1e-10, atol=1e-12)


def test_equal_returns_and_steps_without_a_sampled_token_keep_the_scale_finite():
    batch = random_batch()
    equal = batch.with_columns(returns=2.0 * batch["loss_mask"].double())
    scale = seen(equal)
    assert (scale.mean, scale.deviation) == (pytest.approx(2.0), SMALLEST_DEVIATION)
    assert scale.normalize(equal["returns"], equal).abs().max() < 1e-6
    before = scale.state_dict()
    scale.observe(random_batch(masks=("ppp", "pp")))
    assert scale.state_dict() == before


def test_the_state_survives_json_bit_by_bit():
    scale, loaded = seen(*map(random_batch, range(3))), ReturnScale()
    loaded.load_state_dict(json.loads(json.dumps(scale.state_dict())))
    assert (loaded.mean, loaded.deviation) == (scale.mean, scale.deviation)
