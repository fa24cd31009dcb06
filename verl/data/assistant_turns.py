"""Which tokens of a conversation the assistant says, exactly as it would sample them.

Each assistant turn is trained after the prompt that the chat template makes of the messages before it. While that
prompt continues what is there already, the turns share one sequence. Some templates rewrite earlier turns (Qwen3 drops
their thinking): there a new sequence starts with the rewritten history, and only its own turns are trained.
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
    """Conversations to token sequences with a loss mask.

    With `append_only` a conversation is always one sequence: each turn is appended as it was rendered when it was the
    newest, which is what a multi-turn agent that never rewrites its history sees.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, append_only: bool = False):
        self._tokenizer, self._append_only = tokenizer, append_only
        self._special = set(tokenizer.all_special_ids)

    def segment_conversation(self, messages: list[Message], template: PromptTemplate) -> list[list[TextSegment]]:
        """The sequences of a conversation as texts, trained ones apart; ValueError where a turn has no start."""
        sequence_segments: list[list[TextSegment]] = []
        rendered = ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = _render(template, messages[:i], True)
            with_answer = _render(template, messages[: i + 1], False)
            if not with_answer.startswith(prompt):
                raise ValueError(
                    f"the chat template renders message {i} (assistant) without the start that it gives to an answer "
                    f"({prompt[-40:]!r}), so nothing could sample this turn; check enable_thinking, or give "
                    f"model.custom_chat_template"
                )
            answer = (with_answer[len(prompt) :], True)
            if sequence_segments and prompt.startswith(rendered):
                sequence_segments[-1] += [(prompt[len(rendered) :], False), answer]
            elif sequence_segments and self._append_only:
                sequence_segments[-1] += [(_appended_text(template, messages[:i]), False), answer]
            else:
                sequence_segments.append([(prompt, False), answer])
            rendered = with_answer
        return sequence_segments

    def encode(self, sequence_segments: Sequence[list[TextSegment]]) -> list[MaskedTokens | ValueError]:
        """Token ids of each sequence, a turn's boundary always between two tokens; where that cannot be, the reason."""
        if not sequence_segments:
            return []
        parts = iter(self._ids([text for segments in sequence_segments for text, _ in segments]))
        joint_ids = self._ids(["".join(text for text, _ in segments) for segments in sequence_segments])
        return [
            self._align_with_turns(segments, [next(parts) for _ in segments], whole)
            for segments, whole in zip(sequence_segments, joint_ids, strict=True)
        ]

    def _align_with_turns(
        self, segments: list[TextSegment], parts: list[list[int]], whole: list[int]
    ) -> MaskedTokens | ValueError:
        if [i for part in parts for i in part] != whole and not self._append_only:
            split = self._split_at_boundaries(segments, whole)
            if isinstance(split, ValueError):
                return split
            parts = split
        ids: list[int] = []
        mask: list[bool] = []
        for part, (_, trained) in zip(parts, segments, strict=True):
            kept = self._num_sampled(part) if trained else 0
            ids += part
            mask += [True] * kept + [False] * (len(part) - kept)
        return ids, mask

    def _split_at_boundaries(self, segments: list[TextSegment], whole: list[int]) -> list[list[int]] | ValueError:
        """The ids of the whole text cut where its beginnings end; tokens joined across a boundary are an error."""
        parts: list[list[int]] = []
        text, start = "", 0
        for segment, _ in segments:
            text += segment
            prefix_ids = self._ids([text])[0]
            if whole[: len(prefix_ids)] != prefix_ids:
                return ValueError(
                    f"the tokenizer joins text across the end of a turn ({text[-20:]!r}), so that the next one has no "
                    f"first token of its own; {APPEND_HINT}"
                )
            parts.append(whole[start : len(prefix_ids)])
            start = len(prefix_ids)
        return parts

    def _num_sampled(self, answer: list[int]) -> int:
        """Tokens of a turn up to its end mark: white space that a template puts after it is never sampled."""
        last = max((place for place, token in enumerate(answer) if token in self._special), default=-1)
        tail = answer[last + 1 :]
        return last + 1 if last >= 0 and not str(self._tokenizer.decode(tail)).strip() else len(answer)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        # A template writes its special tokens itself.
        return self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]

    def encode_without_template(self, messages: list[Message], template: PromptTemplate) -> MaskedTokens:
        """Without a chat template: contents one after the other; an assistant message ends with end-of-sequence."""
        ids: list[int] = []
        mask: list[bool] = []
        context: list[Message] = []
        for message in messages:
            if message["role"] != "assistant":
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
        return template.render(messages, add_generation_prompt)
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template cannot render the first {len(messages)} messages: {error}") from error


def _appended_text(template: PromptTemplate, messages: list[Message]) -> str:
    """What the messages after the last assistant turn add to a conversation, with the start of the next answer."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    initial_messages = messages[:first]
    before = _render(template, initial_messages, False)
    after = _render(template, [*initial_messages, *messages[last + 1 :]], True)
    if not after.startswith(before):
        raise ValueError(
            f"the chat template rewrites the opening of the conversation when messages {last + 1} to "
            f"{len(messages) - 1} are added, so their own text cannot be told; leave data.ignore_input_ids_mismatch off"
        )
    return after[len(before) :]
