"""Batch and Trajectory: packing, selecting and joining keep every column with its sequence."""

import pytest
import torch

from verl.data.batch import Batch, cumulative_lengths
from verl.data.trajectory import Trajectory


def trajectory(prompt, response, **fields):
    return Trajectory.from_completion(prompt, response, [-0.5 * (i + 1) for i in range(len(response))], **fields)


@pytest.fixture
def parts():
    return [
        trajectory([1, 2], [3, 4, 5], group_id=0, row=7, reward=1.0),
        trajectory([6], [], group_id=0, row=7, reward=None, policy_version=(1, 2)),
        trajectory([7, 8, 9], [10], group_id=1, row=3, reward=0.0),
    ]


@pytest.fixture
def batch(parts):
    return Batch.pack(parts)


def sequences(batch, name):
    return [column.tolist() for column in batch[name].split(batch.lengths.tolist())]


def test_a_completion_is_sampled_after_its_prompt_only(parts):
    first = parts[0]
    assert first.loss_mask.tolist() == [False, False, True, True, True]
    assert first.rollout_logprobs.tolist() == [0, 0, -0.5, -1.0, -1.5]
    assert first.prompt_length == 2 and first.response_ids == [3, 4, 5]
    assert parts[1].prompt_length == 1 and parts[1].response_ids == []


def test_response_ids_of_several_turns_hold_what_came_between():
    mask = torch.tensor([False, True, False, True])
    turns = Trajectory(torch.tensor([5, 6, 7, 8]), mask, torch.zeros(4), group_id=0)
    assert turns.prompt_length == 1 and turns.response_ids == [6, 7, 8] and turns.num_sampled == 2


def test_a_trajectory_must_start_with_a_prompt_token_and_have_columns_of_one_length():
    with pytest.raises(ValueError, match="starts with a prompt token"):
        trajectory([], [1], group_id=0)
    with pytest.raises(ValueError, match="starts with a prompt token"):
        trajectory([], [], group_id=0)
    with pytest.raises(ValueError, match=r"loss_mask has shape \(2,\), tokens have \(3,\)"):
        Trajectory(torch.arange(3), torch.zeros(2, dtype=torch.bool), torch.zeros(3), group_id=0)
    with pytest.raises(ValueError, match="2 log-probs for 3 response tokens"):
        Trajectory.from_completion([1], [2, 3, 4], [0.0, 0.0], group_id=0)
    with pytest.raises(ValueError, match="1 log-probs for 3 response tokens"):  # not spread over all three
        Trajectory.from_completion([1], [2, 3, 4], [0.0], group_id=0)
    with pytest.raises(ValueError, match="no trajectories"):
        Batch.pack([])


def test_judging_keeps_the_tokens_and_adds_columns(parts):
    scored = parts[1].with_reward(0.5, {"acc": True})
    assert scored.reward == 0.5 and scored.score_parts == {"acc": True} and parts[1].reward is None


def test_packing_lays_sequences_end_to_end_without_padding(batch):
    assert batch.cu_seqlens.tolist() == [0, 5, 6, 10]
    assert (batch.num_sequences, batch.num_tokens) == (3, 10)
    assert sequences(batch, "tokens") == [[1, 2, 3, 4, 5], [6], [7, 8, 9, 10]]
    assert sequences(batch, "loss_mask")[2] == [False, False, False, True]
    assert batch["group_ids"].tolist() == [0, 0, 1] and batch["rows"].tolist() == [7, 7, 3]
    assert batch["policy_versions"].tolist() == [[0, 0], [1, 2], [0, 0]]
    assert torch.isnan(batch["rewards"][1]) and batch["rewards"][[0, 2]].tolist() == [1.0, 0.0]


def test_positions_and_sequence_ids_restart_with_each_sequence(batch):
    assert batch.position_ids().tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3]
    assert batch.sequence_ids().tolist() == [0] * 5 + [1] + [2] * 4
    assert batch.sum_per_sequence(batch["tokens"]).tolist() == [15, 6, 34]


@pytest.mark.parametrize("order", [[2, 0], [1], [0, 1, 2], [2, 2, 1], []])
def test_selecting_takes_every_column_along(batch, order):
    wide = batch.with_columns(pairs=torch.stack([batch["tokens"], -batch["tokens"]], dim=1))
    chosen = wide.select(order)
    assert sequences(chosen, "tokens") == [sequences(batch, "tokens")[i] for i in order]
    assert torch.equal(chosen["pairs"][:, 1], -chosen["tokens"])
    assert chosen["group_ids"].tolist() == [batch["group_ids"][i].item() for i in order]
    assert chosen.lengths.tolist() == [[5, 1, 4][i] for i in order]


def test_a_split_and_joined_batch_is_the_same_batch(batch):
    joined = Batch.cat([batch.select([0]), batch.select([1, 2])])
    assert torch.equal(joined.cu_seqlens, batch.cu_seqlens)
    for name in (*batch.token_columns, *batch.sequence_columns):
        torch.testing.assert_close(joined[name], batch[name], equal_nan=True)


def test_adding_columns_leaves_the_old_batch_as_it_was(batch):
    more = batch.with_columns(values=torch.ones(10), scores=torch.ones(3), tokens=torch.zeros(10, dtype=torch.int64))
    assert "values" in more.token_columns and "scores" in more.sequence_columns
    assert "values" not in batch and batch["tokens"].sum() > 0


def test_where_every_sequence_has_one_token_known_columns_stay_where_they_are():
    ones = Batch.pack([trajectory([1], [], group_id=i) for i in range(3)])
    more = ones.with_columns(rewards=torch.ones(3), values=torch.ones(3))
    assert "rewards" in more.sequence_columns and "values" in more.token_columns


def test_columns_that_do_not_fit_or_are_not_there_are_named(batch):
    more, ones = batch.with_columns(values=torch.zeros(10)), cumulative_lengths(torch.tensor([1, 1]))
    zeros = torch.zeros(2)
    for message, wrong in (
        ("values", lambda: Batch.cat([batch, more])),
        ("values", lambda: Batch.cat([more, batch])),
        ("'x' has 4 rows for 3 sequences", lambda: batch.with_columns(x=torch.zeros(4))),
        (
            r"\['x'\] are both",
            lambda: Batch(ones, {"tokens": zeros, "x": zeros}, {"x": zeros}),
        ),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    with pytest.raises(KeyError, match=r"no column 'values'; run Critic.values first \(columns so far: loss_mask"):
        batch.require("values", "Critic.values")


def test_keeping_columns_always_keeps_tokens_and_mask(batch):
    kept = batch.select_columns(["rewards"])
    assert set(kept.token_columns) == {"tokens", "loss_mask"} and set(kept.sequence_columns) == {"rewards"}
