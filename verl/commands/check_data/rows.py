"""The rows of both splits as a run reads them, with what the checks need of each."""

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.config import DataConfig
from verl.data.chat import Message, PromptTemplate
from verl.data.data_files import DataRows, FileRows
from verl.data.prompt_rows import check_row_and_read_messages
from verl.data.prompts import CustomRows, select_rows
from verl.rewards.gold_answers import worked_answer

Count = Callable[[str], None]  # told how far it is


@dataclass
class Row:
    """One row that a run would read."""

    where: str
    messages: list[Message]
    rendered: str  # by the chat template; empty without a tokenizer
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    agent_name: str | None
    solution: str | None  # the worked answer, where the row has one

    @cached_property
    def text(self) -> str:
        """The text of the messages."""
        return "\n".join(
            content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            for message in self.messages
            if (content := message.get("content"))
        )

    @cached_property
    def normal_text(self) -> str:
        return normal_form(self.text)


@dataclass
class Split:
    """The rows of data.train_files or data.val_files; `refused` are (where, why) of those that a run refuses."""

    name: str
    source: str
    count: int = 0
    rows: list[Row] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)


def read_split(
    name: str,
    files: str | list[str],
    max_samples: int,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    count: Count,
) -> Split:
    """The rows that a run would take of `files`; DataError where a file cannot be read."""
    rows: DataRows
    template = PromptTemplate(tokenizer, config.apply_chat_template_kwargs) if tokenizer else None
    if config.custom_cls.path and tokenizer is not None:
        paths = [files] if isinstance(files, str) else list(files)
        rows, source = CustomRows(paths, tokenizer, config, max_samples), str(config.custom_cls.name)
        selected = set(range(len(rows)))
    else:
        file_rows = FileRows(files, config)
        rows, source = file_rows, file_rows.file_names()
        selected = set(select_rows(len(rows), max_samples, config).tolist())
    split = Split(name, source, len(selected))
    for index, raw in enumerate(rows):
        if index not in selected:
            continue
        try:
            messages = check_row_and_read_messages(raw, config)
            rendered = template.render_prompt(messages) if template else ""
        except Exception as error:  # a ValueError of ours, or whatever the model's chat template raises
            split.refused.append((rows.location(index), str(error)))
            continue
        extra_info = dict(raw.get("extra_info") or {})
        split.rows.append(
            Row(
                where=rows.location(index),
                messages=messages,
                rendered=rendered,
                data_source=raw[config.reward_fn_key],
                ground_truth=raw["reward_model"].get("ground_truth"),
                extra_info=extra_info,
                agent_name=raw.get("agent_name"),
                solution=worked_answer(extra_info, raw),
            )
        )
        if len(split.rows) % 512 == 0:
            count(f"{len(split.rows):,} of {len(selected):,} rows")
    return split


def normal_form(text: str) -> str:
    """Without case, runs of spaces, and punctuation that is not part of a number; equal for what reads the same."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.sub(r"(?<!\d)[.,;:?'\"]|[.,;:?'\"](?!\d)", " ", text).split())
