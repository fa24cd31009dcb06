"""Sequences spread over ranks and micro-steps: everything once, equal work, equal numbers of forwards."""

import numpy as np
import pytest
import torch

from verl.data import balance
from verl.data.balance import Shard, assign_shards, sequence_costs
from verl.data.batch import Batch, cumulative_lengths
from verl.data.micro_batches import MicroBatching
from verl.trainer.ppo.batch_metrics import balance_metrics
from verl.utils.errors import ConfigError

ATTENTION = 3000.0


def batch_of(lengths: list[int]) -> Batch:
    cu_seqlens = cumulative_lengths(torch.tensor(lengths, dtype=torch.int64))
    total = int(cu_seqlens[-1])
    columns = {"tokens": torch.arange(total), "loss_mask": torch.ones(total, dtype=torch.bool)}
    return Batch(cu_seqlens, columns, {})


def log_normal(count: int, seed: int, sigma: float = 1.0, longest: int = 4096) -> list[int]:
    draws = np.random.default_rng(seed).lognormal(6.0, sigma, count)
    return np.clip(draws, 2, longest).astype(int).tolist()


def step_costs(lengths: list[int], shards: list[Shard]) -> np.ndarray:
    """(K, R) by hand: tokens plus squared length over ATTENTION."""
    plans = [shard.micro.plan for shard in shards]
    assert len({len(plan) for plan in plans}) == 1
    return np.array(
        [
            [
                sum(n + n * n / ATTENTION for n in (lengths[shard.indices[i]] for i in plan[k]))
                for shard, plan in zip(shards, plans, strict=True)
            ]
            for k in range(len(plans[0]))
        ]
    )


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(("count", "ranks"), [(1, 2), (3, 4), (50, 2), (257, 4)])
@pytest.mark.parametrize(
    "micro", [MicroBatching(max_tokens=5000), MicroBatching(max_sequences=3), MicroBatching(5000, 7)]
)
def test_every_sequence_is_in_one_micro_batch_of_one_rank_within_the_limits(count, ranks, micro, balanced):
    lengths = log_normal(count, seed=count)
    shards = assign_shards(batch_of(lengths), ranks, micro, ATTENTION, balanced)
    assert len(shards) == ranks
    assert sorted(row for shard in shards for row in shard.indices) == list(range(count))
    assert len({len(shard.micro.plan) for shard in shards}) == 1  # the same number of forwards everywhere
    for shard in shards:
        assert list(shard.indices) == sorted(shard.indices)
        assert sorted(i for part in shard.micro.plan for i in part) == list(range(len(shard.indices)))
        for part in shard.micro.plan:
            assert sum(lengths[shard.indices[i]] for i in part) <= (micro.max_tokens or 1 << 60)
            assert len(part) <= (micro.max_sequences or 1 << 60)


def worst_ratio(costs: np.ndarray) -> float:
    return float((costs.max(1) / costs.mean(1)).max())


def least_ratio(lengths: list[int], which: int, ranks: int, budget: int) -> float:
    """The step of sequence `which` cannot be more even, because of what the other ranks can do meanwhile.

    Each has room for `budget` tokens, filled as dearly as whole sequences can fill it (a knapsack, exactly), and all
    together for that many times as much, filled with the most expensive sequences, the last cut (its relaxation).
    """
    costs = [n + n * n / ATTENTION for n in lengths]
    others = sorted((i for i in range(len(lengths)) if i != which), key=lambda i: -costs[i])
    best = np.zeros(budget + 1)  # cost by tokens
    for i in others:
        n = lengths[i]
        best[n:] = np.maximum(best[n:], best[: budget + 1 - n] + costs[i])
    room, together = (ranks - 1) * budget, 0.0
    for i in others:
        part = min(1.0, room / lengths[i])
        together, room = together + part * costs[i], room - part * lengths[i]
    alone = costs[which]
    return ranks * alone / (alone + min((ranks - 1) * min(alone, best[-1]), together))


@pytest.mark.parametrize("room", [1.0, 1.2, 1.6, 2.0, 4.0])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("sigma", [0.4, 0.7, 1.0])
def test_a_micro_step_costs_nearly_the_same_on_every_rank_where_that_is_possible(ranks, sigma, room):
    for seed in range(2):
        lengths = log_normal(32 * ranks, seed, sigma)
        budget = int(max(lengths) * room)
        shards = assign_shards(batch_of(lengths), ranks, MicroBatching(max_tokens=budget), ATTENTION)
        assert sorted(row for shard in shards for row in shard.indices) == list(range(len(lengths)))
        for shard in shards:
            assert all(sum(lengths[shard.indices[i]] for i in part) <= budget for part in shard.micro.plan)
        costs = step_costs(lengths, shards)
        for k, ratio in enumerate(costs.max(1) / costs.mean(1)):
            if ratio > 1.05:
                assert room < 1.5, "there is no excuse where two of the longest nearly fit"
                members = [shard.indices[i] for shard in shards for i in shard.micro.plan[k]]
                most_expensive = max(members, key=lengths.__getitem__)
                assert ratio <= 1.05 * least_ratio(lengths, most_expensive, ranks, budget)


