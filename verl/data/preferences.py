"""Preference rows: two answers to one prompt, the chosen and the rejected one, as tokens."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl.config.data import SFTDataConfig
from verl.data.chat import Message, read_messages
from verl.data.conversations import ConversationDataset
from verl.data.data_files import FileRows
from verl.data.trajectory import Trajectory
from verl.utils.errors import DataError

ANSWERS = ("chosen", "rejected")


class PreferencePairs:
    """Rows `prompt`, `chosen`, `rejected` as two sequences each; only the tokens of the answers are trained.

    The optional column `margin` becomes the reward of the chosen answer.
    """

    def __init__(
        self, files: str | Sequence[str], tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig, max_samples: int
    ):
        reads = [partial(conversation_with, name, config.prompt_key) for name in ANSWERS]
        self._chosen, self._rejected = sides = [
            ConversationDataset(files, tokenizer, config, max_samples, read, True) for read in reads
        ]
        rows, places = FileRows(files), [{row: place for place, row in enumerate(side.rows)} for side in sides]
        self._rows = sorted(places[0].keys() & places[1].keys())
        self._places = [[place[row] for row in self._rows] for place in places]
        self._margins = [_margin(rows, row) for row in self._rows]
        if not self._rows:
            raise DataError(f"{rows.file_names()}: no pair is left with tokens of both answers; raise data.max_length")
        kept = f"{rows.digest} {self._rows}"
        self.digest = hashlib.sha256(kept.encode()).hexdigest()
        self.notes = [
            f"{note} ({name} answers)" for name, side in zip(ANSWERS, sides, strict=True) for note in side.notes
        ]
        if equal := sum(_same(*self[i]) for i in range(len(self))):
            self.notes.append(f"warning: {rows.file_names()}: {equal} pairs have equal answers, which teach nothing")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> list[Trajectory]:
        """The chosen and the rejected answer."""
        chosen, rejected = (
            side[places[position]][0] for side, places in zip((self._chosen, self._rejected), self._places, strict=True)
        )
        return [replace(chosen, reward=self._margins[position]), replace(rejected, reward=0.0)]


class ScoredPairs:
    """The pairs for a reward model: `loss_mask` is True on one token behind the end, where the score is read.

    Trailing padding tokens are cut off, as models of `transformers` for sequence classification pass over them.
    """

    def __init__(self, pairs: PreferencePairs, pad_token_id: int | None):
        self._pairs, self._pad = pairs, pad_token_id
        self.digest, self.notes = pairs.digest, pairs.notes

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, position: int) -> list[Trajectory]:
        return [with_score_position(answer, self._pad) for answer in self._pairs[position]]


def with_score_position(answer: Trajectory, pad_token_id: int | None) -> Trajectory:
    """The sequence without trailing padding tokens, and one token more, on which alone `loss_mask` is True: the output
    of a value head there is what it reads at the last token."""
    length = len(without_padding(answer.tokens.tolist(), pad_token_id))
    tokens = torch.cat([answer.tokens[:length], answer.tokens[length - 1 : length]])
    mask = torch.zeros(length + 1, dtype=torch.bool)
    mask[-1] = True
    return replace(answer, tokens=tokens, loss_mask=mask, rollout_logprobs=torch.zeros(length + 1))


def without_padding(ids: Sequence[int], pad_token_id: int | None) -> Sequence[int]:
    """The tokens up to the last that is no padding, as models of `transformers` for sequence classification read them;
    all of them where every one is padding."""
    end = len(ids)
    while end and ids[end - 1] == pad_token_id:
        end -= 1
    return ids[: end or len(ids)]


def conversation_with(answer_name: str, prompt_key: str, row: Mapping[str, Any]) -> list[Message]:
    """The prompt of a preference row, and its answer `answer_name` ("chosen" or "rejected") as the last message.

    A column of an answer is a string, the answer as messages, or a whole conversation that ends with it; `prompt` may
    be missing in the last case. ValueError if the answers have different prompts, or one is empty.
    """
    prompts, answers = zip(*(_read_answer(row, name) for name in ANSWERS), strict=True)
    stated = read_messages(row[prompt_key]) if row.get(prompt_key) is not None else None
    found = [prompt for prompt in (stated, *prompts) if prompt]
    if not found:
        raise ValueError(f"there is no {prompt_key!r} (data.prompt_key), and the answers are not whole conversations")
    if any(prompt != found[0] for prompt in found):
        raise ValueError("the answers have different prompts; all messages but the last must be those of 'prompt'")
    if found[0][-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an assistant message; an answer follows a user or a tool")
    return [*found[0], answers[ANSWERS.index(answer_name)]]


def _read_answer(row: Mapping[str, Any], name: str) -> tuple[list[Message], Message]:
    """(messages before it, the answer) of a column."""
    value = row.get(name)
    if value is None:
        raise ValueError(f"the row has no {name!r}; its columns are {', '.join(sorted(row))}")
    if isinstance(value, str):
        value = [{"role": "assistant", "content": value}]
    try:
        *before, last = read_messages(value)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}".replace("the prompt is empty", "the answer is empty")) from error
    if last["role"] != "assistant":
        raise ValueError(f"{name!r} ends with a message of role {last['role']!r}; it must end with the answer")
    if not last.get("content") and not last.get("tool_calls"):
        raise ValueError(f"{name!r}: the answer is empty")
    return before, last


def _margin(rows: FileRows, row: int) -> float:
    value = rows[row].get("margin")
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise DataError(f"{rows.location(row)}: 'margin' is {value!r}; it must be a finite number, or null")
    return float(value)


def _same(chosen: Trajectory, rejected: Trajectory) -> bool:
    return torch.equal(chosen.tokens, rejected.tokens)
