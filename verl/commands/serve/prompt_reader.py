"""Prompts of a request as token ids; what cannot fit into the model is refused before it costs time or memory."""

import functools
import inspect
import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.commands.serve.request_body import MAX_ANSWERS, RequestError
from verl.data.chat import Message, PromptTemplate, check_messages
from verl.data.control_marks import control_marks, encode_with_hidden_marks, hide_tool_marks, show_marks

_PIECE_CHARACTERS = 1 << 16  # tokenised at once while the length is not known to fit
_CUT_TOKENS = 16  # tokens that a cut between two pieces may add


class PromptReader:
    """Reads prompts with one tokenizer. `max_length`: tokens of a prompt with its answer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, template_kwargs: Mapping[str, Any] | None = None
    ):
        self.tokenizer, self.max_length, self.template_kwargs = tokenizer, max_length, dict(template_kwargs or {})
        self.marks = control_marks(tokenizer)
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self.reserved = {name for name in parameters if name not in ("kwargs", "documents")}

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()))

    def read_chat(self, body: dict[str, Any], tools: list[dict[str, Any]]) -> list[int]:
        """Token ids of `messages` with the generation prompt. Control marks in a tool's text are text."""
        kwargs = body.get("chat_template_kwargs", {})
        if reserved := sorted(self.reserved & kwargs.keys()):
            raise RequestError(
                f"chat_template_kwargs may not set {', '.join(reserved)}; it takes variables of the chat template",
                "chat_template_kwargs",
            )
        try:
            messages, hidden = hide_tool_marks([_as_text(m) for m in check_messages(body["messages"])], self.marks)
        except ValueError as error:
            raise RequestError(f"messages: {error}", "messages") from error
        self._check_characters(sum(len(m.get("content") or "") for m in messages), "messages")
        try:
            template = PromptTemplate(self.tokenizer, self.template_kwargs | kwargs)
            text = template.render_prompt(messages)
            if tools:
                with_tools = {**self.template_kwargs, **kwargs, "tools": tools}
                plain, text = text, PromptTemplate(self.tokenizer, with_tools).render_prompt(messages)
        except Exception as error:  # a template is the model author's code
            raise RequestError(f"messages: {error}", "messages") from error
        if tools and text == plain:
            raise RequestError(
                "tools: the chat template of this model has no place for tools; leave tools out or serve another model",
                "tools",
            )
        self._check_length(show_marks(text, hidden), "messages")
        return encode_with_hidden_marks(text, hidden, lambda piece: template.encode([piece])[0])

    def read_prompts(self, body: dict[str, Any]) -> list[list[int]]:
        """A text, a list of texts, token ids, or a list of those."""
        prompt = body["prompt"]
        prompts = prompt if isinstance(prompt, list) and prompt and type(prompt[0]) is not int else [prompt]
        if len(prompts) * body.get("n", 1) > MAX_ANSWERS:
            raise RequestError(
                f"prompt: {len(prompts)} prompts with n={body.get('n', 1)} ask for more than {MAX_ANSWERS} answers; "
                "send fewer at once",
                "prompt",
            )
        return [self._read_prompt(one) for one in prompts]

    def _read_prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt):
            return prompt
        if not isinstance(prompt, str):
            raise RequestError("prompt must be a text, token ids, or a list of either", "prompt")
        self._check_length(prompt, "prompt")
        ids: list[int] = self.tokenizer(prompt)["input_ids"]
        if not ids:
            raise RequestError("prompt is empty; give at least one token", "prompt")
        return ids

    def _check_characters(self, count: int, field: str) -> None:
        if count > self.max_length * self.longest_token:
            self._refuse(-(-count // self.longest_token), field)

    def _check_length(self, text: str, field: str) -> None:
        """Raise RequestError for a text longer than the model's window, without tokenising more than one window."""
        self._check_characters(len(text), field)
        count = 0
        for start in range(0, len(text) if len(text) > _PIECE_CHARACTERS else 0, _PIECE_CHARACTERS):
            piece = text[start : start + _PIECE_CHARACTERS]
            count += len(self.tokenizer(piece, add_special_tokens=False)["input_ids"]) - _CUT_TOKENS
            if count > self.max_length:
                self._refuse(count, field)

    def _refuse(self, count: int, field: str) -> None:
        raise RequestError(
            f"{field}: at least {count} prompt tokens exceed the {self.max_length} tokens one conversation may hold "
            "here; shorten it",
            field,
            code="context_length_exceeded",
        )


def _as_text(message: Message) -> Message:
    """`message` with its content as one text and the arguments of its tool calls as objects: what templates read."""
    content = message.get("content")
    if isinstance(content, list):
        message = {**message, "content": "".join(part["text"] for part in content)}
    if "tool_calls" in message:
        message = {"content": "", **message, "tool_calls": _read_calls(message["tool_calls"])}
    return message


def _read_calls(calls: Any) -> list[dict[str, Any]]:
    read = []
    for call in calls if isinstance(calls, list) else [calls]:
        function: Any = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments", "{}") if isinstance(function, dict) else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not named or not isinstance(arguments, str | dict):
            raise ValueError(
                f"tool_calls must be a list of {{id, type, function: {{name, arguments}}}}, found {calls!r:.80}"
            )
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                parsed = None
            arguments = parsed if isinstance(parsed, dict) else arguments
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read
