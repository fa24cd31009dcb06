"""Losses of pairs against formulas of their papers, written out for one pair, and their gradients."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from verl.algorithms.aggregation import loss_weights
from verl.algorithms.preferences import PREFERENCE_LOSSES, DPOLoss, RewardModelLoss
from verl.config import PreferenceLossConfig
from verl.data.batch import Batch
from verl.data.trajectory import Trajectory
from verl.utils.errors import RegistryError

LENGTHS = ((4, 7), (6, 3), (5, 5), (2, 8))  # answer tokens of the chosen and the rejected answer of each pair
MARGINS = (0.0, 1.0, 0.25, 0.0)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# name -> (config, loss of one pair, d loss / d reward margin), of the reward margin less the row's margin
FORMULAS = {
    "sigmoid": ({}, lambda m: -log_sigmoid(m), lambda m: -sigmoid(-m)),
    "sigmoid, smoothed": (
        {"label_smoothing": 0.2},
        lambda m: -0.8 * log_sigmoid(m) - 0.2 * log_sigmoid(-m),
        lambda m: -0.8 * sigmoid(-m) + 0.2 * sigmoid(m),
    ),
    "ipo": ({}, lambda m: (m / 0.5 - 1) ** 2, lambda m: 2 * (m / 0.5 - 1) / 0.5),
    "hinge": ({}, lambda m: max(0.0, 1 - m), lambda m: -1.0 if m < 1 else 0.0),
    "simpo": ({"gamma": 0.7}, lambda m: -log_sigmoid(m - 0.7), lambda m: -sigmoid(0.7 - m)),
}


def config_of(name: str) -> PreferenceLossConfig:
    return PreferenceLossConfig(name=name.split(",")[0], beta=0.5, **FORMULAS[name][0])


@pytest.fixture
def batch() -> Batch:
    """Four pairs out of order: a rejected answer may come first."""
    rows = []
    for pair, lengths in enumerate(LENGTHS):
        for answer, length in enumerate(lengths):
            mask = torch.arange(length + 3) >= 3
            tokens = torch.arange(length + 3)
            reward = MARGINS[pair] if answer == 0 else 0.0
            rows.append(Trajectory(tokens, mask, torch.zeros(length + 3), group_id=10 - pair, reward=reward))
    whole = Batch.pack(rows).with_columns(preferred=torch.arange(len(rows)) % 2 == 0)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(whole.num_tokens, generator=generator, dtype=torch.float64) * whole["loss_mask"]
    whole = whole.with_columns(ref_logprobs=noise, loss_weights=weights_of(whole))
    return whole.select([5, 2, 0, 7, 3, 1, 4, 6])


def weights_of(batch: Batch) -> Tensor:
    return loss_weights(batch, "seq-mean-token-mean", dtype=torch.float64)


def random_logprobs(batch: Batch, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64) * batch["loss_mask"]


def total(loss: DPOLoss | RewardModelLoss, values: Tensor, batch: Batch) -> Tensor:
    columns = {name: batch.token_column(name) for name in loss.columns}
    return loss({loss.outputs[0]: values}, columns, batch.cu_seqlens)[0].masked_fill(~batch["loss_mask"], 0.0).sum()


def naive_rewards(name: str, values: Tensor, batch: Batch) -> list[float]:
    """One sequence at a time."""
    out = []
    for start, stop in pairwise(batch.cu_seqlens.tolist()):
        trained = [t for t in range(start, stop) if batch["loss_mask"][t]]
        if name == "simpo":
            out.append(0.5 * sum(float(values[t]) for t in trained) / len(trained))
        else:
            out.append(0.5 * sum(float(values[t] - batch["ref_logprobs"][t]) for t in trained))
    return out


def naive_margins(rewards: list[float], batch: Batch) -> dict[int, float]:
    """By group: reward of the chosen answer less that of the rejected one, less the row's margin."""
    out = dict.fromkeys(batch["group_ids"].tolist(), 0.0)
    for i, group in enumerate(batch["group_ids"].tolist()):
        sign = 1 if batch["preferred"][i] else -1
        out[group] += sign * (rewards[i] - float(batch["rewards"][i]))
    return out