def least_ratio_of_all_plans(lengths: list[int], ranks: int, budget: int) -> float:
    """The worst step of the best plan, by trying every sequence in every part."""
    costs, best = np.array([n + n * n / ATTENTION for n in lengths]), np.inf
    for steps in range(1, len(lengths) // ranks + 1):
        places = np.indices((steps * ranks,) * len(lengths)).reshape(len(lengths), -1)
        tokens, spent = np.zeros((2, steps * ranks, places.shape[1]))
        for part in range(steps * ranks):
            tokens[part], spent[part] = np.array(lengths) @ (places == part), costs @ (places == part)
        spent = spent[:, (tokens <= budget).all(0)].reshape(steps, ranks, -1)
        spent = spent[:, :, (spent.sum(1) > 0).all(0)]
        if spent.size:
            best = min(best, (spent.max(1) / spent.mean(1)).max(0).min())
    return best


@pytest.mark.parametrize("seed", range(60))
def test_small_batches_are_spread_as_evenly_as_the_best_of_all_plans(seed):
    rng = np.random.default_rng(seed)
    ranks, count = int(rng.integers(2, 4)), int(rng.integers(4, 7))
    lengths = np.clip(rng.lognormal(7.0, 0.8, count), 2, 9000).astype(int).tolist()
    budget = int(max(lengths) * rng.choice([1.0, 1.2, 1.6, 2.5]))
    shards = assign_shards(batch_of(lengths), ranks, MicroBatching(max_tokens=budget), ATTENTION)
    best = least_ratio_of_all_plans(lengths, ranks, budget)
    assert worst_ratio(step_costs(lengths, shards)) <= (1.05 if best <= 1.05 else 1.05 * best)


def test_no_micro_batch_is_empty_where_there_is_work_for_all():
    lengths = log_normal(128, seed=3)
    shards = assign_shards(batch_of(lengths), 4, MicroBatching(max_tokens=8192), ATTENTION)
    assert all(part for shard in shards for part in shard.micro.plan)


def test_there_are_no_more_micro_steps_than_the_tokens_need():
    lengths = log_normal(256, seed=5)
    shards = assign_shards(batch_of(lengths), 4, MicroBatching(max_tokens=8192), ATTENTION)
    assert len(shards[0].micro.plan) == -(-sum(lengths) // (8192 * 4))


def test_unbalanced_keeps_the_order_and_shares_by_number():
    shards = assign_shards(batch_of([9, 1, 1, 1, 1]), 2, MicroBatching(max_tokens=10), balanced=False)
    assert [shard.indices for shard in shards] == [(0, 1, 2), (3, 4)]
    assert shards[0].micro.plan == ((0,), (1, 2)) and shards[1].micro.plan == ((0, 1), ())


def test_fewer_sequences_than_ranks_leave_empty_parts():
    shards = assign_shards(batch_of([5, 4]), 3, MicroBatching(max_tokens=10))
    assert sorted(len(shard.indices) for shard in shards) == [0, 1, 1]
    assert all(len(shard.micro.plan) == 1 for shard in shards)


def test_one_rank_keeps_its_own_way_of_cutting():
    (shard,) = assign_shards(batch_of([3, 2]), 1, MicroBatching(max_tokens=10))
    assert shard.indices == (0, 1) and shard.micro.plan is None


def test_a_sequence_over_the_budget_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match="11 tokens"):
        assign_shards(batch_of([3, 11]), 2, MicroBatching(max_tokens=10))


def test_the_plan_is_the_same_wherever_it_is_made():
    lengths = log_normal(64, seed=9)
    plans = [assign_shards(batch_of(lengths), 4, MicroBatching(max_tokens=8192), ATTENTION) for _ in range(2)]
    assert plans[0] == plans[1]


def test_attention_makes_long_sequences_dearer_than_their_tokens():
    assert sequence_costs([1000, 3000], ATTENTION).tolist() == [1000 + 1000 / 3, 6000.0]
    assert sequence_costs([1000], float("inf")).tolist() == [1000.0]


def test_the_tokens_of_ranks_are_reported_in_order_and_as_dealt():
    found = balance_metrics([5, 7, 1, 1, 2], [8.0, 8.0])
    expected = {"min": 3, "max": 13, "minmax_diff": 10, "mean": 8, "balanced_min": 8, "balanced_max": 8}
    assert found == {f"global_seqlen/{name}": value for name, value in expected.items()}
    assert "global_seqlen/balanced_min" not in balance_metrics([5, 7], [0.0])  # a step without an update


def test_large_batches_are_balanced_block_by_block():
    lengths = [8 + n % 41 for n in range(17_000)]
    shards = assign_shards(batch_of(lengths), 2, MicroBatching(max_tokens=8192), ATTENTION)
    assert sorted(row for shard in shards for row in shard.indices) == list(range(len(lengths)))
    costs = step_costs(lengths, shards)
    least = -(-sum(lengths) // (2 * 8192))
    assert least <= len(costs) <= least + 2 and worst_ratio(costs) <= 1.05


def test_a_swap_looks_at_a_bounded_number_of_pairs(monkeypatch: pytest.MonkeyPatch):
    looked_at, look = [], balance._unevenness

    def count(squares: np.ndarray, means: np.ndarray) -> np.ndarray:
        looked_at.append(squares.size)
        return look(squares, means)

    monkeypatch.setattr(balance, "_unevenness", count)
    lengths = log_normal(2000, seed=1, sigma=0.3)
    shards = assign_shards(batch_of(lengths), 32, MicroBatching(max_tokens=sum(lengths) // 32 + 400), ATTENTION)
    assert worst_ratio(step_costs(lengths, shards)) <= 1.05
    assert looked_at and max(looked_at) <= balance._MAX_PAIRS < len(lengths) ** 2
