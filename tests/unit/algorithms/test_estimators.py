"""Every advantage estimator against its definition in verl.commands.certify.formulas, and laws that all keep."""

import pytest
import torch

from tests.unit.algorithms.algorithm_cases import column_by_sequence, random_batch
from verl.algorithms.advantages import ADVANTAGES, check_advantage, compute_advantages, with_token_rewards
from verl.commands.certify import formulas
from verl.config import AlgorithmConfig
from verl.data.batch import Batch, cumulative_lengths
from verl.utils.errors import ConfigError, DataError

NAMES = [n for n in ADVANTAGES.names() if ADVANTAGES.get(n).function.__module__.startswith("verl.algorithms")]
PARTS = {"gdpo_reward_keys": ["format", "score"], "gdpo_reward_weights": [0.5, 2.0]}
PAIRS = (  # the last two sequences of random_batch() join the group of the third, so that no group has one answer
    7,
    7,
    3,
    3,
    3,
    3,
)


def config_of(name: str, **changes) -> AlgorithmConfig:
    return AlgorithmConfig(adv_estimator=name, **(PARTS if name == "gdpo" else {}), **changes)


def full_batch(seed: int = 0, rewards=None, groups=None) -> Batch:
    """Every column that an estimator may ask for."""
    batch = random_batch(seed)
    generator = torch.Generator().manual_seed(seed + 100)

    def uniform(n: int) -> torch.Tensor:
        return torch.rand(n, generator=generator, dtype=torch.float64)

    mask, probs = batch["loss_mask"], uniform(batch.num_tokens)
    squares = probs**2 + (1 - probs) ** 2 * uniform(batch.num_tokens)
    batch = batch.with_columns(
        old_logprobs=torch.where(mask, probs.log(), 0.0),
        sum_pi_squared=torch.where(mask, squares, 0.0),
        reward_baselines=uniform(batch.num_sequences),
        **{"reward_parts.format": uniform(batch.num_sequences).round(), "reward_parts.score": batch["rewards"]},
    )
    if rewards is not None:
        batch = batch.with_columns(rewards=torch.tensor(rewards, dtype=torch.float64))
    if groups is not None:
        batch = batch.with_columns(group_ids=torch.tensor(groups))
    batch = with_token_rewards(batch)
    kl = torch.rand(batch.num_tokens, generator=generator, dtype=torch.float64) * mask  # a penalty on every token
    return batch.with_columns(token_rewards=batch["token_rewards"] - 0.1 * kl)


def by_definition(name: str, batch: Batch, config: AlgorithmConfig) -> list[list[float]]:
    masks, rewards = column_by_sequence(batch, "loss_mask"), column_by_sequence(batch, "token_rewards")
    scores, groups = [sum(row) for row in rewards], batch["group_ids"].tolist()
    by_std = config.norm_adv_by_std_in_grpo
    if name in ("grpo", "grpo_vectorized"):
        return formulas.on_tokens(formulas.grpo(scores, groups, by_std), masks)
    if name == "grpo_passk":
        return formulas.on_tokens(formulas.grpo_passk(scores, groups, by_std), masks)
    if name == "rloo":
        return formulas.on_tokens(formulas.rloo(scores, groups), masks)
    if name == "rloo_vectorized":
        compared = [
            a if groups.count(g) > 1 else 0.0 for a, g in zip(formulas.rloo(scores, groups), groups, strict=True)
        ]
        return formulas.on_tokens(compared, masks)
    if name == "opo":
        return formulas.on_tokens(formulas.opo(scores, groups, masks), masks)
    if name == "gpg":
        return formulas.on_tokens(formulas.gpg(scores, groups), masks)
    if name == "gdpo":
        parts = [batch["reward_parts." + key].tolist() for key in config.gdpo_reward_keys]
        return formulas.gdpo(parts, config.gdpo_reward_weights, groups, masks, by_std)
    if name == "reinforce_plus_plus":
        return formulas.reinforce_plus_plus(rewards, masks, config.gamma)
    if name == "reinforce_plus_plus_baseline":
        return formulas.reinforce_plus_plus_baseline(scores, groups, masks)
    if name == "remax":
        return formulas.remax(rewards, masks, batch["reward_baselines"].tolist())
    log_p, squares = column_by_sequence(batch, "old_logprobs"), column_by_sequence(batch, "sum_pi_squared")
    in_turns = name == "tir_optimal_token_baseline"
    return formulas.optimal_token_baseline(rewards, masks, groups, log_p, squares, in_turns)


