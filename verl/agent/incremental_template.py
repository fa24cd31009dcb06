"""A conversation as one growing list of token ids: what the policy sampled stays as it is, only new turns are rendered.

Rendering a whole conversation again would change tokens the policy sampled (another split of the same text, a template
that drops earlier thinking). So an appended turn is rendered after a placeholder for the last answer, and only what the
template writes after that answer's end mark is tokenised.
"""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from verl.data.chat import Message
from verl.utils.errors import ConfigError

PLACEHOLDER = "\u2063answer\u2063"  # invisible separators: no conversation holds it


class IncrementalTemplate:
    """Initial and appended tokens of one chat template, with the tools the policy is shown."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[dict[str, Any]] = (),
        end_token_ids: Sequence[int] = (),
        template_kwargs: dict[str, Any] | None = None,
    ):
        self.tokenizer, self.tools, self.template_kwargs = tokenizer, list(tools), dict(template_kwargs or {})
        candidates = [*end_token_ids, tokenizer.eos_token_id]
        self.end_token_ids = tuple(dict.fromkeys(int(i) for i in candidates if i is not None))
        self.end_texts = [str(tokenizer.convert_ids_to_tokens(i)) for i in self.end_token_ids]

    def initial_tokens(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the prompt, ready to be answered."""
        return self.tokenize(self.render(messages, True))

    def appended_tokens(self, messages: Sequence[Message], answer_ids: Sequence[int] = ()) -> list[int]:
        """Token ids that `messages` (tool or user turns) add after an answer, with the start of the next answer.

        `answer_ids`: the answer as sampled; where it was cut before its end mark, the mark is added first.
        """
        text = self.appended_text(messages)
        if answer_ids and answer_ids[-1] not in self.end_token_ids and self.end_texts:
            text = self.end_texts[-1] + text
        return self.tokenize(text)

    def appended_text(self, messages: Sequence[Message]) -> str:
        """What the template writes after the end mark of the answer that `messages` follow."""
        problem: Exception | None = None
        for placeholder in self._placeholder_answers(messages):
            try:
                rendered = self.render([{"role": "user", "content": "?"}, placeholder, *messages], True)
            except (TemplateError, TypeError, ValueError) as error:
                problem = error
                continue
            _, found, after = rendered.rpartition(PLACEHOLDER)
            marks_found = [(after.index(end), end) for end in self.end_texts if end in after]
            if found and marks_found:
                index, end = min(marks_found)
                return after[index + len(end) :]
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
        raise ConfigError(
            f"the chat template cannot append {roles} turns to an answer"
            + (f": {problem}" if problem else f": it writes none of the end marks {self.end_texts} after an answer")
            + "; run `verl check-template` on it, or give actor_rollout_ref.model.custom_chat_template"
        )

    def _placeholder_answers(self, messages: Sequence[Message]) -> list[Message]:
        """Answers to render `messages` after: plain text; then a tool call, which some templates insist on."""
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
        """The whole conversation as the template writes it."""
        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"conversations need a chat template, and the tokenizer {self.tokenizer.name_or_path!r} has no chat "
                "template; set actor_rollout_ref.model.custom_chat_template"
            )
        tools: Any = self.tools or None
        text = self.tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self.template_kwargs,
        )
        assert isinstance(text, str)
        return text

    def tokenize(self, text: str) -> list[int]:
        """Tokens of rendered text: a template writes its special tokens itself."""
        text = text.encode(errors="replace").decode()  # half a surrogate pair (a tool's JSON may hold one) has no bytes
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
