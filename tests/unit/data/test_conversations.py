"""Supervised rows: which tokens are trained."""

import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from verl.commands.quickstart.small_model import make_tokenizer
from verl.config import SFTDataConfig
from verl.config.data import CustomClassConfig
from verl.data.conversations import ConversationDataset, load_conversations
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


def turns(tokenizer, item) -> list[tuple[bool, str]]:
    """The sequence as runs of (trained, text)."""
    pairs = zip(item.loss_mask.tolist(), item.tokens.tolist(), strict=True)
    runs = itertools.groupby(pairs, key=lambda pair: pair[0])
    return [(trained, tokenizer.decode([token for _, token in run])) for trained, run in runs]


def test_every_assistant_turn_and_its_end_is_trained_and_nothing_else(tmp_path: Path):
    tokenizer = make_tokenizer("abcdefgh")
    item = dataset(tmp_path, [chat("ab", "cd", "ef", "g")], tokenizer)[0][0]
    assert tokenizer.decode(item.tokens) == "abcd<eos>efg<eos>"
    assert trained_text(tokenizer, item) == "cd<eos>g<eos>"


def test_prompt_and_response_columns_are_one_turn(tmp_path: Path):
    tokenizer = make_tokenizer("abcdefgh")
    item = dataset(tmp_path, [{"prompt": "ab", "response": "cd"}], tokenizer)[0][0]
    assert trained_text(tokenizer, item) == "cd<eos>"


def test_without_a_template_an_answer_ends_with_end_of_sequence(tmp_path: Path):
    tokenizer = make_tokenizer("abcdefgh")
    tokenizer.chat_template = None
    item = dataset(tmp_path, [chat("ab", "cd")], tokenizer)[0][0]
    assert trained_text(tokenizer, item) == "cd<eos>"


def test_truncation_keeps_the_side_that_was_asked_for(tmp_path: Path):
    tokenizer = make_tokenizer("abcdefgh")
    left = dataset(tmp_path, [chat("ab", "cdefgh")], tokenizer, max_length=5, truncation="left")
    right = dataset(tmp_path, [chat("ab", "cdefgh")], tokenizer, max_length=5, truncation="right")
    assert tokenizer.decode(left[0][0].tokens) == "efgh<eos>" and tokenizer.decode(right[0][0].tokens) == "abcde"
    assert left.num_truncated == right.num_truncated == 1


def test_a_table_of_questions_and_answers_is_conversations(tmp_path: Path):
    tokenizer, keys = make_tokenizer("abcdefgh"), {"prompt_key": "question", "answer_key": "answer"}
    row = {"question": "ab", "answer": "cd", **chat("e", "f")}
    (item,) = dataset(tmp_path, [row], tokenizer, system_prompt="gh", **keys)[0]
    assert trained_text(tokenizer, item) == "cd<eos>" and tokenizer.decode(item.tokens) == "ghabcd<eos>"
    assert trained_text(tokenizer, dataset(tmp_path, [row], tokenizer)[0][0]) == "f<eos>"
    with pytest.raises(DataError, match=r"nor 'prompt' and 'response'; its columns are answer, question: set data.mes"):
        dataset(tmp_path, [{"question": "ab", "answer": "cd"}], tokenizer)
    written = {"question": '[{"role": "user", "content": "a"}]', "answer": "b"}
    (note,) = dataset(tmp_path, [row, written], make_tokenizer(written["question"]), **keys).notes
    assert "1 rows have a list of {role, content} as text" in note


@pytest.fixture
def qwen3(test_data: Path):
    return AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen3")


def test_the_real_qwen3_template_trains_the_answer_up_to_its_end_mark(tmp_path: Path, qwen3):
    (item,) = dataset(tmp_path, [chat("What is 2+2?", "It is 4.")], qwen3)[0]
    assert turns(qwen3, item) == [
        (False, "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "<think>\n\n</think>\n\nIt is 4.<|im_end|>"),
        (False, "\n"),
    ]


def test_without_thinking_the_empty_thought_belongs_to_the_prompt(tmp_path: Path, qwen3):
    row = chat("What is 2+2?", "It is 4.") | {"enable_thinking": False}
    assert trained_text(qwen3, dataset(tmp_path, [row], qwen3)[0][0]) == "It is 4.<|im_end|>"
    row = chat("What is 2+2?", "It is 4.")
    assert trained_text(qwen3, dataset(tmp_path, [row], qwen3, enable_thinking_default=False)[0][0]) == (
        "It is 4.<|im_end|>"
    )


THINKING = {
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\ntwo and two\n</think>\n\n4"},
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "content": "<think>\nthree twice\n</think>\n\n6"},
    ]
}