def advantages(batch: Batch, config: AlgorithmConfig) -> torch.Tensor:
    return compute_advantages(batch, config)["advantages"]


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "gae"])
def test_advantages_equal_the_definition(name, seed, by_std):
    batch = full_batch(seed, groups=PAIRS if name == "grpo_passk" else None)
    config = config_of(name, norm_adv_by_std_in_grpo=by_std, gamma=0.9)
    expected = torch.tensor([a for row in by_definition(name, batch, config) for a in row], dtype=torch.float64)
    found = advantages(batch, config)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gae"])
def test_returns_are_rewards_to_go_without_baseline_or_the_advantages_of_a_group(name):
    batch = full_batch(groups=PAIRS)
    out = compute_advantages(batch, config_of(name, gamma=0.9))
    expected = out["advantages"]
    if name in ("reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline"):
        columns = (column_by_sequence(batch, "token_rewards"), column_by_sequence(batch, "loss_mask"))
        gamma = 0.9 if name == "reinforce_plus_plus" else 1.0
        rows = [formulas.rewards_to_go(r, m, gamma) for r, m in zip(*columns, strict=True)]
        expected = torch.tensor([g for row in rows for g in row], dtype=torch.float64)
    torch.testing.assert_close(out["returns"], expected, rtol=1e-10, atol=1e-10)


def test_remax_and_the_token_baselines_ask_for_what_they_read():
    asked = {name: ADVANTAGES.get(name).columns_for(config_of(name)) + ADVANTAGES.get(name).outputs for name in NAMES}
    token_baseline = ("old_logprobs", "sum_pi_squared")
    expected = {
        "gae": ("values",),
        "remax": ("reward_baselines",),
        "gdpo": ("reward_parts.format", "reward_parts.score"),
        "optimal_token_baseline": token_baseline,
        "tir_optimal_token_baseline": token_baseline,
    }
    assert {name: needs for name, needs in asked.items() if needs} == expected


