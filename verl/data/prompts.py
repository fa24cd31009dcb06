"""Prompts of a run: checked and tokenised rows of data files, at most `data.max_prompt_length` tokens each."""

import copy
import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from verl.config import DataConfig
from verl.data.chat import Message, PromptTemplate
from verl.data.data_files import DataRows, FileRows
from verl.data.prompt_rows import (
    NO_TOOL_ARGUMENTS,
    WRITTEN_LIST,
    check_row_and_read_messages,
    complete_row,
    holds_messages,
    lacks_tool_arguments,
)
from verl.utils.errors import ConfigError, DataError
from verl.utils.external_code import load_object
from verl.utils.seeds import derive_seed
from verl.utils.suggest import did_you_mean

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Maps agent_name to the number of tokens that its agent loop adds to a prompt; ConfigError for an unknown name.
ExtraPromptTokens = Callable[[str | None], int]
TRUNCATION_MODES = ("error", "left", "right", "middle")
_CHUNK = 512


@dataclass(frozen=True)
class PromptRow:
    """One prompt, ready to be sampled from and scored."""

    index: int  # number of the row over all data files, before any selection
    location: str  # file and row, for messages
    messages: list[Message]
    text: str  # the rendered prompt, before truncation
    prompt_ids: list[int]  # at most data.max_prompt_length tokens
    truncated: bool
    data_source: str  # selects the scorer, groups validation metrics
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    agent_name: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)  # every other column, as read


@dataclass(frozen=True)
class PromptSummary:
    """How many rows of one data set were read, selected, over-long and kept."""

    source: str
    num_read: int
    num_selected: int  # after data.*_max_samples
    num_overlong: int
    longest_overlong: int  # tokens; 0 when none is over-long
    max_prompt_length: int
    action: str  # what happens to over-long prompts: "removed" or "truncated (left)" ...
    num_kept: int

    def line(self) -> str:
        """One line for the log."""
        parts = [f"{self.source}: {self.num_read} rows"]
        if self.num_selected < self.num_read:
            parts.append(f"{self.num_selected} selected")
        if self.num_overlong:
            parts.append(
                f"{self.num_overlong} longer than data.max_prompt_length={self.max_prompt_length} "
                f"{self.action} (the longest has {self.longest_overlong} tokens)"
            )
        return ", ".join([*parts, f"{self.num_kept} prompts"])


