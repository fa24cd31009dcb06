"""The settings with which a run can read a file: which columns are question and answer, and what scores them."""

import re
import shlex
from dataclasses import replace
from itertools import islice
from typing import Any

from verl.config import RunConfig
from verl.config.reward import uses_built_in_scorers
from verl.data.data_files import FileRows
from verl.data.prompt_rows import SOURCE_KEY, missing_columns
from verl.rewards.base import NoScorerError
from verl.rewards.gold_answers import gold_texts
from verl.rewards.scorer_lookup import find_scorer

LOOKED_AT = 64  # rows from which a scorer is chosen


def settings_for(files: list[str], config: RunConfig) -> tuple[RunConfig, str]:
    """The configuration of a run on `files`, and what it has beyond `config`, as words to paste."""
    missing = missing_columns(FileRows(files)[0], config.data).items()
    found = {key: meant for key, (_, meant) in missing if meant and key != SOURCE_KEY}
    values: dict[str, Any] = {key.removeprefix("data."): name for key, name in found.items()}
    data = replace(config.data, train_files=files, **values)
    config = replace(config, data=data)
    if uses_built_in_scorers(config.reward) and (scorer := _scorer_for(FileRows(files, data), config)):
        found["reward.scorer"] = scorer
        config = replace(config, reward=replace(config.reward, scorer=scorer))
    shown = {"data.train_files": f"[{','.join(map(_written, files))}]" if files[1:] else _written(files[0])}
    shown |= {key: _written(value) for key, value in found.items()}
    return config, " ".join(shlex.quote(f"{key}={value}") for key, value in shown.items())


def _written(text: str) -> str:
    """A text as an override spells it."""
    return text if re.fullmatch(r"(?!(?:null|true|false)$)[a-zA-Z_/.~][\w./~:*?-]*", text) else repr(text)


def _scorer_for(rows: FileRows, config: RunConfig) -> str | None:
    """The scorer that the ground truths suggest; None where one is set or known, or where they are no texts."""
    some = list(islice(rows, LOOKED_AT))
    try:
        for source in {str(row.get(config.data.reward_fn_key)) for row in some}:
            find_scorer(source, config.reward.scorer)
        return None
    except NoScorerError:
        truths = [(row.get("reward_model") or {}).get("ground_truth") for row in some]
    if not (golds := [text for truth in truths for text in gold_texts(truth)]):
        return None
    if all("####" in str(truth) for truth in truths):
        return "gsm8k"
    bare = [re.sub(r"\\[a-zA-Z]+", "0", gold) for gold in golds]
    formulas = [text for text in bare if re.search(r"\d", text) and not re.search("[a-zA-Z]{3}", text)]
    return "math" if 2 * len(formulas) > len(golds) else "exact"
