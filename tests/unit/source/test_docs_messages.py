"""Messages that the pages quote are those of the code, and the pages name every health line."""

import ast
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from verl.commands.quickstart.small_model import make_tokenizer
from verl.config import ConfigError, DataConfig, load_config
from verl.config.check import check_can_start
from verl.data.prompt_sampler import PromptSampler
from verl.data.prompts import train_prompts
from verl.observe.signs import LOGGED, Step
from verl.utils.errors import VerlError

DOCS = ROOT / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "| message | what to do |" in page.read_text()]
GAP = re.compile(r"\.\.\.|…")
GOOD: dict[str, Any] = {
    "data_source": "my/arithmetic",
    "prompt": [{"role": "user", "content": "6x7"}],
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 0},
}


def strings_of_the_code() -> str:
    """Every string of verl/, one a line; values in them are a gap."""
    found = []
    for path in sorted((ROOT / "verl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "..." for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(text.replace("\n", " ") for text in found)


def quoted(page: Path) -> list[str]:
    """The messages that a page explains: headings in backquotes, and the first column of its table of messages."""
    text = page.read_text(encoding="utf-8")
    table = re.search(r"^\| message \| what to do \|\n\|---\|---\|\n((?:\|.*\n?)+)", text, flags=re.M)
    return re.findall(r"^### `(.+)`$", text, flags=re.M) + re.findall(
        r"^\| `(.+?)` \|", table[1] if table else "", re.M
    )


def test_messages_that_pages_explain_are_in_the_code():
    code = strings_of_the_code()
    messages = [(page.name, message) for page in [DOCS / "start" / "faq.md", *PAGES] for message in quoted(page)]
    assert len(messages) > 35
    gone = [
        (name, piece)
        for name, message in messages
        for piece in map(str.strip, GAP.split(message))
        if len(piece) > 3 and piece not in code
    ]
    assert not gone


def rows_file(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


# what the table of docs/rewards/rows.md says in its first column, and a row or path that does it
MISTAKES: dict[str, Any] = {
    "the column has another name": {**without("prompt"), "promt": GOOD["prompt"]},
    "no data source in one row": {**GOOD, "data_source": None},
    "the answer stands beside the row instead of in it": {**without("reward_model"), "answer": "42"},
    "no ground truth": {**GOOD, "reward_model": {"style": "rule"}},
    "`extra_info` is JSON text": {**GOOD, "extra_info": "{}"},
    "the prompt is one message instead of a list": {**GOOD, "prompt": GOOD["prompt"][0]},
    "role `human`": {**GOOD, "prompt": [{"role": "human", "content": "6x7"}]},
    "an empty prompt": {**GOOD, "prompt": ""},
    "pictures": {**GOOD, "images": [{"bytes": ""}]},
    "a prompt that is too long": {**GOOD, "prompt": "6x7=" * 10},
    "a cut line in a jsonl file": '{"data_source": ',
    "a path that is not there": "tran.jsonl",
    "a split that is not there": ".:test",
    "an address instead of a path": "https://example.org/train.jsonl",
    "fewer rows than a batch": GOOD,
}


def table_of_mistakes() -> dict[str, str]:
    text = (DOCS / "rewards" / "rows.md").read_text(encoding="utf-8").partition("| mistake | message |\n|---|---|\n")[2]
    return dict(re.findall(r"^\| (.+?) \| `(.+)` \|$", text, flags=re.M))


def test_the_table_of_mistakes_is_the_list_of_this_file():
    assert list(table_of_mistakes()) == list(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_rows_says_what_the_page_says(mistake: str, tmp_path: Path):
    wrong, path = MISTAKES[mistake], rows_file(tmp_path, GOOD)
    if isinstance(wrong, dict):
        path = rows_file(tmp_path, wrong)
    elif wrong.startswith("{"):
        (tmp_path / "train.jsonl").write_text(wrong)
    else:
        path = wrong if "://" in wrong else str(tmp_path / wrong)
    config = DataConfig(train_files=path, max_prompt_length=8)
    with pytest.raises(VerlError) as raised:
        PromptSampler(train_prompts(config, make_tokenizer("6x7="))).take(64)
    pieces = [re.escape(piece.strip()) for piece in GAP.split(table_of_mistakes()[mistake])]
    assert re.search(".*".join(pieces), str(raised.value)), raised.value


def test_the_example_row_is_accepted(tmp_path: Path):
    row = re.search(r"^```json\n(.*?)^```", (DOCS / "rewards" / "rows.md").read_text(), flags=re.M | re.S)
    assert row
    config = DataConfig(train_files=rows_file(tmp_path, json.loads(row[1])), max_prompt_length=512)
    prompt = train_prompts(config, make_tokenizer("6x7="))[0]
    assert (prompt.ground_truth, prompt.agent_name) == ("42", "single_turn_agent")


def test_every_health_line_is_on_the_page():
    page = (DOCS / "see" / "reading_a_run.md").read_text(encoding="utf-8")
    begins = re.findall(r"^\| `(.+?)` \| `", page, flags=re.M)
    lines = {
        sign.name: sign.sentence.format(**{**vars(sign), "value": 0.0}, step=Step(defaultdict(float)))
        for sign in LOGGED
    }
    assert {name for name, line in lines.items() if any(map(line.startswith, begins))} == lines.keys()
    assert len(begins) == len(lines)


def settings_under(heading: str) -> list[str]:
    """The settings `key=value` in the first column of the table below a heading of coming_from_verl.md."""
    page = (DOCS / "start" / "coming_from_verl.md").read_text(encoding="utf-8")
    firsts = re.findall(r"^\| (`.+?) \|", page.partition(f"## {heading}")[2].partition("\n## ")[0], flags=re.M)
    return [setting for first in firsts for setting in re.findall(r"`([a-z][\w.]+=[^`]+)`", first)]


@pytest.mark.filterwarnings("ignore")
def test_what_the_page_calls_without_effect_changes_nothing():
    settings = settings_under("What has no effect")
    assert len(settings) > 3
    for setting in settings:
        preset = "sft_trainer" if setting.startswith("model=") else "ppo_trainer"
        assert load_config(setting.split(), preset) == load_config([], preset), setting


@pytest.mark.filterwarnings("ignore")
def test_what_the_page_calls_refused_is_refused():
    settings = settings_under("What is refused")
    assert len(settings) > 6
    for setting in settings:
        with pytest.raises(ConfigError, match=r"still to come \(docs/start/coming_from_verl.md\)| is refused: "):
            check_can_start(load_config([setting, "actor_rollout_ref.model.path=/m"]))
