"""Supervised rows: conversations as tokens, with a loss mask that covers exactly what the assistant says."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl.config.sft import SFTDataConfig
from verl.data.chat import Message, PromptTemplate, read_messages
from verl.data.rows import FileRows
from verl.data.trajectory import Trajectory
from verl.utils.errors import DataError


class ConversationDataset:
    """Rows with a `messages` list (every assistant turn is trained), or with `prompt` and `response` columns."""

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: SFTDataConfig,
        max_samples: int = -1,
    ):
        self._rows, self._config, self._tokenizer = FileRows(files), config, tokenizer
        count = len(self._rows) if max_samples < 0 else min(max_samples, len(self._rows))
        self.num_truncated = 0
        self._items = [self._tokenise(i) for i in range(count)]
        self.digest = hashlib.sha256(f"{self._rows.digest} {count}".encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, position: int) -> Trajectory:
        return self._items[position]

    def _tokenise(self, index: int) -> Trajectory:
        row = self._rows[index]
        try:
            messages = self._messages(row)
            pieces = turn_pieces(messages, self._template(row), self._tokenizer, self._config)
            ids = [i for piece, _ in pieces for i in piece]
            mask = [trained for piece, trained in pieces for _ in piece]
            ids, mask = self._limit(ids, mask)
        except (ValueError, DataError) as error:
            raise DataError(f"{self._rows.where(index)}: {error}") from error
        if not any(mask[1:]):
            raise DataError(f"{self._rows.where(index)}: no assistant token is left to train on")
        mask[0] = False
        tokens = torch.tensor(ids, dtype=torch.int64)
        return Trajectory(tokens, torch.tensor(mask), torch.zeros(len(ids)), group_id=index, row=index)

    def _messages(self, row: Mapping[str, Any]) -> list[Message]:
        key = self._config.messages_key
        if row.get(key) is not None:
            messages = read_messages(row[key])
        elif row.get("prompt") is not None and row.get("response") is not None:
            messages = [*read_messages(row["prompt"]), {"role": "assistant", "content": str(row["response"])}]
        else:
            raise ValueError(
                f"the row has neither {key!r} nor 'prompt' and 'response'; its columns are {', '.join(sorted(row))}"
            )
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("the conversation has no assistant message")
        return messages

    def _template(self, row: Mapping[str, Any]) -> PromptTemplate:
        kwargs = dict(self._config.apply_chat_template_kwargs)
        if row.get(self._config.tools_key) is not None:
            kwargs["tools"] = row[self._config.tools_key]
        thinking = row.get(self._config.enable_thinking_key)
        if thinking is None:
            thinking = self._config.enable_thinking_default
        if thinking is not None:
            kwargs["enable_thinking"] = bool(thinking)
        return PromptTemplate(self._tokenizer, kwargs)

    def _limit(self, ids: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
        limit, side = self._config.max_length, self._config.truncation
        if len(ids) <= limit:
            return ids, mask
        if side == "error":
            raise ValueError(
                f"the conversation has {len(ids)} tokens, data.max_length is {limit}; raise it, or set "
                f"data.truncation to left or right"
            )
        self.num_truncated += 1
        part = slice(len(ids) - limit, None) if side == "left" else slice(limit)
        return ids[part], mask[part]


def turn_pieces(
    messages: list[Message], template: PromptTemplate, tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig
) -> list[tuple[list[int], bool]]:
    """Token ids turn by turn, and whether they are trained. A turn's end mark belongs to the turn.

    Each piece is tokenised on its own, so a boundary always lies between tokens. ValueError where the template renders
    earlier turns differently once later ones follow (unless `data.ignore_input_ids_mismatch`).
    """
    if not template.has_template:
        return _plain_pieces(messages, template, tokenizer)
    pieces: list[tuple[list[int], bool]] = []
    done = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template.render(messages[:i])
        whole = template.render(messages[: i + 1], add_generation_prompt=False)
        if not (prompt.startswith(done) and whole.startswith(prompt)):
            if not config.ignore_input_ids_mismatch:
                raise ValueError(
                    f"the chat template rewrites earlier text when message {i} is added, so turns have no stable "
                    f"boundary; set data.ignore_input_ids_mismatch=True to train on the turns as rendered one by one"
                )
            prompt, done = template.render(messages[:i]), ""
            pieces.clear()
        context, answer = template.encode([prompt[len(done) :], whole[len(prompt) :]])
        pieces += [(context, False), (answer, True)]
        done = whole
    return pieces


def _plain_pieces(
    messages: list[Message], template: PromptTemplate, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[int], bool]]:
    """Without a chat template: contents one after the other; an assistant message ends with end-of-sequence."""
    pieces: list[tuple[list[int], bool]] = []
    context: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            context.append(message)
            continue
        if context:
            pieces += [(template.encode([template.render(context)])[0], False)]
        text = message["content"] if isinstance(message["content"], str) else template.render([message])
        answer = tokenizer(text, add_special_tokens=False)["input_ids"]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        pieces.append(([*answer, *end], True))
        context = []
    return pieces