@pytest.mark.parametrize("name", FORMULAS)
def test_the_loss_of_a_policy_and_its_gradient_are_those_of_the_paper(batch: Batch, name: str):
    """d loss / d log p(t) = +-beta / P x slope, per token also / length with simpo; by hand, and by differences."""
    loss, (_, formula, slope) = DPOLoss(config_of(name)), FORMULAS[name]
    logprobs = random_logprobs(batch).requires_grad_()
    value = total(loss, logprobs, batch)
    margins = naive_margins(naive_rewards(loss.config.name, logprobs.detach(), batch), batch)
    assert float(value.detach()) == pytest.approx(sum(map(formula, margins.values())) / len(LENGTHS), abs=1e-10)
    (gradient,) = torch.autograd.grad(value, logprobs)
    expected = torch.zeros_like(gradient)
    for i, (start, stop) in enumerate(pairwise(batch.cu_seqlens.tolist())):
        length = int(batch["loss_mask"][start:stop].sum())
        sign = 1 if batch["preferred"][i] else -1
        scale = 0.5 * sign / len(LENGTHS) / (length if name == "simpo" else 1)
        expected[start:stop] = scale * slope(margins[int(batch["group_ids"][i])])
    expected *= batch["loss_mask"]
    gradient = gradient * batch["loss_mask"]  # the head gives zeros without gradient elsewhere
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-10)
    for t in torch.nonzero(batch["loss_mask"])[::5, 0].tolist():
        step = torch.zeros_like(gradient)
        step[t] = 1e-6
        plus, minus = (total(loss, logprobs.detach() + sign * step, batch) for sign in (1, -1))
        assert float(plus - minus) / 2e-6 == pytest.approx(float(gradient[t]), abs=1e-6)


@pytest.mark.parametrize("name", FORMULAS)
def test_the_loss_of_a_reward_model_is_that_of_its_scores(batch: Batch, name: str):
    """Every token but one is masked out; the margin of the row is taken off."""
    last = torch.zeros_like(batch["loss_mask"])
    last[batch.cu_seqlens[1:] - 1] = True
    batch = batch.with_columns(loss_mask=last)
    batch = batch.with_columns(loss_weights=weights_of(batch))
    scores = random_logprobs(batch)
    margins = naive_margins(scores[last].tolist(), batch)
    expected = sum(map(FORMULAS[name][1], margins.values())) / len(LENGTHS)
    assert float(total(RewardModelLoss(config_of(name)), scores, batch)) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "hinge"])
def test_a_policy_that_is_its_reference_has_the_closed_form(batch: Batch, name: str):
    batch = batch.with_columns(rewards=torch.zeros(batch.num_sequences))
    expected = {"sigmoid": math.log(2), "ipo": 1.0, "hinge": 1.0}[name]  # (1 / (2 x 0.5))^2 for ipo
    value = total(DPOLoss(config_of(name)), batch["ref_logprobs"], batch)
    assert float(value) == pytest.approx(expected, abs=1e-12)


def test_the_sum_does_not_depend_on_the_order_or_the_cut(batch: Batch):
    loss, logprobs = DPOLoss(config_of("sigmoid")), random_logprobs(batch)
    batch = batch.with_columns(logprobs=logprobs)
    whole = float(total(loss, logprobs, batch))
    for parts in ([[0, 6, 1, 4], [7, 3, 5, 2]], [[6, 0], [4, 2, 1, 3, 5, 7]]):
        pieces = [batch.select(part) for part in parts]
        assert all(len(set(p["group_ids"].tolist())) == p.num_sequences // 2 for p in pieces)
        assert sum(float(total(loss, p["logprobs"], p)) for p in pieces) == pytest.approx(whole, abs=1e-12)


def test_the_metrics_are_means_over_pairs(batch: Batch):
    logprobs = random_logprobs(batch)
    values = DPOLoss(config_of("sigmoid")).metrics({"logprobs": logprobs}, batch).values()
    rewards, preferred = torch.tensor(naive_rewards("sigmoid", logprobs, batch)), batch["preferred"]
    no_margin = batch.with_columns(rewards=torch.zeros(batch.num_sequences))
    margins = torch.tensor(list(naive_margins(rewards.tolist(), no_margin).values()))
    assert values["rewards/chosen"] == pytest.approx(float(rewards[preferred].mean()))
    assert values["rewards/rejected"] == pytest.approx(float(rewards[~preferred].mean()))
    assert values["rewards/margins"] == pytest.approx(float(margins.mean()))
    assert values["rewards/accuracies"] == float((margins > 0).double().mean()) not in (0, 1)
    assert values["logps/chosen"] == pytest.approx(float(batch.sum_per_sequence(logprobs)[preferred].mean()))


def test_large_margins_are_finite(batch: Batch):
    for name in FORMULAS:
        logprobs = (random_logprobs(batch) * 1e4).requires_grad_()
        value = total(DPOLoss(config_of(name)), logprobs, batch)
        (gradient,) = torch.autograd.grad(value, logprobs)
        assert value.isfinite() and gradient.isfinite().all(), name


def test_an_unknown_loss_is_refused_with_the_known_names():
    with pytest.raises(RegistryError, match="unknown preference loss 'dpo'"):
        DPOLoss(PreferenceLossConfig(name="dpo"))
    assert {"sigmoid", "ipo", "hinge", "simpo"} <= set(PREFERENCE_LOSSES.names())
