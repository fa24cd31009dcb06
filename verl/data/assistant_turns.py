"""Conversations as token sequences with a loss mask on the assistant's tokens, exactly as it would sample them.

Each assistant turn is trained after the prompt that the chat template renders from the messages before it. Turns stay
in one sequence while that prompt extends the text so far. If the template rewrites earlier turns (Qwen3 drops their
thinking), a new sequence starts with the rewritten history, and only the turns after it are trained there.
"""

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from verl.data.chat import Message, PromptTemplate

TextSegment = tuple[str, bool]  # text, and whether it is trained
MaskedTokens = tuple[list[int], list[bool]]  # ids, and which of them are trained

APPEND_HINT = (
    "set data.ignore_input_ids_mismatch=True to append the turns to each other as they were rendered one by one"
)


class TurnTokenizer:
    """Encodes conversations as token sequences with a loss mask.

    With `append_only` a conversation is always one sequence: each turn is appended as it was rendered when it was the
    newest turn. A multi-turn agent that never rewrites its history has the same sequence. With `last_turn_only` a
    conversation is one sequence, too, and only its last message is trained.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, append_only: bool = False, last_turn_only: bool = False):
        self._tokenizer, self._append_only, self._last_turn_only = tokenizer, append_only, last_turn_only
        self._special = set(tokenizer.all_special_ids)

    def segment_conversation(self, messages: list[Message], template: PromptTemplate) -> list[list[TextSegment]]:
        """The sequences of a conversation as text segments; ValueError if a turn lacks the generation prompt."""
        sequence_segments: list[list[TextSegment]] = []
        rendered = ""
        for i in self._trained_turns(messages):
            prompt = _render(template, messages[:i], True)
            with_answer = _render(template, messages[: i + 1], False)
            if not with_answer.startswith(prompt):
                raise ValueError(
                    f"the chat template renders message {i} (assistant) without the start that its generation prompt "
                    f"gives ({prompt[-40:]!r}), so no model could sample this turn; check enable_thinking, or set "
                    f"model.custom_chat_template"
                )
            answer = (with_answer[len(prompt) :], True)
            if sequence_segments and prompt.startswith(rendered):
                sequence_segments[-1] += [(prompt[len(rendered) :], False), answer]
            elif sequence_segments and self._append_only:
                sequence_segments[-1] += [(_text_after_last_answer(template, messages[:i]), False), answer]
            else:
                sequence_segments.append([(prompt, False), answer])
            rendered = with_answer
        return sequence_segments

    def _trained_turns(self, messages: list[Message]) -> list[int]:
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return turns[-1:] if self._last_turn_only else turns

    def encode(self, sequence_segments: Sequence[list[TextSegment]]) -> list[MaskedTokens | ValueError]:
        """Token ids and mask of each sequence; the ValueError of a sequence where a token spans a turn boundary."""
        if not sequence_segments:
            return []
        parts = iter(self._ids([text for segments in sequence_segments for text, _ in segments]))
        joint_ids = self._ids(["".join(text for text, _ in segments) for segments in sequence_segments])
        return [
            self._align_with_turns(segments, [next(parts) for _ in segments], joint)
            for segments, joint in zip(sequence_segments, joint_ids, strict=True)
        ]

    def _align_with_turns(
        self, segments: list[TextSegment], parts: list[list[int]], joint: list[int]
    ) -> MaskedTokens | ValueError:
        if [i for part in parts for i in part] != joint and not self._append_only:
            split = self._split_at_boundaries(segments, joint)
            if isinstance(split, ValueError):
                return split
            parts = split
        ids: list[int] = []
        mask: list[bool] = []
        for part, (_, trained) in zip(parts, segments, strict=True):
            sampled = self._num_sampled(part) if trained else 0
            ids += part
            mask += [True] * sampled + [False] * (len(part) - sampled)
        return ids, mask

    def _split_at_boundaries(self, segments: list[TextSegment], joint: list[int]) -> list[list[int]] | ValueError:
        """The ids of the whole text, split at the segment boundaries; ValueError if a token spans a boundary."""
        parts: list[list[int]] = []
        text, start = "", 0
        for segment, _ in segments:
            text += segment
            prefix_ids = self._ids([text])[0]
            if joint[: len(prefix_ids)] != prefix_ids:
                return ValueError(
                    f"the tokenizer joins text across the end of a turn ({text[-20:]!r}), so the next turn does not "
                    f"begin at a token boundary; {APPEND_HINT}"
                )
            parts.append(joint[start : len(prefix_ids)])
            start = len(prefix_ids)
        return parts

    def _num_sampled(self, answer: list[int]) -> int:
        """Number of tokens up to the end-of-turn token: white space that a template adds after it is not sampled."""
        last = max((i for i, token in enumerate(answer) if token in self._special), default=-1)
        tail = answer[last + 1 :]
        return last + 1 if last >= 0 and not str(self._tokenizer.decode(tail)).strip() else len(answer)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        # The template has already written the special tokens.
        return self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]

    def encode_without_template(self, messages: list[Message], template: PromptTemplate) -> MaskedTokens:
        """For a tokenizer without chat template: message contents in order, end-of-sequence after each answer."""
        ids: list[int] = []
        mask: list[bool] = []
        context: list[Message] = []
        trained = self._trained_turns(messages)
        for i, message in enumerate(messages):
            if i not in trained:
                context.append(message)
                continue
            if context:
                text = template.render(context)
                before = self._ids([text])[0] if ids else template.encode([text])[0]
                ids, mask = ids + before, mask + [False] * len(before)
            end = [] if self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id]
            answer = [*self._ids([template.render([message])])[0], *end]
            ids, mask = ids + answer, mask + [True] * len(answer)
            context = []
        return ids, mask


def _render(template: PromptTemplate, messages: list[Message], add_generation_prompt: bool) -> str:
    try:
        return template.render(messages, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template cannot render the first {len(messages)} messages: {error}") from error


def _text_after_last_answer(template: PromptTemplate, messages: list[Message]) -> str:
    """The text that the messages after the last assistant turn add, then the generation prompt."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    initial_messages = messages[:first]
    before = _render(template, initial_messages, False)
    after = _render(template, [*initial_messages, *messages[last + 1 :]], True)
    if not after.startswith(before):
        raise ValueError(
            f"the chat template rewrites the opening of the conversation when messages {last + 1} to "
            f"{len(messages) - 1} are added, so their own text is unknown; leave data.ignore_input_ids_mismatch off"
        )
    return after[len(before) :]
