import pytest
import torch

from tests.unit.algorithms.algorithm_cases import column_by_sequence, random_batch
from verl.algorithms.aggregation import loss_weights
from verl.commands.certify import formulas
from verl.config.algorithm import LOSS_AGG_MODES
from verl.utils.errors import ConfigError


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_weighted_sum_equals_the_definition_of_the_mode(mode):
    batch = random_batch()
    losses = torch.randn(batch.num_tokens, dtype=torch.float64)
    weights = loss_weights(batch, mode, loss_scale_factor=9, dtype=torch.float64)
    columns = (column_by_sequence(batch.with_columns(x=losses), "x"), column_by_sequence(batch, "loss_mask"))
    rows = [torch.tensor(row, dtype=torch.float64)[torch.tensor(mask)] for row, mask in zip(*columns, strict=True)]
    definition = formulas.aggregated(rows, batch["group_ids"].tolist(), mode, 9)
    assert float((weights * losses).sum()) == pytest.approx(float(definition), rel=1e-12)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_weights_are_zero_on_tokens_nobody_sampled(mode):
    batch = random_batch()
    assert (loss_weights(batch, mode, 9)[~batch["loss_mask"]] == 0).all()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_weights_follow_their_sequence_when_the_order_changes(mode):
    batch = random_batch()
    order = [4, 0, 5, 2, 1, 3]
    moved = batch.with_columns(w=loss_weights(batch, mode, 9)).select(order)
    torch.testing.assert_close(loss_weights(batch.select(order), mode, 9), moved["w"])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_batch_without_a_sampled_token_has_zero_weights(mode):
    batch = random_batch(masks=("ppp", "pp"))
    assert loss_weights(batch, mode, 9).tolist() == [0.0] * 5


def test_weights_have_the_asked_dtype_and_are_computed_in_float64():
    batch = random_batch(dtype=torch.float32)
    exact = loss_weights(batch, "seq-mean-token-mean", dtype=torch.float64)
    assert loss_weights(batch, "seq-mean-token-mean").dtype == torch.float32
    assert float(exact.sum()) == pytest.approx(1.0, abs=1e-15)


def test_unknown_mode_and_missing_divisor_say_what_to_do():
    with pytest.raises(ConfigError, match="did you mean 'token-mean'"):
        loss_weights(random_batch(), "token_mean")
    with pytest.raises(ConfigError, match="max_response_length"):
        loss_weights(random_batch(), "seq-mean-token-sum-norm")
