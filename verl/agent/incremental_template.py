"""Incremental chat template: sampled token ids are kept unchanged, and only appended turns are rendered.

Rendering the whole conversation again could change sampled tokens: the tokenizer may split the text differently, or the
template may drop earlier thinking. So an appended turn is rendered after a placeholder answer, and only the text after
that answer's end-of-turn token is tokenised.
"""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from verl.data.chat import Message, end_marks, render_prompt
from verl.data.control_marks import control_marks, encode_with_hidden_marks, hide_tool_marks
from verl.utils.errors import ConfigError

PLACEHOLDER = "\u2063answer\u2063"  # invisible separators, so that no conversation contains it


class IncrementalTemplate:
    """Token ids of initial messages and of appended turns, for one chat template and list of tool schemas.

    Control marks in a tool's text are tokenised as text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[dict[str, Any]] = (),
        end_token_ids: Sequence[int] = (),
        template_kwargs: dict[str, Any] | None = None,
    ):
        self.tokenizer, self.tools, self.template_kwargs = tokenizer, list(tools), dict(template_kwargs or {})
        self.marks = control_marks(tokenizer)
        candidates = [*end_token_ids, tokenizer.eos_token_id, *end_marks(tokenizer)]
        self.end_token_ids = tuple(dict.fromkeys(int(i) for i in candidates if i is not None))
        self.end_texts = [str(tokenizer.convert_ids_to_tokens(i)) for i in self.end_token_ids]

    def initial_tokens(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the prompt, with the generation prompt or the beginning of the answer at the end."""
        shown, hidden = hide_tool_marks(messages, self.marks)
        return encode_with_hidden_marks(render_prompt(shown, self._apply), hidden, self.tokenize)

    def appended_tokens(self, messages: Sequence[Message], answer_ids: Sequence[int] = ()) -> list[int]:
        """Token ids of `messages` (tool or user turns) after an answer, with the generation prompt at the end.

        `answer_ids`: the sampled answer; if its end-of-turn token is missing, that token is added first.
        """
        end = [str(self.tokenizer.convert_ids_to_tokens(i)) for i in self.missing_end_token(answer_ids)]
        shown, hidden = hide_tool_marks(messages, self.marks)
        return encode_with_hidden_marks("".join(end) + self.appended_text(shown), hidden, self.tokenize)

    def missing_end_token(self, answer_ids: Sequence[int]) -> list[int]:
        """The end-of-turn token if a sampled answer lacks one; else nothing."""
        is_cut = answer_ids and answer_ids[-1] not in self.end_token_ids and self.end_token_ids
        return [self.end_token_ids[-1]] if is_cut else []

    def appended_text(self, messages: Sequence[Message]) -> str:
        """The text of `messages` as the template renders it after the end-of-turn token of an answer."""
        last_error: Exception | None = None
        for placeholder in self._placeholder_answers(messages):
            try:
                rendered = self.render([{"role": "user", "content": "?"}, placeholder, *messages], True)
            except (TemplateError, TypeError, ValueError) as error:
                last_error = error
                continue
            _, separator, after = rendered.rpartition(PLACEHOLDER)
            end_positions = [(after.index(end), end) for end in self.end_texts if end in after]
            if separator and end_positions:
                index, end = min(end_positions)
                return after[index + len(end) :]
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
        raise ConfigError(
            f"the chat template cannot append {roles} turns to an answer"
            + (f": {last_error}" if last_error else f": it writes none of the end tokens {self.end_texts} after one")
            + "; run `verl check-template` on it, or give actor_rollout_ref.model.custom_chat_template"
        )

    def _placeholder_answers(self, messages: Sequence[Message]) -> list[Message]:
        """Answers to render before `messages`: plain text, then a tool call, which some templates require."""
        calls = [
            {
                "id": str(message.get("tool_call_id", f"call_{number}")),
                "type": "function",
                "function": {"name": str(message.get("name", "tool")), "arguments": {"value": PLACEHOLDER}},
            }
            for number, message in enumerate(messages)
            if message["role"] == "tool"
        ]
        plain: Message = {"role": "assistant", "content": PLACEHOLDER}
        return [plain, {"role": "assistant", "content": "", "tool_calls": calls}] if calls else [plain]

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The whole conversation as text, rendered by the chat template."""
        return self._apply(messages, add_generation_prompt=add_generation_prompt)

    def _apply(self, messages: Sequence[Message], **how: Any) -> str:
        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"conversations need a chat template, and the tokenizer {self.tokenizer.name_or_path!r} has no chat "
                "template; set actor_rollout_ref.model.custom_chat_template"
            )
        tools: Any = self.tools or None
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, **how, **self.template_kwargs
        )
        assert isinstance(text, str)
        return text

    def tokenize(self, text: str) -> list[int]:
        """Token ids of rendered text; no special tokens are added, because the template writes them."""
        text = text.encode(errors="replace").decode()  # a lone surrogate (possible in a tool's JSON) has no bytes
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