class PromptDataset:
    """Prompts by position. The constructor checks all rows, so an invalid row cannot stop a run half-way."""

    def __init__(
        self,
        rows: DataRows,
        source: str,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        max_samples: int,
        extra_prompt_tokens: ExtraPromptTokens | None = None,
    ):
        if config.truncation not in TRUNCATION_MODES:
            raise ConfigError(
                f"data.truncation={config.truncation!r}; {did_you_mean(config.truncation, TRUNCATION_MODES)}"
            )
        self._rows = rows
        self._config = config
        self._template = PromptTemplate(tokenizer, config.apply_chat_template_kwargs)
        self._extra_prompt_tokens = extra_prompt_tokens
        self.data_sources: dict[str, str] = {}  # each source of the selected rows, and where its first row is
        self._doubtful: dict[str, list[int]] = {NO_TOOL_ARGUMENTS: [], WRITTEN_LIST: []}  # rows that are named
        selected = select_rows(len(rows), max_samples, config)
        overlong = self._find_overlong(selected)
        kept = selected
        action = f"truncated ({config.truncation})"
        if config.filter_overlong_prompts:
            kept, action = np.array([i for i in selected.tolist() if i not in overlong], dtype=np.int64), "removed"
        elif overlong and config.truncation == "error":
            raise DataError(self._overlong_message(overlong, len(selected)))
        longest = max(overlong.values(), default=0)
        self._row_indices = kept
        self.summary = PromptSummary(
            source, len(rows), len(selected), len(overlong), longest, config.max_prompt_length, action, len(kept)
        )
        logger.log(logging.WARNING if overlong else logging.INFO, "%s", self.summary.line())
        for what, found in self._doubtful.items():
            if found:
                logger.warning("%s: %d rows %s; the first is %s", source, len(found), what, rows.location(found[0]))
        if len(kept) == 0:
            raise DataError(f"no prompts are left: {self.summary.line()}; raise data.max_prompt_length")
        self.digest = hashlib.sha256(rows.digest.encode() + kept.astype("<i8").tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._row_indices)

    def shuffled(self, seed: int | None) -> "PromptDataset":
        """The same prompts in an order derived from `seed`."""
        out = copy.copy(self)
        out._row_indices = self._row_indices[np.argsort(_random_keys(seed, "prompt shuffle", len(self)), kind="stable")]
        return out

    def __getitem__(self, position: int) -> PromptRow:
        return self.rows([position])[0]

    def column(self, name: str) -> Iterator[tuple[int, str, Any]]:
        """(row, where it is, its value of column `name`, None where it has none) of every prompt."""
        for row in self._row_indices.tolist():
            yield row, self._rows.location(row), self._rows[row].get(name)

    def __iter__(self) -> Iterator[PromptRow]:
        for start in range(0, len(self), _CHUNK):
            yield from self.rows(range(start, min(start + _CHUNK, len(self))))

    def rows(self, positions: Iterable[int]) -> list[PromptRow]:
        """The prompts at these positions (0 <= position < len), tokenised together."""
        indices = [int(self._row_indices[position]) for position in positions]
        raws = [self._rows[index] for index in indices]
        conversations = [self._read_messages(index, raw) for index, raw in zip(indices, raws, strict=True)]
        texts = [self._render(index, messages) for index, messages in zip(indices, conversations, strict=True)]
        return [
            self._prompt_row(index, raw, messages, text, ids)
            for index, raw, messages, text, ids in zip(
                indices, raws, conversations, texts, self._template.encode(texts), strict=True
            )
        ]

    def positions_of(self, indices: Iterable[int]) -> list[int]:
        """The positions of the rows with these `PromptRow.index`."""
        positions = {index: position for position, index in enumerate(self._row_indices.tolist())}
        return [positions[index] for index in indices]

    def _prompt_row(
        self, index: int, raw: dict[str, Any], messages: list[Message], text: str, ids: list[int]
    ) -> PromptRow:
        limit, config = self._config.max_prompt_length, self._config
        if not ids:
            raise DataError(f"{self._rows.location(index)}: the prompt has no tokens: {text!r}")
        if len(ids) > limit and (config.truncation == "error" or config.filter_overlong_prompts):
            raise DataError(self._overlong_message({index: len(ids)}, 1))
        read_columns = {config.prompt_key, "raw_prompt", config.reward_fn_key, "extra_info", "agent_name"}
        return PromptRow(
            index=index,
            location=self._rows.location(index),
            messages=messages,
            text=text,
            prompt_ids=truncate(ids, limit, config.truncation),
            truncated=len(ids) > limit,
            data_source=raw[config.reward_fn_key],
            ground_truth=raw["reward_model"].get("ground_truth"),
            extra_info=dict(raw.get("extra_info") or {}),
            agent_name=raw.get("agent_name"),
            columns={key: value for key, value in raw.items() if key not in read_columns},
        )

    def _find_overlong(self, selected: np.ndarray) -> dict[int, int]:
        """{row number: token count} of selected rows over the limit; checks all selected rows, fills data_sources."""
        limit, overlong = self._config.max_prompt_length, {}
        selected_set, pending, dropped = set(selected.tolist()), [], False
        texts: dict[str, list[Message]] = {}  # the first two different prompts, and what they were made of
        for index, raw in enumerate(_with_progress(self._rows, len(self._rows), "reading prompts")):
            if index not in selected_set:
                continue
            messages, extra_tokens = self._read_messages(index, raw), self._extra_tokens_of(index, raw)
            text = self._render(index, messages)
            if len(texts) < 2:
                dropped |= texts.setdefault(text, messages) != messages
            self.data_sources.setdefault(raw[self._config.reward_fn_key], self._rows.location(index))
            if lacks_tool_arguments(raw.get("extra_info") or {}, self._config):
                self._doubtful[NO_TOOL_ARGUMENTS].append(index)
            if holds_messages(raw.get("raw_prompt", raw.get(self._config.prompt_key))):
                self._doubtful[WRITTEN_LIST].append(index)
            # A token of an ASCII text has at least one character, so a short text need not be tokenised.
            if not (text.isascii() and len(text) + extra_tokens < limit):
                pending.append((index, text, extra_tokens))
            if len(pending) >= _CHUNK:
                overlong.update(self._overlong_lengths(pending))
                pending = []
        overlong.update(self._overlong_lengths(pending))
        if dropped and len(texts) == 1:
            raise DataError(
                f"the chat template makes the same prompt of all {len(selected)} rows, {next(iter(texts))[:80]!r}, "
                "though their messages differ: it drops them; repair it, or set model.custom_chat_template"
            )
        return overlong

    def _extra_tokens_of(self, index: int, raw: Mapping[str, Any]) -> int:
        try:
            return self._extra_prompt_tokens(raw.get("agent_name")) if self._extra_prompt_tokens else 0
        except ConfigError as error:
            raise DataError(f"{self._rows.location(index)}: column 'agent_name': {error}") from error

    def _overlong_lengths(self, pending: list[tuple[int, str, int]]) -> dict[int, int]:
        ids = self._template.encode([text for _, text, _ in pending])
        lengths = {index: len(row) + extra_tokens for (index, _, extra_tokens), row in zip(pending, ids, strict=True)}
        return {index: length for index, length in lengths.items() if length > self._config.max_prompt_length}

    def _overlong_message(self, overlong: Mapping[int, int], num_rows: int) -> str:
        first = min(overlong)
        limit = self._config.max_prompt_length
        return (
            f"{len(overlong)} of {num_rows} prompts are longer than data.max_prompt_length={limit} tokens; the first "
            f"is {self._rows.location(first)} with {overlong[first]}, the longest has {max(overlong.values())}. Raise "
            "data.max_prompt_length, or set data.filter_overlong_prompts=true to remove them, or data.truncation=left, "
            "right or middle to shorten them"
        )

    def _render(self, index: int, messages: list[Message]) -> str:
        try:
            return self._template.render_prompt(messages)
        except Exception as error:  # the template is the model author's code and can raise anything
            raise DataError(f"{self._rows.location(index)}: the chat template refuses the prompt: {error}") from error

    def _read_messages(self, index: int, raw: Mapping[str, Any]) -> list[Message]:
        try:
            return check_row_and_read_messages(raw, self._config)
        except ValueError as error:
            raise DataError(f"{self._rows.location(index)}: {error}") from error


