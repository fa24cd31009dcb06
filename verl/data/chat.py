"""Chat messages to prompt tokens: checks conversations and applies the chat template."""

import contextlib
import functools
import logging
import re
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from verl.utils.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TEMPLATE_S = 10.0  # for one message
ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED_TEMPLATE_KWARGS = (
    "conversation",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
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
    messages = check_messages(prompt)
    if not any(_message_text(message).strip() for message in messages):
        raise ValueError("the prompt is empty")
    return messages


def check_messages(prompt: object) -> list[Message]:
    """`read_messages`, whose texts may all be empty."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, np.ndarray):  # as returned by data sets built on pandas
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence):
        raise ValueError(f"expected a list of {{role, content}} messages or a string, found {type(prompt).__name__}")
    if not prompt:
        raise ValueError("the prompt has no messages")
    return [_read_message(number, message) for number, message in enumerate(prompt)]


def with_system(messages: list[Message], text: str | None) -> list[Message]:
    """The messages below a system message `text`, where they begin with none."""
    has_own = not text or messages[0]["role"] in ("system", "developer")
    return messages if has_own else [{"role": "system", "content": text}, *messages]


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


def begun_answer(messages: Sequence[Message]) -> str:
    """The text with which a prompt begins its answer: its last message, if that is the assistant's; else nothing."""
    return _message_text(messages[-1]) if messages and messages[-1].get("role") == "assistant" else ""


def with_answer(prompt: Sequence[Message], text: str) -> list[Message]:
    """The conversation of a prompt and a sampled answer, one message with what begins it."""
    before = prompt[:-1] if prompt and prompt[-1].get("role") == "assistant" else prompt
    return [*before, {"role": "assistant", "content": begun_answer(prompt) + text}]


THINKING_STARTS = r"<(?:seed:)?think>|\[THINK\]|<\|channel>thought"
THINKING_ENDS = r"</(?:seed:)?think>|\[/THINK\]|<channel\|>"
_MARK_AT_END = re.compile(rf"({THINKING_STARTS}|{THINKING_ENDS})\s*$")


def render_prompt(messages: Sequence[Message], render: Callable[..., str]) -> str:
    """The text that an answer follows; `render` applies a chat template, with the options of `transformers`.

    It ends with the generation prompt, or with the last message where that is the assistant's: as the template begins
    such a message, or behind the generation prompt where the template alters it or closes another thinking before it.
    ValueError if the last message holds more than text.
    """
    *before, last = messages
    if last["role"] != "assistant":
        return render(messages, add_generation_prompt=True)
    begun, more = begun_answer(messages), last.keys() - {"role", "content"}
    if begun.strip() and "tool_calls" not in more:
        with contextlib.suppress(ValueError, TypeError, TemplateError):  # the template cannot go on with this message
            text = render(messages, continue_final_message=True)
            start = text.rstrip().removesuffix(begun.strip())
            closes = re.search(THINKING_STARTS, begun) and _MARK_AT_END.search(start)
            if start != text.rstrip() and not closes:
                return text
    if more:
        raise ValueError(
            f"the last message is the assistant's and has {', '.join(sorted(more))}, which no answer can go on from; "
            "end the prompt with another role, or with a text that begins the answer"
        )
    text = render(before, add_generation_prompt=True)
    opened = _MARK_AT_END.search(text)
    is_twice = opened and begun.lstrip().startswith(opened.group(1))  # both open the thinking
    return (text[: opened.start()] if opened and is_twice else text) + begun


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

    def render(self, messages: Sequence[Message], **how: Any) -> str:
        """The conversation as text; `how`: add_generation_prompt or continue_final_message, as in `transformers`."""
        if not self.has_template:
            return "\n".join(_message_text(message) for message in messages)
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **how, **self._kwargs)
        assert isinstance(text, str)
        return text

    def render_prompt(self, messages: Sequence[Message]) -> str:
        """The text that an answer follows; a last message of the assistant begins it."""
        return render_prompt(messages, self.render) if self.has_template else self.render(messages)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of rendered prompts, tokenised in one call (a fast tokenizer uses every core)."""
        if not texts:
            return []
        # The template has already written the special tokens; adding them again would double the first one.
        ids = self._tokenizer(texts, add_special_tokens=not self.has_template, return_attention_mask=False)["input_ids"]
        return ids if self.has_template else [self._without_eos(row) for row in ids]

    def _without_eos(self, ids: list[int]) -> list[int]:
        return ids[:-1] if len(ids) > 1 and ids[-1] == self._tokenizer.eos_token_id else ids


def answer_ending(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The tokens that the template writes behind an answer, its end mark first; empty without a template."""
    if not tokenizer or not tokenizer.chat_template:
        return []
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # such a template needs more than a question; the prompts say whether it can be used
        return []
    return list(tokenizer.encode(text.rpartition("answer")[2], add_special_tokens=False))


def end_marks(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The token that training puts behind an answer: the first mark that the template writes there, or without a
    template the end-of-sequence token; empty where there is none."""
    if not tokenizer:
        return []
    ends = answer_ending(tokenizer) if tokenizer.chat_template else [tokenizer.eos_token_id]
    marks = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return [token for token in ends if token in marks][:1]


def check_template_ends(tokenizer: "PreTrainedTokenizerBase") -> None:
    """ConfigError where the chat template does not come to an end; what it says of an example does not matter."""

    def stop(*_: Any) -> None:
        raise ConfigError(
            f"the chat template of {tokenizer.name_or_path} takes longer than {TEMPLATE_S:g} s for one message: it has "
            "a loop without an end; repair it, or set model.custom_chat_template"
        )

    if not tokenizer.chat_template or threading.current_thread() is not threading.main_thread():  # no signals there
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, TEMPLATE_S)
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False, add_generation_prompt=True)
    except ConfigError:
        raise
    except Exception as error:  # of an author who wants other messages; those of the rows are said with their row
        logger.debug("the chat template refuses an example: %s", error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