def as_sampled(tokenizer, messages: list[dict], turn: int) -> tuple[list[int], list[int]]:
    """(prompt, answer) ids of a turn as inference makes them: the template's prompt alone, then what is generated."""
    prompt = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True, return_dict=False)
    answer = tokenizer(messages[turn]["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
    return prompt, answer


def test_a_template_that_drops_earlier_thinking_trains_each_turn_in_the_context_it_is_sampled_in(tmp_path, qwen3):
    data = dataset(tmp_path, [THINKING], qwen3)
    items = data[0]
    assert len(items) == 2 and "1 conversations became several sequences (1 rows, 2 sequences)" in data.notes[0]
    for item, turn in zip(items, (2, 4), strict=True):
        prompt, answer = as_sampled(qwen3, THINKING["messages"], turn)
        first = int(item.loss_mask.nonzero()[0])
        assert item.tokens[:first].tolist() == prompt
        assert item.tokens[item.loss_mask].tolist() == answer
    assert "two and two" in qwen3.decode(items[0].tokens) and "two and two" not in qwen3.decode(items[1].tokens)


def test_on_request_earlier_thinking_stays_and_a_conversation_is_one_sequence(tmp_path: Path, qwen3):
    (item,) = dataset(tmp_path, [THINKING], qwen3, ignore_input_ids_mismatch=True)[0]
    assert turns(qwen3, item) == [
        (
            False,
            "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (True, "<think>\ntwo and two\n</think>\n\n4<|im_end|>"),
        (False, "\n<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "<think>\nthree twice\n</think>\n\n6<|im_end|>"),
        (False, "\n"),
    ]


def test_tool_calls_are_trained_and_what_tools_return_is_not(tmp_path: Path, qwen3):
    call = {"function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    row = {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [call]},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "It is 4.", "reasoning_content": "Easy."},
        ],
        "tools": json.dumps([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]),
    }
    (item,) = dataset(tmp_path, [row], qwen3)[0]
    (before, prompt), (_, first), (_, between), (_, second), (_, end) = turns(qwen3, item)
    assert before is False and '<tools>\n{"type": "function", "function": {"name": "add"' in prompt
    assert first == (
        '<think>\nI add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
        "<|im_end|>"
    )
    assert between == "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert second == "<think>\nEasy.\n</think>\n\nIt is 4.<|im_end|>" and end == "\n"


def test_parquet_rows_are_read_without_the_fields_parquet_fills_in(tmp_path: Path, qwen3):
    tools = [
        {"name": "add", "parameters": {"a": "int"}},
        {"name": "now", "parameters": {"zone": "str"}},
    ]
    pq.write_table(pa.Table.from_pylist([chat("2+2?", "4") | {"tools": tools}]), tmp_path / "rows.parquet")
    (item,) = ConversationDataset(str(tmp_path / "rows.parquet"), qwen3, SFTDataConfig())[0]
    text = qwen3.decode(item.tokens)
    assert '{"name": "add", "parameters": {"a": "int"}}' in text and "null" not in text


def test_a_template_whose_answers_do_not_begin_as_prompted_is_refused_with_the_reason(tmp_path: Path, qwen3):
    row = chat("2+2?", "<think>\nadd\n</think>\n\n4") | {"enable_thinking": False}
    with pytest.raises(DataError, match=r"line 1: .*message 1 \(assistant\) without the start .*enable_thinking"):
        dataset(tmp_path, [row], qwen3)


BYTE_PAIRS = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "<pad>": 5}


def merging_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Joins `a` and `b`, whatever turn they are from."""
    model = models.BPE(vocab=BYTE_PAIRS, merges=[("a", "b")], unk_token="<pad>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), unk_token="<pad>", pad_token="<pad>", chat_template=template
    )


def test_a_token_that_would_belong_to_two_turns_is_refused_unless_turns_are_tokenised_alone(tmp_path: Path):
    tokenizer = merging_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(DataError, match="joins text across the end of a turn"):
        dataset(tmp_path, [chat("ca", "bc")], tokenizer)
    (item,) = dataset(tmp_path, [chat("ca", "bc")], tokenizer, ignore_input_ids_mismatch=True)[0]
    assert turns(tokenizer, item) == [(False, "c a"), (True, "b c")]


def test_a_tokenizer_that_marks_the_start_of_a_text_marks_it_once(tmp_path: Path):
    """Sentencepiece puts a space before a text; a turn tokenised alone would get one in the middle."""
    tokenizer = Tokenizer(models.WordLevel({"▁": 0, "a": 1, "b": 2, "<u>": 3}, unk_token="<u>"))
    tokenizer.normalizer = normalizers.Prepend("▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<u>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (item,) = dataset(tmp_path, [chat("aa", "bb", "a", "b")], fast)[0]
    assert item.tokens.tolist() == [0, 1, 1, 2, 2, 1, 2]
    assert item.loss_mask.int().tolist() == [0, 0, 0, 1, 1, 0, 1]


def test_asking_for_no_rows_names_the_key_that_does(tmp_path: Path):
    dataset(tmp_path, [chat("a", "b")], make_tokenizer("ab"))
    with pytest.raises(DataError, match=r"no row is left; raise data.*_max_samples \(now 0\)"):
        ConversationDataset(str(tmp_path / "rows.jsonl"), make_tokenizer("ab"), SFTDataConfig(), 0)


def test_truncation_in_the_middle_keeps_both_ends(tmp_path: Path):
    tokenizer = make_tokenizer("abcdefgh")
    (item,) = dataset(tmp_path, [chat("ab", "cdefgh")], tokenizer, max_length=5, truncation="middle")[0]
    assert tokenizer.decode(item.tokens) == "abgh<eos>" and trained_text(tokenizer, item) == "gh<eos>"


def test_rows_that_lose_every_answer_to_truncation_are_left_out_and_counted(tmp_path: Path):
    tokenizer = make_tokenizer("abcdefgh")
    data = dataset(tmp_path, [chat("abcdef", "g"), chat("a", "b")], tokenizer, max_length=4, truncation="right")
    assert [trained_text(tokenizer, items[0]) for items in data] == ["b<eos>"]
    assert "1 rows had no assistant token left" in data.notes[-1]
    longer = dataset(tmp_path, [chat("abcdef", "g"), chat("a", "b")], tokenizer, max_length=8, truncation="right")
    assert len(longer) == 2 and longer.digest != data.digest  # a resumed run would count other rows


def test_a_column_that_turns_thinking_off_may_hold_words(tmp_path: Path, qwen3):
    def texts(value: Any) -> list[str]:
        data = dataset(tmp_path, [chat("Hi", "Yes") | {"enable_thinking": value}], qwen3)
        return [trained_text(qwen3, item) for item in data[0]]

    assert texts("false") == texts(False) == texts(0) != texts("True") == texts(True)
    with pytest.raises(DataError, match="column 'enable_thinking' is 'perhaps'; allowed: true, false"):
        texts("perhaps")


CUSTOM = """
import torch
class Rows(torch.utils.data.Dataset):
    def __init__(self, parquet_files, tokenizer, config, processor=None, max_samples=-1):
        self.files, self.limit = parquet_files, max_samples
    def __len__(self):
        return min(3, self.limit) if self.limit > 0 else 3
    def __getitem__(self, i):
        ids = torch.tensor([i, 7, 8, 0])
        real = torch.tensor([1, 1, 1, 0])
        return {"input_ids": ids, "loss_mask": torch.tensor([0, 0, 1, 0]), "attention_mask": real}
"""


def test_a_dataset_class_of_the_user_is_used_and_its_padding_dropped(tmp_path: Path):
    (tmp_path / "rows.py").write_text(CUSTOM)
    config = SFTDataConfig(custom_cls=CustomClassConfig(path=str(tmp_path / "rows.py"), name="Rows"))
    data = load_conversations("unread.parquet", make_tokenizer("abc"), config, max_samples=2)
    assert len(data) == 2
    (item,) = data[1]
    assert item.tokens.tolist() == [1, 7, 8] and item.loss_mask.tolist() == [False, False, True]

    def digest(content: str) -> str:
        (tmp_path / "read.parquet").write_text(content)
        return load_conversations(str(tmp_path / "read.parquet"), make_tokenizer("abc"), config).digest

    assert digest("one") == digest("one") != digest("two")  # a resumed run would count other rows


REFUSED = {
    r"rows.jsonl.*2.*9 tokens.*max_length is 5": [chat("ab", "c"), chat("ab", "cdefgh")],
    "no assistant message": [chat("ab")],
    r"line 1.*only text conversations": [chat("ab", "c") | {"images": ["x.png"]}],
    r"line 2.*only text conversations": [chat("ab", "c") | {"images": value} for value in ([], 3)],
    r"'messages' is a string, expected a list .*parse it if it is JSON": [{"messages": json.dumps([])}],
}


@pytest.mark.parametrize(("message", "rows"), REFUSED.items())
def test_rows_that_cannot_be_used_are_refused_with_the_place_and_the_reason(
    tmp_path: Path, message: str, rows: list[dict[str, Any]]
):
    with pytest.raises(DataError, match=message):
        dataset(tmp_path, rows, make_tokenizer("abcdefgh"), max_length=5)