def truncate(ids: list[int], limit: int, side: str) -> list[int]:
    """At most `limit` tokens: "left" drops the first ones, "right" the last ones, "middle" those in the middle."""
    if len(ids) <= limit:
        return ids
    if side == "left":
        return ids[-limit:]
    if side == "right":
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


def select_rows(num_rows: int, max_samples: int, config: DataConfig) -> np.ndarray:
    """Row numbers in file order: all, the first `max_samples`, or `max_samples` drawn with the seed if shuffling."""
    if max_samples < 0 or max_samples >= num_rows:
        return np.arange(num_rows)
    if max_samples == 0:
        raise ConfigError(
            "data.train_max_samples and data.val_max_samples must be positive, or -1 for all rows; found 0"
        )
    if not config.shuffle:
        return np.arange(max_samples)
    return np.sort(np.argsort(_random_keys(config.seed, "row selection", num_rows), kind="stable")[:max_samples])


def _random_keys(seed: int | None, name: str, count: int) -> np.ndarray:
    return np.random.PCG64(derive_seed(1 if seed is None else seed, name)).random_raw(count)


def _with_progress(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yields the items; prints a progress line to stderr every two seconds."""
    started = last = time.monotonic()
    for number, item in enumerate(items):
        yield item
        now = time.monotonic()
        if now - last >= 2.0:
            last = now
            print(f"{what}: {number + 1} of {total} ({now - started:.0f} s)", file=sys.stderr, flush=True)


class CustomRows:
    """Rows of a user's torch Dataset (data.custom_cls): each item a dict with `raw_prompt` or the prompt column."""

    def __init__(self, files: Sequence[str], tokenizer: PreTrainedTokenizerBase, config: DataConfig, max_samples: int):
        path, name = config.custom_cls.path, config.custom_cls.name
        if not path or not name:
            raise ConfigError(f"data.custom_cls needs path and name; found path={path!r}, name={name!r}")
        cls = load_object(path, name, "data.custom_cls")
        self._name, self._config = name, config
        self._items = cls(data_files=files, tokenizer=tokenizer, config=config, processor=None, max_samples=max_samples)
        digest = hashlib.sha256()
        for item in self:
            digest.update(json.dumps(item.get("raw_prompt", item.get(config.prompt_key)), default=str).encode())
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self._items[index]
        if not isinstance(item, Mapping):
            raise DataError(f"{self.location(index)} is {type(item).__name__}, expected a dict of columns")
        return complete_row(dict(item), self._config, None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def location(self, index: int) -> str:
        return f"{self._name} item {index}"


def train_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, extra_prompt_tokens: ExtraPromptTokens | None = None
) -> PromptDataset:
    """The prompts of data.train_files."""
    return load_prompts(config.train_files, config, tokenizer, config.train_max_samples, extra_prompt_tokens)


def validation_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, extra_prompt_tokens: ExtraPromptTokens | None = None
) -> PromptDataset:
    """The prompts of data.val_files, in file order unless data.validation_shuffle."""
    if config.val_files is None:
        raise ConfigError("data.val_files=null: there is nothing to validate on; set it, or trainer.test_freq=-1")
    prompts = load_prompts(config.val_files, config, tokenizer, config.val_max_samples, extra_prompt_tokens)
    return prompts.shuffled(config.seed) if config.validation_shuffle else prompts


def load_prompts(
    files: str | Sequence[str],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_samples: int = -1,
    extra_prompt_tokens: ExtraPromptTokens | None = None,
) -> PromptDataset:
    """The prompts of one or several data files, read by data.custom_cls when it is set."""
    if config.custom_cls.path:
        paths = [files] if isinstance(files, str) else list(files)
        rows = CustomRows(paths, tokenizer, config, max_samples)
        return PromptDataset(rows, config.custom_cls.name or "", tokenizer, config, -1, extra_prompt_tokens)
    file_rows = FileRows(files, config)
    return PromptDataset(file_rows, file_rows.file_names(), tokenizer, config, max_samples, extra_prompt_tokens)