@pytest.mark.parametrize("rewards", [[1.5, 0, 0, 0.3, 0, -2.0], [0.0] * 6])
def test_answers_without_reward_do_not_count_in_gpg(rewards):
    batch = with_token_rewards(full_batch().with_columns(rewards=torch.tensor(rewards, dtype=torch.float64)))
    config = config_of("gpg")
    expected = torch.tensor([a for row in by_definition("gpg", batch, config) for a in row], dtype=torch.float64)
    torch.testing.assert_close(advantages(batch, config), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_were_not_sampled_have_no_advantage_and_change_nothing(name):
    batch = full_batch(groups=PAIRS)
    config = config_of(name)
    outside = ~batch["loss_mask"]
    out = compute_advantages(batch, config)
    assert (out["advantages"][outside] == 0).all() and (out["returns"][outside] == 0).all()
    noisy = {n: torch.where(outside, 7.0, batch[n]) for n in ("old_logprobs", "sum_pi_squared", "values")}
    torch.testing.assert_close(advantages(batch.with_columns(**noisy), config), out["advantages"])


@pytest.mark.parametrize("name", NAMES)
def test_advantages_do_not_depend_on_the_order_of_sequences(name):
    batch, order = full_batch(groups=PAIRS), torch.tensor([5, 3, 0, 2, 4, 1])
    moved = compute_advantages(batch, config_of(name)).select(order)["advantages"]
    torch.testing.assert_close(advantages(batch.select(order), config_of(name)), moved, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
def test_equal_scores_in_a_group_give_no_advantage(name):
    batch = random_batch().with_columns(rewards=torch.full((6,), 0.3), group_ids=torch.tensor(PAIRS))
    out = advantages(with_token_rewards(batch), config_of(name))
    assert out.abs().max() < 1e-6


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo"])
def test_the_baseline_of_an_answer_alone_in_its_group_is_0(name):
    batch = with_token_rewards(random_batch().with_columns(group_ids=torch.arange(6)))
    expected = batch["rewards"][batch.sequence_ids()] * batch["loss_mask"]
    torch.testing.assert_close(advantages(batch, config_of(name)), expected, rtol=2e-6, atol=0)


def test_the_best_of_one_answer_is_refused():
    with pytest.raises(DataError, match=r"1 prompts have one; set actor_rollout_ref.rollout.n"):
        advantages(full_batch(), config_of("grpo_passk"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"gdpo_reward_keys=\[NAME,...\]"),
        ({"gdpo_reward_keys": ["a", "a"]}, "each once"),
        ({"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0]}, "has 1 numbers for the 2 parts"),
        ({"gdpo_reward_keys": ["a"], "use_kl_in_reward": True}, "is in none of them"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_the_first_step(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_advantage(AlgorithmConfig(adv_estimator="gdpo", **settings))


def test_tool_results_of_other_lengths_move_the_moments_of_one_token_baseline_only():
    one, other = "psspps", "psspppps"

    def batch(masks):
        mask = torch.tensor([c == "s" for c in "".join(masks)])
        n = len(mask)
        sampled = torch.arange(1, int(mask.sum()) + 1, dtype=torch.float64) / 10
        column = torch.zeros(n, dtype=torch.float64)
        column[mask] = sampled
        columns = {"loss_mask": mask, "old_logprobs": -column, "sum_pi_squared": torch.ones_like(column)}
        sequence = {"rewards": torch.tensor([1.0, 0.0]).double(), "group_ids": torch.zeros(2, dtype=torch.long)}
        return with_token_rewards(Batch(cumulative_lengths(torch.tensor([len(m) for m in masks])), columns, sequence))

    def sampled_advantages(name, masks):
        b = batch(masks)
        return advantages(b, config_of(name))[b["loss_mask"]]

    same, longer = (one, one), (one, other)
    in_turns, plain = "tir_optimal_token_baseline", "optimal_token_baseline"
    torch.testing.assert_close(sampled_advantages(in_turns, same), sampled_advantages(in_turns, longer))
    assert not torch.allclose(sampled_advantages(plain, same), sampled_advantages(plain, longer))


def padded(batch, name):
    rows = [torch.tensor(row, dtype=torch.float64) for row in column_by_sequence(batch, name)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def test_tokens_of_the_environment_add_no_norm_and_the_sums_end_with_the_last_sampled_token():
    batch = full_batch(groups=[0, 0, 0, 1, 1, 1])
    mask, found = padded(batch, "loss_mask").bool(), advantages(batch, config_of("optimal_token_baseline"))
    energy = (1 - 2 * padded(batch, "old_logprobs").exp() + padded(batch, "sum_pi_squared")) * mask
    to_go = (padded(batch, "token_rewards") * mask).flip(1).cumsum(1).flip(1)
    behind_last = mask.flip(1).cumsum(1).flip(1) == 0
    starts = [int(row.nonzero()[0]) if row.any() else 0 for row in mask]
    shifted = lambda x: torch.stack([row.roll(-start) for row, start in zip(x, starts, strict=True)])  # noqa: E731
    sums, gains, alive = (
        shifted(energy.cumsum(1) * ~behind_last),
        shifted(to_go),
        shifted(~behind_last & (mask.cumsum(1) > 0)),
    )
    for index, row in enumerate(column_by_sequence(batch.with_columns(found=found), "found")):
        group = batch["group_ids"] == batch["group_ids"][index]
        for step in range(len(row) - starts[index]):
            total, weight = (gains * sums)[group, step].sum(), sums[group, step].sum()
            baseline = total / weight if alive[group, step].sum() > 1 else 0.0
            expected = (gains[index, step] - baseline) * mask[index, starts[index] + step]
            assert row[starts[index] + step] == pytest.approx(float(expected), abs=1e-10)


OUTPUTS = (0, 1, 2, 2, 2, 3, 4, 4, 5)  # sequences of which several outputs of one conversation are made
WHITENED = ("gdpo", "reinforce_plus_plus_baseline")
OF_GROUPS = [name for name in NAMES if name not in ("gae", "remax", "reinforce_plus_plus", "opo", *WHITENED)]


def several_outputs(batch: Batch) -> Batch:
    return batch.select(OUTPUTS).with_columns(conversations=torch.tensor(OUTPUTS))


@pytest.mark.parametrize("name", OF_GROUPS)
def test_several_outputs_of_a_conversation_count_once_in_their_group(name):
    batch = full_batch(groups=PAIRS)
    alone = compute_advantages(batch, config_of(name)).select(OUTPUTS)["advantages"]
    torch.testing.assert_close(advantages(several_outputs(batch), config_of(name)), alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", WHITENED)
def test_several_outputs_count_once_before_the_tokens_of_the_batch_are_whitened(name):
    batch = full_batch(groups=PAIRS)
    scores, groups = batch.sum_per_sequence(batch["token_rewards"]).tolist(), batch["group_ids"].tolist()
    relative = formulas.grpo(scores, groups, by_std=False)
    if name == "gdpo":
        parts = [formulas.grpo(batch["reward_parts." + key].tolist(), groups, True) for key in ("format", "score")]
        relative = [0.5 * one + 2.0 * other for one, other in zip(*parts, strict=True)]
    several = several_outputs(batch)
    masks = column_by_sequence(several, "loss_mask")
    rows = formulas.whitened(formulas.on_tokens([relative[i] for i in OUTPUTS], masks), masks)
    expected = torch.tensor([a for row in rows for a in row], dtype=torch.float64)
    torch.testing.assert_close(advantages(several, config_of(name)), expected, rtol=1e-10, atol=1e-10)


def test_the_length_of_a_conversation_is_that_of_all_its_outputs():
    several = several_outputs(with_token_rewards(random_batch().with_columns(group_ids=torch.tensor(PAIRS))))
    lengths, rewards, group = several.sum_per_sequence(several["loss_mask"].double()), several["rewards"], PAIRS[2]
    members = several["group_ids"] == group
    baseline = (lengths * rewards)[members].sum() / lengths[members].sum()
    tokens = members[several.sequence_ids()] & several["loss_mask"]
    found = advantages(several, config_of("opo"))[tokens]
    torch.testing.assert_close(found, (rewards[several.sequence_ids()] - baseline)[tokens])


@pytest.mark.parametrize("name", ["grpo", "rloo", "gpg"])
def test_outputs_with_different_rewards_get_the_advantage_of_their_mean(name):
    masks, rewards = ("ps", "pss", "ps", "pps"), torch.tensor([1.0, 0.0, 0.75, 0.25], dtype=torch.float64)
    columns = {"rewards": rewards, "group_ids": torch.zeros(4, dtype=torch.long)}
    columns["conversations"] = torch.tensor([0, 0, -1, 3])
    batch = with_token_rewards(random_batch(masks=masks).with_columns(**columns))
    arguments = ([0.5, 0.75, 0.25], [0, 0, 0], *([True] if name == "grpo" else []))
    by_sequence = torch.tensor(getattr(formulas, name)(*arguments), dtype=torch.float64)[[0, 0, 1, 2]]
    expected = by_sequence[batch.sequence_ids()] * batch["loss_mask"]
    torch.testing.assert_close(advantages(batch, config_of(name)), expected, rtol=1e-10, atol=1e-10)
