import math
import statistics

import pytest
import torch

from tests.unit.algorithms.algorithm_cases import column_by_sequence, random_batch
from verl.algorithms.advantages import (
    ADVANTAGES,
    Advantage,
    compute_advantages,
    discounted_suffix_sums,
    get_advantage,
    last_sampled_positions,
    with_token_rewards,
)
from verl.commands.certify import formulas
from verl.config import AlgorithmConfig
from verl.utils.errors import ConfigError, RewardError


def gae_naively(rewards, values, mask, gamma, lam):
    """arXiv 1506.02438, eq. 16 as a double loop over one sequence's sampled tokens: sum of (gamma lam)^k delta."""
    sampled = [t for t, m in enumerate(mask) if m]
    out = [0.0] * len(mask)
    for i, t in enumerate(sampled):
        for k, u in enumerate(sampled[i:]):
            after = values[sampled[i + k + 1]] if i + k + 1 < len(sampled) else 0.0
            out[t] += (gamma * lam) ** k * (rewards[u] + gamma * after - values[u])
    return out


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0), (0.0, 0.7)])
def test_gae_equals_the_naive_double_loop_with_tool_turns(gamma, lam):
    batch = random_batch()
    batch = batch.with_columns(token_rewards=torch.randn(batch.num_tokens, dtype=torch.float64) * batch["loss_mask"])
    out = compute_advantages(batch, AlgorithmConfig(adv_estimator="gae", gamma=gamma, lam=lam))
    columns = (column_by_sequence(batch, name) for name in ("token_rewards", "values", "loss_mask"))
    per_sequence = [gae_naively(r, v, m, gamma, lam) for r, v, m in zip(*columns, strict=True)]
    raw = torch.tensor([x for row in per_sequence for x in row], dtype=torch.float64)
    mask = batch["loss_mask"]
    sampled = raw[mask].tolist()
    mean, std = statistics.fmean(sampled), statistics.stdev(sampled)
    whitened = torch.tensor([(x - mean) / math.sqrt(std**2 + 1e-8) for x in sampled], dtype=torch.float64)
    torch.testing.assert_close(out["returns"], (raw + batch["values"]) * mask, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(out["advantages"][mask], whitened, rtol=1e-11, atol=1e-11)
    assert (out["advantages"][~mask] == 0).all() and (out["returns"][~mask] == 0).all()


def test_gae_ignores_what_stands_on_tokens_nobody_sampled():
    batch = with_token_rewards(random_batch())
    noise = torch.where(batch["loss_mask"], 0.0, 1e3)
    noisy = batch.with_columns(values=batch["values"] + noise, token_rewards=batch["token_rewards"] + noise)
    config = AlgorithmConfig(adv_estimator="gae", gamma=0.9, lam=0.9)
    torch.testing.assert_close(
        compute_advantages(noisy, config)["returns"], compute_advantages(batch, config)["returns"]
    )


def test_gae_of_a_sequence_does_not_depend_on_its_neighbours():
    batch = with_token_rewards(random_batch())
    config = AlgorithmConfig(adv_estimator="gae", gamma=0.9, lam=0.7)
    alone = [compute_advantages(batch.select([i]), config)["returns"] for i in range(batch.num_sequences)]
    torch.testing.assert_close(torch.cat(alone), compute_advantages(batch, config)["returns"])


def test_suffix_sums_stay_inside_their_sequence_at_every_length():
    for length in (1, 2, 3, 7, 8, 9, 33):
        sequence = torch.tensor([0] * length + [1] * 5)
        out = discounted_suffix_sums(torch.ones(length + 5, dtype=torch.float64), sequence, 0.5)
        expected = [2 - 0.5 ** (n - 1) for n in [*range(length, 0, -1), *range(5, 0, -1)]]
        assert out.tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized"])
@pytest.mark.parametrize("by_std", [True, False])
def test_grpo_equals_its_definition(name, by_std):
    batch = with_token_rewards(random_batch())
    out = compute_advantages(batch, AlgorithmConfig(adv_estimator=name, norm_adv_by_std_in_grpo=by_std))
    definition = formulas.grpo(batch["rewards"].tolist(), batch["group_ids"].tolist(), by_std)
    expected = torch.tensor(definition, dtype=torch.float64)[batch.sequence_ids()] * batch["loss_mask"]
    torch.testing.assert_close(out["advantages"], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out["returns"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("score", [0.1, 0.7, 1 / 3, 0.9])
def test_grpo_of_equal_scores_is_zero_in_float32(score):
    batch = random_batch(dtype=torch.float32).with_columns(
        rewards=torch.full((6,), score), group_ids=torch.zeros(6, dtype=torch.int64)
    )
    out = compute_advantages(with_token_rewards(batch), AlgorithmConfig(adv_estimator="grpo"))
    assert out["advantages"].dtype == torch.float32
    assert out["advantages"].abs().max() < 1e-8


def test_grpo_does_not_depend_on_the_order_of_sequences():
    batch, order = with_token_rewards(random_batch()), [5, 3, 0, 2, 4, 1]
    config = AlgorithmConfig(adv_estimator="grpo")
    moved = compute_advantages(batch, config).select(order)
    torch.testing.assert_close(compute_advantages(batch.select(order), config)["advantages"], moved["advantages"])


def test_the_reward_stands_on_the_last_sampled_token():
    batch = random_batch()
    positions = last_sampled_positions(batch) - batch.cu_seqlens[:-1]
    assert positions.tolist() == [2, 11, 3, 7, 5, 8]  # the third has no sampled token: its last token
    token_rewards = with_token_rewards(batch)["token_rewards"]
    torch.testing.assert_close(batch.sum_per_sequence(token_rewards), batch["rewards"])
    assert int((token_rewards != 0).sum()) == batch.num_sequences


def test_a_sequence_without_reward_is_an_error_not_a_zero():
    batch = random_batch()
    rewards = batch["rewards"].clone()
    rewards[3] = float("nan")
    with pytest.raises(RewardError, match="1 of 6 sequences have no reward"):
        with_token_rewards(batch.with_columns(rewards=rewards))


def test_an_unknown_estimator_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        get_advantage("gropo")


@pytest.mark.parametrize(
    ("returned", "seen"),
    [(lambda n: (torch.ones(n), torch.ones(n + 1)), r"\(5,\), \(6,\)"), (lambda n: torch.ones(n), "torch.Tensor")],
)
def test_an_estimator_that_returns_another_shape_is_named_with_what_is_expected(monkeypatch, returned, seen):
    batch = random_batch()
    seen = seen.replace("5", str(batch.num_tokens)).replace("6", str(batch.num_tokens + 1))
    monkeypatch.setitem(ADVANTAGES._items, "mine", Advantage(lambda batch, config: returned(batch.num_tokens)))
    with pytest.raises(ConfigError, match=rf"'mine' returned .*{seen}.*; it must return .*\({batch.num_tokens},\)"):
        compute_advantages(batch, AlgorithmConfig(adv_estimator="mine"))
