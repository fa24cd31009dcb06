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
from verl.data.prompts import CustomRows, check_row_and_read_messages, select_rows

SOLUTION_COLUMNS = ("solution", "answer")  # of extra_info, else of the row: the worked answer, as text
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
        """What the messages say."""
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
        file_rows = FileRows(files)
        rows, source = file_rows, file_rows.file_names()
        selected = set(select_rows(len(rows), max_samples, config).tolist())
    split = Split(name, source, len(selected))
    for index, raw in enumerate(rows):
        if index not in selected:
            continue
        try:
            messages = check_row_and_read_messages(raw, config)
            rendered = template.render(messages) if template else ""
        except Exception as error:  # a ValueError of ours, or whatever the model's chat template raises
            split.refused.append((rows.location(index), str(error)))
            continue
        extra_info = dict(raw.get("extra_info") or {})
        texts = [place.get(column) for place in (extra_info, raw) for column in SOLUTION_COLUMNS]
        solution = next((text for text in texts if isinstance(text, str) and text.strip()), None)
        split.rows.append(
            Row(
                where=rows.location(index),
                messages=messages,
                rendered=rendered,
                data_source=raw[config.reward_fn_key],
                ground_truth=raw["reward_model"].get("ground_truth"),
                extra_info=extra_info,
                agent_name=raw.get("agent_name"),
                solution=solution,
            )
        )
        if len(split.rows) % 512 == 0:
            count(f"{len(split.rows):,} of {len(selected):,} rows")
    return split


def normal_form(text: str) -> str:
    """Without case, runs of spaces, and punctuation that is not part of a number; equal for what reads the same."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.sub(r"(?<!\d)[.,;:?'\"]|[.,;:?'\"](?!\d)", " ", text).split())


def gold_texts(ground_truth: Any) -> list[str]:
    """The gold answers as text: of a text, a number, a list of these, or {target: ...}; none of tests of a program."""
    if isinstance(ground_truth, dict):
        return gold_texts(ground_truth.get("target")) if "target" in ground_truth else []
    if isinstance(ground_truth, list):
        return [text for item in ground_truth for text in gold_texts(item)]
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | int | float):
        return []
    text = str(ground_truth).strip()
    return [text] if text and not (text.startswith("{") and is_json(text)) else []


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
