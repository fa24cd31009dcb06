"""The training order: seeded, resumed exactly, never waiting for rows that do not exist."""

import json

import pytest
from test_chat import TEMPLATE, char_tokenizer
from test_prompts import row, write

from verl.config import DataConfig
from verl.data.prompt_sampler import PromptSampler, warn_about_unused_rows
from verl.data.prompts import load_prompts
from verl.utils.errors import ConfigError, DataError


def dataset(tmp_path, num_rows=10, name="rows.jsonl", **settings):
    path = write(tmp_path / name, [row(str(i)) for i in range(num_rows)])
    return load_prompts(path, DataConfig(**settings), char_tokenizer(TEMPLATE))


def indices(batch):
    return [prompt.index for prompt in batch]


def test_each_epoch_is_a_new_permutation_of_all_rows(tmp_path):
    sampler = PromptSampler(dataset(tmp_path), shuffle=True, seed=5)
    epochs = [indices(sampler.take(5)) + indices(sampler.take(5)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(10))


def test_the_order_follows_from_the_seed_alone(tmp_path):
    data = dataset(tmp_path)
    orders = [indices(PromptSampler(data, seed=seed).take(10)) for seed in (1, 1, 2, None)]
    assert orders[0] == orders[1] == orders[3] != orders[2]


def test_without_shuffling_every_epoch_is_in_file_order(tmp_path):
    sampler = PromptSampler(dataset(tmp_path, 4), shuffle=False)
    assert [indices(sampler.take(2)) for _ in range(4)] == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_an_incomplete_last_batch_is_dropped_and_counted(tmp_path):
    sampler = PromptSampler(dataset(tmp_path), shuffle=False)
    assert sampler.steps_per_epoch(4) == 2
    assert [indices(sampler.take(4)) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert (sampler.epoch, sampler.dropped) == (1, 2)


@pytest.mark.parametrize(("rows", "shuffle", "said"), [(10, False, True), (10, True, False), (8, False, False)])
def test_rows_that_no_epoch_reaches_are_said(caplog, rows, shuffle, said):
    warn_about_unused_rows(rows, 4, shuffle)
    assert ("the last 2 of 10 rows fill no batch of 4 prompts" in caplog.text) == said


def test_a_dataset_smaller_than_a_batch_is_an_error_at_once(tmp_path):
    sampler = PromptSampler(dataset(tmp_path, 3))
    for ask in (sampler.take, sampler.steps_per_epoch):
        with pytest.raises(ConfigError, match=r"train_batch_size=4 .* 3 prompts .* at most 3"):
            ask(4)
    with pytest.raises(ConfigError, match="must be at least 1"):
        sampler.take(0)


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("taken", range(6))  # with 5 of 10, 2 and 4 are epoch boundaries
def test_resuming_continues_as_if_never_stopped(tmp_path, taken, shuffle, size):
    data = dataset(tmp_path)
    whole = PromptSampler(data, shuffle, seed=9)
    for _ in range(taken):
        whole.take(size)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = PromptSampler(dataset(tmp_path), shuffle, seed=9)
    resumed.load_state_dict(state)
    assert [indices(resumed.take(size)) for _ in range(5)] == [indices(whole.take(size)) for _ in range(5)]
    assert (resumed.epoch, resumed.dropped) == (whole.epoch, whole.dropped)


def test_resuming_on_other_rows_or_another_order_is_refused_and_says_what_changed(tmp_path):
    state = PromptSampler(dataset(tmp_path), seed=1).state_dict()
    with pytest.raises(DataError, match=r"was 10, is 9; .*data.train_files"):
        PromptSampler(dataset(tmp_path, 9, "b.jsonl"), seed=1).load_state_dict(state)
    with pytest.raises(DataError, match=r"data.seed was 1, is 2\."):
        PromptSampler(dataset(tmp_path), seed=2).load_state_dict(state)
    with pytest.raises(DataError, match=r"data.shuffle was True, is False\."):
        PromptSampler(dataset(tmp_path), shuffle=False, seed=1).load_state_dict(state)
    edited = tmp_path / "rows.jsonl"
    edited.write_text(edited.read_text().replace('"9"', '"8"'))
    data = load_prompts(str(edited), DataConfig(), char_tokenizer(TEMPLATE))
    with pytest.raises(DataError, match=r"content or selection of data\.train_files was"):
        PromptSampler(data, seed=1).load_state_dict(state)
    with pytest.raises(DataError, match="lacks digest"):
        PromptSampler(data, seed=1).load_state_dict({k: v for k, v in state.items() if k != "digest"})


def test_keeping_other_rows_of_the_same_file_changes_the_digest(tmp_path):
    whole = dataset(tmp_path, 10)
    part = load_prompts(str(tmp_path / "rows.jsonl"), DataConfig(), char_tokenizer(TEMPLATE), max_samples=10 - 1)
    assert whole.digest != part.digest
