"""Text that grows with its tokens: whole characters, no part of a stop string, nothing lost."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from verl.commands.serve.text_stream import TextStream, cut_at_stop

TEXTS = st.text(alphabet="ab<é日😀\u200d", max_size=12)
ENDS = st.lists(st.sampled_from(["ab", "b", "<é", "aab", "日日", "<"]), max_size=2)


def decode_bytes(ids: list[int]) -> str:
    """One token per byte, as a byte-level tokenizer without merges."""
    return bytes(ids).decode("utf-8", errors="replace")


def streamed(stream: TextStream, ids: list[int], sizes: list[int]) -> list[str]:
    """The pieces of `ids` that arrive in groups of `sizes`, taken in turn."""
    pieces, turn = [], 0
    while ids:
        size = sizes[turn % len(sizes)]
        pieces.append(stream.add(ids[:size]))
        ids, turn = ids[size:], turn + 1
    return [*pieces, stream.add([], last=True)]


@given(TEXTS, ENDS, st.lists(st.integers(1, 5), min_size=1, max_size=3))
@example("aaab", ["aab"], [1])
@example("a😀b", ["b"], [3])
def test_pieces_join_to_the_whole_text_cut_at_the_first_end(text: str, ends: list[str], sizes: list[int]):
    pieces = streamed(TextStream(decode_bytes, ends), list(text.encode()), sizes)
    assert "".join(pieces) == cut_at_stop(text, ends)
    assert not any("\ufffd" in piece for piece in pieces)
    for number in range(len(pieces) - 1):  # what was said is no beginning of an end that came later
        said = "".join(pieces[: number + 1])
        assert cut_at_stop(text, ends).startswith(said) and not any(end in said for end in ends)


def test_text_is_given_as_soon_as_it_is_certain():
    pieces = streamed(TextStream(decode_bytes, ["stop"]), list("a é st sto!".encode()), [1])
    assert pieces == ["a", " ", "", "é", " ", "", "", "st ", "", "", "", "sto!", ""]


def test_bytes_that_are_no_text_come_at_the_end_and_nothing_follows_an_end():
    assert streamed(TextStream(decode_bytes, []), [0x61, 0xF0, 0x9F], [1]) == ["a", "", "", "\ufffd"]
    assert streamed(TextStream(decode_bytes, ["b"]), list(b"abab"), [1]) == ["a", "", "", "", ""]


@pytest.mark.parametrize("name", ["qwen3", "qwen2.5"])
def test_a_real_tokenizer_splits_nothing(test_data: Path, name: str):
    tokenizer = AutoTokenizer.from_pretrained(test_data / "tokenizers" / name)
    text = "Grüße, 你好 👩‍👩‍👧 naïve\n\n🇺🇳  x"
    ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
    stream = TextStream(lambda some: tokenizer.decode(some, skip_special_tokens=True), ["</s>"])
    pieces = streamed(stream, ids, [1])
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) > len(ids) / 2
