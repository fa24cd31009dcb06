"""Preference rows: which tokens are trained, and what is refused with file and row."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from verl.commands.quickstart.small_model import make_tokenizer
from verl.config import SFTDataConfig
from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching, split_micro_batches
from verl.data.preferences import PreferencePairs, ScoredPairs
from verl.utils.errors import ConfigError, DataError

TOKENIZER = make_tokenizer("abcdefgh")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def pairs(folder: Path, *rows: dict, **config) -> PreferencePairs:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PreferencePairs(str(path), TOKENIZER, SFTDataConfig(**config), -1)


def texts(answers) -> list[tuple[str, str]]:
    """(all text, trained text) of both answers."""
    return [(TOKENIZER.decode(a.tokens), TOKENIZER.decode(a.tokens[a.loss_mask])) for a in answers]


def test_the_column_of_prompts_may_have_another_name(tmp_path: Path):
    (both,) = pairs(tmp_path, {"question": "ab", "chosen": "cd", "rejected": "e"}, prompt_key="question")
    assert texts(both) == EXPECTED
    with pytest.raises(DataError, match=r"no 'prompt' \(data.prompt_key\)"):
        pairs(tmp_path, {"question": "ab", "chosen": "cd", "rejected": "e"})


EXPECTED = [("abcd<eos>", "cd<eos>"), ("abe<eos>", "e<eos>")]
SAME_PAIR = {
    "strings": {"prompt": "ab", "chosen": "cd", "rejected": "e"},
    "messages": {"prompt": [user("ab")], "chosen": [assistant("cd")], "rejected": [assistant("e")]},
    "whole conversations": {"chosen": [user("ab"), assistant("cd")], "rejected": [user("ab"), assistant("e")]},
    "both": {"prompt": "ab", "chosen": [user("ab"), assistant("cd")], "rejected": "e"},
}


@pytest.mark.parametrize("form", SAME_PAIR)
def test_every_form_of_a_row_gives_the_same_pair(tmp_path: Path, form: str):
    rows = pairs(tmp_path, SAME_PAIR[form])
    assert texts(rows[0]) == EXPECTED and [a.reward for a in rows[0]] == [0.0, 0.0]
    assert len({a.group_id for a in rows[0]}) == 1


def test_parquet_rows_are_read(tmp_path: Path):
    pq.write_table(pa.Table.from_pylist([SAME_PAIR["messages"]]), tmp_path / "pairs.parquet")
    rows = PreferencePairs(str(tmp_path / "pairs.parquet"), TOKENIZER, SFTDataConfig(), -1)
    assert texts(rows[0]) == EXPECTED


def test_only_the_last_turn_of_a_conversation_is_trained(tmp_path: Path):
    before = [user("ab"), assistant("cd"), user("ef")]
    rows = pairs(tmp_path, {"prompt": before, "chosen": "g", "rejected": "h"})
    assert texts(rows[0]) == [("abcd<eos>efg<eos>", "g<eos>"), ("abcd<eos>efh<eos>", "h<eos>")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "ab", "chosen": "cd"}, "the row has no 'rejected'; its columns are chosen, prompt"),
        ({"prompt": "ab", "chosen": " ", "rejected": "e"}, "'chosen': the answer is empty"),
        ({"prompt": "ab", "chosen": [user("c")], "rejected": "e"}, "'chosen' ends with a message of role 'user'"),
        ({"chosen": "cd", "rejected": "e"}, "and the answers are not whole conversations"),
        (
            {"chosen": [user("ab"), assistant("cd")], "rejected": [user("a"), assistant("e")]},
            "the answers have different prompts",
        ),
        ({"prompt": [user("a"), assistant("b")], "chosen": "c", "rejected": "d"}, "ends with an assistant message"),
        ({"prompt": "abcdefgh", "chosen": "abcdefgh", "rejected": "e"}, "17 tokens, data.max_length is 12"),
        ({"prompt": "ab", "chosen": "cd", "rejected": "e", "margin": "1"}, "'margin' is '1'; it must be a finite"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_the_reason(tmp_path: Path, row: dict, message: str):
    with pytest.raises(DataError, match=rf"pairs\.jsonl line 2: .*{message}"):
        pairs(tmp_path, SAME_PAIR["strings"], row, max_length=12)


def test_a_pair_without_a_token_of_one_answer_after_truncation_is_left_out_and_counted(tmp_path: Path):
    long = {"prompt": "abcdefgh", "chosen": "a", "rejected": [user("abcdefgh"), assistant("b")]}
    rows = pairs(tmp_path, SAME_PAIR["strings"], long, max_length=6, truncation="right")
    assert len(rows) == 1 and texts(rows[0]) == EXPECTED
    assert sum("1 rows had no assistant token left after truncation" in note for note in rows.notes) == 2


def test_equal_answers_are_warned_about(tmp_path: Path):
    rows = pairs(tmp_path, SAME_PAIR["strings"], {"prompt": "ab", "chosen": "c", "rejected": "c"})
    assert len(rows) == 2 and "1 pairs have equal answers" in rows.notes[-1]


def test_the_digest_follows_the_rows(tmp_path: Path):
    one = pairs(tmp_path, SAME_PAIR["strings"]).digest
    assert one != pairs(tmp_path, {**SAME_PAIR["strings"], "margin": 2}).digest


def test_the_score_of_a_reward_model_is_read_behind_the_last_token_that_is_no_padding(tmp_path: Path):
    rows = pairs(tmp_path, {**SAME_PAIR["strings"], "margin": 2})
    for pad, ends in ((TOKENIZER.pad_token_id, "<eos>"), (TOKENIZER.eos_token_id, "d")):
        chosen, rejected = ScoredPairs(rows, pad)[0]
        assert chosen.loss_mask.tolist() == [False] * (len(chosen.tokens) - 1) + [True]
        assert TOKENIZER.decode(chosen.tokens[:-1]).endswith(ends) and chosen.tokens[-1] == chosen.tokens[-2]
        assert (chosen.reward, rejected.reward) == (2.0, 0.0)


def batch_of_pairs(tmp_path: Path) -> Batch:
    rows = [{"prompt": "a" * n, "chosen": "b" * (2 * n), "rejected": "c" * n} for n in range(1, 8)]
    data = pairs(tmp_path, *rows)
    whole = Batch.pack([answer for i in range(len(data)) for answer in data[i]])
    return whole.select(torch.randperm(whole.num_sequences, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize(
    "limits", [{}, {"max_tokens": 40}, {"max_tokens": 64}, {"max_sequences": 2}, {"max_sequences": 1}]
)
def test_the_answers_of_a_pair_share_a_micro_batch(tmp_path: Path, limits: dict[str, int]):
    batch = batch_of_pairs(tmp_path)
    parts = split_micro_batches(batch, MicroBatching(**limits, keep_groups=True))
    assert sorted(i for part in parts for i in part) == list(range(batch.num_sequences))
    for part in parts:
        groups = batch["group_ids"][part].tolist()
        assert all(groups.count(group) == 2 for group in groups)
        assert int(batch.lengths[part].sum()) <= limits.get("max_tokens", 10**6)
        assert len(part) <= max(limits.get("max_sequences", 100), 2)


def test_a_pair_over_the_token_budget_is_refused(tmp_path: Path):
    batch = batch_of_pairs(tmp_path)
    with pytest.raises(ConfigError, match=r"2 sequences of 37 tokens .* micro-batch of 36"):
        split_micro_batches(batch, MicroBatching(max_tokens=36, keep_groups=True))
