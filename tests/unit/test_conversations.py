"""Supervised rows: which tokens are trained."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from verl.config import SFTDataConfig
from verl.data.conversations import ConversationDataset
from verl.trainer.quickstart.model import make_tokenizer
from verl.utils.errors import DataError


def dataset(tmp_path: Path, rows: list[dict], tokenizer, **config) -> ConversationDataset:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ConversationDataset(str(path), tokenizer, SFTDataConfig(**config))


def chat(*turns: str) -> dict:
    roles = ["user", "assistant"] * len(turns)
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]}


def trained_text(tokenizer, item) -> str:
    return tokenizer.decode(item.tokens[item.loss_mask])


def test_every_assistant_turn_and_its_end_is_trained_and_nothing_else(tmp_path: Path):
    tokenizer = make_tokenizer("abcdefgh")
    item = dataset(tmp_path, [chat("ab", "cd", "ef", "g")], tokenizer)[0]
    assert tokenizer.decode(item.tokens) == "abcd<eos>efg<eos>"
    assert trained_text(tokenizer, item) == "cd<eos>g<eos>"


def test_prompt_and_response_columns_are_one_turn(tmp_path: Path):
    tokenizer = make_tokenizer("abcdefgh")
    item = dataset(tmp_path, [{"prompt": "ab", "response": "cd"}], tokenizer)[0]
    assert trained_text(tokenizer, item) == "cd<eos>"


def test_without_a_template_an_answer_ends_with_end_of_sequence(tmp_path: Path):
    tokenizer = make_tokenizer("abcdefgh")
    tokenizer.chat_template = None
    item = dataset(tmp_path, [chat("ab", "cd")], tokenizer)[0]
    assert trained_text(tokenizer, item) == "cd<eos>"


def test_the_real_qwen3_template_trains_the_answer_up_to_its_end_mark(tmp_path: Path, test_data: Path):
    tokenizer = AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen3")
    item = dataset(tmp_path, [chat("What is 2+2?", "It is 4.")], tokenizer)[0]
    text = trained_text(tokenizer, item)
    assert "It is 4.<|im_end|>" in text and "What is" not in text


def test_too_long_conversations_are_refused_with_file_and_row(tmp_path: Path):
    rows = [chat("ab", "c"), chat("ab", "cdefgh")]
    with pytest.raises(DataError, match=r"rows.jsonl.*2.*9 tokens.*max_length is 5"):
        dataset(tmp_path, rows, make_tokenizer("abcdefgh"), max_length=5)


def test_truncation_keeps_the_side_that_was_asked_for(tmp_path: Path):
    tokenizer = make_tokenizer("abcdefgh")
    left = dataset(tmp_path, [chat("ab", "cdefgh")], tokenizer, max_length=5, truncation="left")
    right = dataset(tmp_path, [chat("ab", "cdefgh")], tokenizer, max_length=5, truncation="right")
    assert tokenizer.decode(left[0].tokens) == "efgh<eos>" and tokenizer.decode(right[0].tokens) == "abcde"
    assert left.num_truncated == right.num_truncated == 1


def test_a_conversation_without_an_answer_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="no assistant message"):
        dataset(tmp_path, [chat("ab")], make_tokenizer("abcdefgh"))
