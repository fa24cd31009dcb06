"""Which tokens of a conversation the assistant says, exactly as it would sample them.

Each assistant turn is trained after the prompt that the chat template makes of the messages before it. While that
prompt continues what is there already, the turns share one sequence. Some templates rewrite earlier turns (Qwen3 drops
their thinking): there a new sequence starts with the rewritten history, and only its own turns are trained.
"""

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from verl.data.chat import Message, PromptTemplate

Piece = tuple[str, bool]  # text, and whether it is trained
Tokens = tuple[list[int], list[bool]]  # ids, and which of them are trained

APPEND = "set data.ignore_input_ids_mismatch=True to append the turns to each other as they were rendered one by one"


class TurnTokenizer:
    """Conversations to token sequences with a loss mask.

    With `append_only` a conversation is always one sequence: each turn is appended as it was rendered when it was the
    newest, which is what a multi-turn agent that never rewrites its history sees.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, append_only: bool = False):
        self._tokenizer, self._append_only = tokenizer, append_only
        self._special = set(tokenizer.all_special_ids)

    def chains(self, messages: list[Message], template: PromptTemplate) -> list[list[Piece]]:
        """The sequences of a conversation as texts, trained ones apart; ValueError where a turn has no start."""
        chains: list[list[Piece]] = []
        done = ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = _render(template, messages[:i], True)
            whole = _render(template, messages[: i + 1], False)
            if not whole.startswith(prompt):
                raise ValueError(
                    f"the chat template renders message {i} (assistant) without the start that it gives to an answer "
                    f"({prompt[-40:]!r}), so nothing could sample this turn; check enable_thinking, or give "
                    f"model.custom_chat_template"
                )
            answer = (whole[len(prompt) :], True)
            if chains and prompt.startswith(done):
                chains[-1] += [(prompt[len(done) :], False), answer]
            elif chains and self._append_only:
                chains[-1] += [(_appended(template, messages[:i]), False), answer]
            else:
                chains.append([(prompt, False), answer])
            done = whole
        return chains

    def encode(self, chains: Sequence[list[Piece]]) -> list[Tokens | ValueError]:
        """Token ids of each chain, a turn's boundary always between two tokens; where that cannot be, the reason."""
        if not chains:
            return []
        parts = iter(self._ids([text for chain in chains for text, _ in chain]))
        wholes = self._ids(["".join(text for text, _ in chain) for chain in chains])
        return [
            self._aligned(chain, [next(parts) for _ in chain], whole)
            for chain, whole in zip(chains, wholes, strict=True)
        ]

    def _aligned(self, chain: list[Piece], parts: list[list[int]], whole: list[int]) -> Tokens | ValueError:
        if [i for part in parts for i in part] != whole and not self._append_only:
            found = self._cut(chain, whole)
            if isinstance(found, ValueError):
                return found
            parts = found
        ids: list[int] = []
        mask: list[bool] = []
        for part, (_, trained) in zip(parts, chain, strict=True):
            kept = self._sampled(part) if trained else 0
            ids += part
            mask += [True] * kept + [False] * (len(part) - kept)
        return ids, mask

    def _cut(self, chain: list[Piece], whole: list[int]) -> list[list[int]] | ValueError:
        """The ids of the whole text cut where its beginnings end; tokens joined across a boundary are an error."""
        parts: list[list[int]] = []
        text, done = "", 0
        for piece, _ in chain:
            text += piece
            begun = self._ids([text])[0]
            if whole[: len(begun)] != begun:
                return ValueError(
                    f"the tokenizer joins text across the end of a turn ({text[-20:]!r}), so that the next one has no "
                    f"first token of its own; {APPEND}"
                )
            parts.append(whole[done : len(begun)])
            done = len(begun)
        return parts

    def _sampled(self, answer: list[int]) -> int:
        """Tokens of a turn up to its end mark: white space that a template puts after it is never sampled."""
        last = max((place for place, token in enumerate(answer) if token in self._special), default=-1)
        tail = answer[last + 1 :]
        return last + 1 if last >= 0 and not str(self._tokenizer.decode(tail)).strip() else len(answer)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        # A template writes its special tokens itself.
        return self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]

    def plain(self, messages: list[Message], template: PromptTemplate) -> Tokens:
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


def _appended(template: PromptTemplate, messages: list[Message]) -> str:
    """What the messages after the last assistant turn add to a conversation, with the start of the next answer."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    opening = messages[:first]
    before = _render(template, opening, False)
    after = _render(template, [*opening, *messages[last + 1 :]], True)
    if not after.startswith(before):
        raise ValueError(
            f"the chat template rewrites the opening of the conversation when messages {last + 1} to "
            f"{len(messages) - 1} are added, so their own text cannot be told; leave data.ignore_input_ids_mismatch off"
        )
    return after[len(before) :]
