"""Rows of prompts: a whole row, or one of a table of questions and answers, which `data.*` completes; then checked."""

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl.config import DataConfig
from verl.data.chat import Message, read_messages, with_system
from verl.utils.suggest import closest

# Names of columns that published tables have, those that say most first.
QUESTIONS = ("question", "problem", "query", "instruction", "prompt", "input", "text")
ANSWERS = (
    "answer",
    "final_answer",
    "expected_answer",
    "ground_truth",
    "target",
    "solution",
    "output",
    "label",
    "response",
)
SOURCE_KEY = "data.data_source"
WRITTEN_LIST = "have a list of {role, content} as text for a prompt, which is one user message as it is; store the list"
NO_TOOL_ARGUMENTS = (
    "need the arguments of tools (data.need_tools_kwargs, or need_tools_kwargs of the row) and have no "
    "extra_info.tools_kwargs"
)


def complete_row(raw: dict[str, Any], config: DataConfig, source: str | None) -> dict[str, Any]:
    """The row with the ground truth of `data.answer_key`, and with `data.data_source`, else `source`, where it names no
    data source. A row that lacks other columns stays without one, so that all are named together."""
    row, answer = dict(raw), raw.get(config.answer_key or "")
    if answer is not None:
        own = raw.get("reward_model")
        row["reward_model"] = {"style": "rule", **(own if isinstance(own, Mapping) else {}), "ground_truth": answer}
    is_whole = raw.get("raw_prompt", raw.get(config.prompt_key)) is not None and row.get("reward_model") is not None
    if raw.get(config.reward_fn_key) is None and is_whole and (name := config.data_source or source):
        row[config.reward_fn_key] = name
    return row


def missing_columns(raw: Mapping[str, Any], config: DataConfig) -> dict[str, tuple[str, str | None]]:
    """The columns that a row lacks, by the key that would help: (the column, what the key may be set to)."""
    prompt, truth, source = config.prompt_key, config.answer_key or "reward_model", config.reward_fn_key
    missing: dict[str, tuple[str, str | None]] = {}
    if raw.get("raw_prompt", raw.get(prompt)) is None:
        missing["data.prompt_key"] = prompt, _likely(prompt, QUESTIONS, raw)
    if raw.get(truth) is None:
        missing["data.answer_key"] = truth, _likely(truth, ANSWERS, raw)
    if raw.get(source) is None:
        missing[SOURCE_KEY] = source, "NAME (reward.scorer=math, gsm8k or exact scores any)"
    return missing


def _likely(column: str, known: Sequence[str], raw: Mapping[str, Any]) -> str | None:
    names = {name.lower().replace(" ", "_"): name for name, value in raw.items() if value is not None}
    return next((names[name] for name in known if name in names), next(iter(closest(column, names.values(), 1)), None))


def check_row_and_read_messages(raw: Mapping[str, Any], config: DataConfig) -> list[Message]:
    """The messages of a raw row; ValueError if any column that a run or its reward reads is missing or invalid."""
    if missing := missing_columns(raw, config):
        shown = f"COLUMN, one of {', '.join(sorted(map(str, raw)))}"
        texts = [
            f"column {column!r} is null"
            if column in raw
            else f"there is no column {column!r}: set {key}={meant or shown}"
            for key, (column, meant) in missing.items()
        ]
        raise ValueError(f"{'; '.join(texts)} (docs/rewards/rows.md has a whole row)")
    try:
        messages = with_system(read_messages(raw.get("raw_prompt", raw.get(config.prompt_key))), config.system_prompt)
    except ValueError as error:
        raise ValueError(f"column {config.prompt_key!r}: {error}") from error
    _check_type(config.reward_fn_key, raw[config.reward_fn_key], str)
    _check_reward_model(raw["reward_model"], config.answer_key)
    if raw.get("extra_info") is not None:
        _check_type("extra_info", raw["extra_info"], Mapping)
    for key in (config.image_key, config.video_key, config.audio_key):
        if raw.get(key) is not None and len(raw[key]) > 0:
            raise ValueError(f"column {key!r} holds media; multimodal rows are still to come")
    return messages


def holds_messages(prompt: object) -> bool:
    """Whether a text is a list of messages that was written as text, by JSON or by Python."""
    if not isinstance(prompt, str) or not prompt.lstrip().startswith("[") or "role" not in prompt:
        return False
    for parse in (json.loads, ast.literal_eval):  # which evaluates nothing
        try:
            items = parse(prompt.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return isinstance(items, list) and all(isinstance(i, dict) and {"role", "content"} <= i.keys() for i in items)
    return False


def lacks_tool_arguments(extra_info: Mapping[str, Any], config: DataConfig) -> bool:
    """Whether a row needs the arguments of tools (its own need_tools_kwargs goes before the key) and has none."""
    needs = extra_info.get("need_tools_kwargs")
    given = extra_info.get("tools_kwargs") or {}
    return bool(config.need_tools_kwargs if needs is None else needs) and not any(given.values())


def _check_reward_model(reward_model: object, answer_key: str | None) -> None:
    _check_type("reward_model", reward_model, Mapping)
    truth, style = reward_model.get("ground_truth"), reward_model.get("style")  # type: ignore[attr-defined]
    if truth is None and style != "model":
        raise ValueError("column 'reward_model' has no ground_truth; a row whose reward needs none says style: model")
    if answer_key and isinstance(truth, str) and not truth.strip():
        raise ValueError(f"column {answer_key!r} is empty; leave the row out, or write its answer")


def _check_type(column: str, value: object, expected: type) -> None:
    if not isinstance(value, expected):
        raise ValueError(
            f"column {column!r} is {type(value).__name__}, expected {expected.__name__.lower()}: {value!r:.80}"
        )
