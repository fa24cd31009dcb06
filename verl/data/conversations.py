"""Supervised fine-tuning rows: conversations as tokens, with a loss mask on exactly the assistant's tokens."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from verl.config.data import SFTDataConfig
from verl.data.assistant_turns import MaskedTokens, TextSegment, TurnTokenizer
from verl.data.chat import Message, PromptTemplate, read_messages, with_answer, with_system
from verl.data.data_files import FileRows, file_digest
from verl.data.prompt_rows import WRITTEN_LIST, holds_messages
from verl.data.trajectory import Trajectory
from verl.utils.errors import ConfigError, DataError
from verl.utils.external_code import load_object

_BOOL_WORDS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_CHUNK = 1024  # rows per tokenizer call: a fast tokenizer uses every core


class Conversations(Protocol):
    """Numbered conversations: one sequence each, or several if the chat template rewrites earlier turns."""

    digest: str  # changes if the rows or their order change
    notes: list[str]  # messages to the user about them

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> list[Trajectory]: ...


def load_conversations(
    files: str | Sequence[str], tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig, max_samples: int = -1
) -> Conversations:
    """The conversations of one or several data files, read by data.custom_cls when it is set."""
    if config.custom_cls.path:
        return CustomConversations(files, tokenizer, config, max_samples)
    return ConversationDataset(files, tokenizer, config, max_samples)


class ConversationDataset:
    """The conversation of each row: one sequence, or several.

    `read` finds it in a row; otherwise it is the column `messages`, or `prompt` and `response`. Every assistant turn is
    trained, or only the last one with `last_turn_only`.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: SFTDataConfig,
        max_samples: int = -1,
        read: Callable[[Mapping[str, Any]], list[Message]] | None = None,
        last_turn_only: bool = False,
    ):
        self._rows, self._config, self._tokenizer = FileRows(files), config, tokenizer
        self._read_conversation = read or partial(conversation_of, config=config)
        self._turns = TurnTokenizer(tokenizer, config.ignore_input_ids_mismatch, last_turn_only)
        self.num_truncated = self.num_split = self.num_skipped = self.num_written = 0
        count = len(self._rows) if max_samples < 0 else min(max_samples, len(self._rows))
        self._items: list[tuple[int, list[tuple[np.ndarray, np.ndarray]]]] = []
        for start in range(0, count, _CHUNK):
            self._add_rows(range(start, min(start + _CHUNK, count)))
        if not self._items:
            why = "raise data.max_length" if count else f"raise data.*_max_samples (now {max_samples})"
            raise DataError(f"{self._rows.file_names()}: no row is left; {why}")
        self.rows = [row for row, _ in self._items]
        self.digest = hashlib.sha256(f"{self._rows.digest} {self.rows}".encode()).hexdigest()
        self.notes = self._notes()

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, position: int) -> list[Trajectory]:
        row, sequences = self._items[position]
        return [_trajectory(ids, mask, row) for ids, mask in sequences]

    def _add_rows(self, indices: Sequence[int]) -> None:
        """Tokenise the rows at `indices` and keep those with tokens to train on."""
        sequence_segments: list[list[TextSegment]] = []
        spans: list[tuple[int, list[MaskedTokens] | slice]] = []
        for index in indices:
            segments_or_tokens = self._with_row_location(index, self._read_row, index)
            if isinstance(segments_or_tokens, tuple):
                spans.append((index, [segments_or_tokens]))
            else:
                spans.append((index, slice(len(sequence_segments), len(sequence_segments) + len(segments_or_tokens))))
                sequence_segments += segments_or_tokens
        encoded = self._turns.encode(sequence_segments)
        for index, span in spans:
            tokens = encoded[span] if isinstance(span, slice) else span
            sequences = self._with_row_location(index, self._trainable_sequences, tokens)
            if sequences:
                self._items.append((index, sequences))

    def _with_row_location(self, index: int, work: Any, argument: Any) -> Any:
        """`work(argument)`; a DataError names the file and the row."""
        try:
            return work(argument)
        except (ValueError, DataError) as error:
            raise DataError(f"{self._rows.location(index)}: {error}") from error

    def _read_row(self, index: int) -> "list[list[TextSegment]] | MaskedTokens":
        row = self._rows[index]
        messages, template = self._messages(row), self._template(row)
        if template.has_template:
            return self._turns.segment_conversation(messages, template)
        return self._turns.encode_without_template(messages, template)

    def _trainable_sequences(self, sequences: "list[MaskedTokens | ValueError]") -> list[tuple[np.ndarray, np.ndarray]]:
        """The sequences of a row, cut to data.max_length; those without a trained token are left out."""
        self.num_split += len(sequences) > 1
        kept = []
        for sequence in sequences:
            if isinstance(sequence, ValueError):
                raise sequence
            ids, mask = self._truncate(*sequence)
            mask[0] = False
            if any(mask):
                kept.append((np.array(ids, dtype=np.int32), np.array(mask, dtype=bool)))
        if not kept and self._config.truncation == "error":
            raise ValueError("there is no assistant token to train on")
        self.num_skipped += not kept
        return kept

    def _messages(self, row: Mapping[str, Any]) -> list[Message]:
        for column in ("images", "videos"):
            if row.get(column) not in (None, [], ""):
                raise ValueError(f"the row has {column}; only text conversations are supported so far")
        self.num_written += holds_messages(row.get(self._config.prompt_key))
        messages = with_system(self._read_conversation(row), self._config.system_prompt)
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("the conversation has no assistant message")
        if messages[0]["role"] == "assistant":
            raise ValueError("the conversation begins with an assistant message, which has no prompt")
        for message in messages:
            if "tool_calls" in message:
                message["tool_calls"] = _without_none(message["tool_calls"])
        return messages

    def _template(self, row: Mapping[str, Any]) -> PromptTemplate:
        kwargs = dict(self._config.apply_chat_template_kwargs)
        tools = row.get(self._config.tools_key)
        if tools is not None:
            kwargs["tools"] = _without_none(_parse_json(tools, self._config.tools_key))
        thinking = row.get(self._config.enable_thinking_key)
        if thinking is None:
            thinking = self._config.enable_thinking_default
        if thinking is not None:
            kwargs["enable_thinking"] = _parse_bool(thinking, self._config.enable_thinking_key)
        return PromptTemplate(self._tokenizer, kwargs)

    def _truncate(self, ids: list[int], mask: list[bool]) -> MaskedTokens:
        limit, side = self._config.max_length, self._config.truncation
        if len(ids) <= limit:
            return ids, mask
        if side == "error":
            raise ValueError(
                f"the conversation has {len(ids)} tokens, data.max_length is {limit}; raise it, or set "
                f"data.truncation to left, right or middle"
            )
        self.num_truncated += 1
        head = {"left": 0, "right": limit, "middle": limit // 2}[side]
        tail = len(ids) - (limit - head)
        return ids[:head] + ids[tail:], mask[:head] + mask[tail:]

    def _notes(self) -> list[str]:
        sequences = sum(len(sequences) for _, sequences in self._items)
        notes = {
            f"the chat template rewrites earlier turns: {self.num_split} conversations became several sequences "
            f"({len(self)} rows, {sequences} sequences), so that each turn is trained as it would be sampled": (
                self.num_split
            ),
            f"{self.num_truncated} sequences were cut to data.max_length={self._config.max_length} tokens "
            f"(data.truncation={self._config.truncation})": self.num_truncated,
            f"{self.num_written} rows {WRITTEN_LIST}": self.num_written,
            f"{self.num_skipped} rows had no assistant token left after truncation and are not used": (
                self.num_skipped
            ),
        }
        return [f"{self._rows.file_names()}: {note}" for note, count in notes.items() if count]


def conversation_of(row: Mapping[str, Any], config: SFTDataConfig) -> list[Message]:
    """The messages of a fine-tuning row; ValueError if it has none."""
    key, prompt_key, answer_key = config.messages_key, config.prompt_key, config.answer_key or "response"
    messages = None if config.answer_key else row.get(key)
    if isinstance(messages, str):
        raise ValueError(f"{key!r} is a string, expected a list of {{role, content}}; parse it if it is JSON")
    if messages is not None:
        return read_messages(messages)
    if row.get(prompt_key) is not None and row.get(answer_key) is not None:
        return with_answer(read_messages(row[prompt_key]), str(row[answer_key]))
    raise ValueError(
        f"the row has neither {key!r} nor {prompt_key!r} and {answer_key!r}; its columns are {', '.join(sorted(row))}: "
        "set data.messages_key, or data.prompt_key and data.answer_key, to those that are meant"
    )


class CustomConversations:
    """A user's Dataset class (data.custom_cls): items with `input_ids` and `loss_mask`, (L,) each."""

    def __init__(
        self, files: str | Sequence[str], tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig, max_samples: int
    ):
        path, self._name = config.custom_cls.path, config.custom_cls.name
        if not (path and self._name):
            raise ConfigError(f"data.custom_cls needs path and name; found path={path!r}, name={self._name!r}")
        cls = load_object(path, self._name, "data.custom_cls")
        paths = [files] if isinstance(files, str) else list(files)
        self._items = cls(
            parquet_files=paths, tokenizer=tokenizer, config=config, processor=None, max_samples=max_samples
        )
        contents = [file_digest(Path(file)) for file in paths if Path(file).is_file()]
        self.digest = hashlib.sha256(f"{path} {self._name} {paths} {contents} {len(self)}".encode()).hexdigest()
        self.notes: list[str] = []

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, position: int) -> list[Trajectory]:
        item = self._items[position]
        missing = [name for name in ("input_ids", "loss_mask") if name not in item]
        if missing:
            raise DataError(f"{self._name} item {position} has no {missing[0]!r}; it has {', '.join(sorted(item))}")
        ids, mask = (np.asarray(item[name]).reshape(-1) for name in ("input_ids", "loss_mask"))
        if len(ids) != len(mask):
            raise DataError(f"{self._name} item {position} has {len(ids)} input_ids and {len(mask)} loss_mask values")
        if item.get("attention_mask") is not None:  # padding is not part of a sequence
            not_padding = np.asarray(item["attention_mask"]).reshape(-1).astype(bool)
            ids, mask = ids[not_padding], mask[not_padding]
        mask = mask.astype(bool)
        if len(mask):
            mask[0] = False
        if not mask.any():
            raise DataError(f"{self._name} item {position} has no token to train on: loss_mask is 0 everywhere")
        return [_trajectory(ids, mask, position)]


def _trajectory(ids: np.ndarray, mask: np.ndarray, row: int) -> Trajectory:
    tokens = torch.from_numpy(ids.astype(np.int64))
    return Trajectory(tokens, torch.from_numpy(mask), torch.zeros(len(tokens)), group_id=row, row=row)


def _parse_json(value: Any, key: str) -> Any:
    """Tool schemas; a string is parsed as JSON, since different schemas do not fit one parquet column."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"column {key!r} is a string that is not JSON ({error.msg})") from error


def _parse_bool(value: Any, key: str) -> bool:
    """A boolean, which some files store as a number or a word."""
    text = str(value).lower()
    if text not in _BOOL_WORDS:
        raise ValueError(f"column {key!r} is {value!r}; allowed: true, false")
    return _BOOL_WORDS[text]


def _without_none(value: Any) -> Any:
    """The nested value without fields that are None: parquet fills missing fields with None."""
    if isinstance(value, Mapping):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value
