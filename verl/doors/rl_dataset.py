"""`RLHFDataset`, the base class of data sets that `data.custom_cls` names, and `collate_fn`."""

import inspect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from verl.config import DataConfig
from verl.data.chat import Message
from verl.data.data_files import FileRows
from verl.data.prompts import select_rows
from verl.utils.errors import DataError


class RLHFDataset(Dataset[dict[str, Any]]):
    """Rows of data files as dictionaries of their columns, with the messages as `raw_prompt`.

    A derived class replaces how rows are read (`_read_files_and_tokenize`, which sets `self.dataframe`), how messages
    are built (`_build_messages`), or the item (`__getitem__`). The run then checks, renders and tokenises each item,
    and removes or truncates prompts that are too long, as it does with rows of a file.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        processor: Any = None,
        max_samples: int = -1,
    ):
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.original_data_files = list(self.data_files)
        self.tokenizer, self.processor, self.config, self.max_samples = tokenizer, processor, config, max_samples
        self.prompt_key, self.image_key, self.video_key = config.prompt_key, config.image_key, config.video_key
        self.max_prompt_length, self.truncation = config.max_prompt_length, config.truncation
        self.filter_overlong_prompts = config.filter_overlong_prompts
        self.apply_chat_template_kwargs = config.apply_chat_template_kwargs
        self.shuffle, self.seed = config.shuffle, config.seed
        self.dataframe: Any = None
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Make `self.data_files` local paths. They are already, here."""

    def _read_files_and_tokenize(self) -> None:
        """Set `self.dataframe`: rows by number, at most `max_samples` of them."""
        rows = FileRows(self.data_files)
        self.dataframe = [rows[int(index)] for index in select_rows(len(rows), self.max_samples, self.config)]
        self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """`dataframe`; the run removes or truncates prompts that are too long."""
        return dataframe

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.dataframe[item])
        if self.prompt_key in row:
            has_key = len(inspect.signature(self._build_messages).parameters) > 1  # older derived classes take the row
            row["raw_prompt"] = self._build_messages(row, *[self.prompt_key] * has_key)
        extra = row.get("extra_info") or {}
        row["index"], row["tools_kwargs"] = extra.get("index", 0), extra.get("tools_kwargs", {})
        row["interaction_kwargs"] = extra.get("interaction_kwargs", {})
        row["dummy_tensor"] = torch.tensor([0], dtype=torch.uint8)
        return row

    def _build_messages(self, example: dict[str, Any], key: str | None = None) -> list[Message]:
        """The messages of a row, in column `key` or else `prompt_key`; the run checks them and names the row."""
        messages: list[Message] = example[key or self.prompt_key]
        return messages

    @classmethod
    async def process_vision_info(cls, messages: Any, image_patch_size: int, config: Any) -> Any:
        """DataError: rows hold text so far."""
        raise DataError(
            f"{cls.__name__}.process_vision_info: multimodal rows are still to come; only text is supported"
        )


def collate_fn(data_list: list[dict[str, Any]]) -> dict[str, Any]:
    """The items of a batch by column: tensors stacked, everything else as a NumPy array of objects."""
    columns: dict[str, list[Any]] = defaultdict(list)
    for item in data_list:
        for name, value in item.items():
            columns[name].append(value)
    return {name: _stack(values) for name, values in columns.items()}


def _stack(values: list[Any]) -> Any:
    if all(isinstance(value, torch.Tensor) for value in values):
        return torch.stack(values)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
