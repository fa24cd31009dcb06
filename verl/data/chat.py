"""Chat messages to prompt tokens: checks conversations and applies the chat template."""

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.utils.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED_TEMPLATE_KWARGS = (
    "conversation",
    "tokenize",
    "add_generation_prompt",
    "return_dict",
    "return_tensors",
    "padding",
    "truncation",
)

Message = dict[str, Any]


def read_messages(prompt: object) -> list[Message]:
    """The chat messages of a row's prompt; ValueError says what is invalid.

    A list of {role, content} is used as it is, without fields that are None (parquet fills missing fields with None).
    A plain string is one user message.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, np.ndarray):  # as returned by data sets built on pandas
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence):
        raise ValueError(f"expected a list of {{role, content}} messages or a string, found {type(prompt).__name__}")
    messages = [_read_message(number, message) for number, message in enumerate(prompt)]
    if not any(_message_text(message).strip() for message in messages):
        raise ValueError("the prompt is empty" if messages else "the prompt has no messages")
    return messages


def _read_message(number: int, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"message {number} is {type(message).__name__}, expected {{role, content}}")
    message = {key: value for key, value in message.items() if value is not None}
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"message {number} has role {role!r}; allowed: {', '.join(ROLES)}")
    if content is None and "tool_calls" not in message:
        raise ValueError(f"message {number} ({role}) has no content")
    if isinstance(content, list):
        _check_parts(number, content)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"message {number} ({role}) has content of type {type(content).__name__}, expected a string")
    return message


def _check_parts(number: int, parts: list[Any]) -> None:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise ValueError(f"message {number} has a content part of type {kind!r}; only text is supported so far")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"message {number} has a text part without a string under 'text'")


def _message_text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@functools.cache  # once per tokenizer, not once per data set
def _warn_no_template(name: str) -> None:
    logger.warning(
        "the tokenizer %r has no chat template: prompts are the plain message contents, without role marks; "
        "set model.custom_chat_template (below actor_rollout_ref in PPO) to use one",
        name,
    )


class PromptTemplate:
    """Encodes messages as prompt tokens, with the tokenizer's chat template and its generation prompt.

    Without a chat template a prompt is plain text: message contents joined by a newline, with the special tokens that
    the tokenizer adds, except a final end-of-sequence token. This is logged once as a warning.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", kwargs: Mapping[str, Any] | None = None):
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        reserved = [key for key in self._kwargs if key in RESERVED_TEMPLATE_KWARGS]
        if reserved:
            raise ConfigError(
                f"data.apply_chat_template_kwargs sets {', '.join(reserved)}, which the prompt reader sets itself; "
                "remove it and keep only variables of the template such as enable_thinking"
            )
        self.has_template = bool(tokenizer.chat_template)
        if not self.has_template:
            _warn_no_template(str(tokenizer.name_or_path))

    def render(self, messages: list[Message], add_generation_prompt: bool = True) -> str:
        """The conversation as text, with the generation prompt if `add_generation_prompt`."""
        if not self.has_template:
            return "\n".join(_message_text(message) for message in messages)
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **self._kwargs
        )
        assert isinstance(text, str)
        return text

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of rendered prompts, tokenised in one call (a fast tokenizer uses every core)."""
        if not texts:
            return []
        # The template has already written the special tokens; adding them again would double the first one.
        ids = self._tokenizer(texts, add_special_tokens=not self.has_template, return_attention_mask=False)["input_ids"]
        return ids if self.has_template else [self._without_eos(row) for row in ids]

    def _without_eos(self, ids: list[int]) -> list[int]:
        return ids[:-1] if len(ids) > 1 and ids[-1] == self._tokenizer.eos_token_id else ids
