"""Text from outside in a conversation: a control mark in it is tokenised as the text it is, never as the mark."""

import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.data.chat import Message

_STAND_IN = re.compile("(mark[0-9a-f]{32})")
OUTSIDE_ROLES = ("tool",)  # whose text neither the policy nor the author of the conversation wrote


def control_marks(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Matches the tokenizer's special tokens, and other added tokens that the chat template writes."""
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    added = tokenizer.added_tokens_decoder.values()
    marks = {t.content for t in added if len(t.content) > 1 and (t.special or t.content in template)}
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True)))) if marks else None


def hide_tool_marks(messages: Sequence[Message], marks: re.Pattern[str] | None) -> tuple[list[Message], dict[str, str]]:
    """The messages with stand-ins for the marks in texts of `OUTSIDE_ROLES`, and the mark of each stand-in."""
    hidden: dict[str, str] = {}

    def replace(match: re.Match[str]) -> str:
        stand_in = f"mark{uuid.uuid4().hex}"
        hidden[stand_in] = match.group()
        return stand_in

    def hide(value: Any) -> Any:
        if isinstance(value, str):
            return marks.sub(replace, value) if marks else value
        if isinstance(value, list):
            return [hide(part) for part in value]
        return {k: hide(v) if k == "text" else v for k, v in value.items()} if isinstance(value, dict) else value

    return [
        {**message, "content": hide(message["content"])}
        if message.get("role") in OUTSIDE_ROLES and "content" in message
        else message
        for message in messages
    ], hidden


def show_marks(text: str, hidden: dict[str, str]) -> str:
    """`text` with the marks instead of their stand-ins."""
    return _STAND_IN.sub(lambda match: hidden.get(match.group(), match.group()), text)


def encode_with_hidden_marks(text: str, hidden: dict[str, str], encode: Callable[[str], list[int]]) -> list[int]:
    """Token ids of rendered `text`: each stand-in becomes its mark, cut after the first character so that no token of
    the vocabulary is the mark."""
    if not hidden:
        return encode(text)
    pieces, rest = [], ""
    for part in _STAND_IN.split(text):
        if part in hidden:
            pieces.append(rest + hidden[part][0])
            rest = hidden[part][1:]
        else:
            rest += part
    return [i for piece in [*pieces, rest] if piece for i in encode(piece)]
