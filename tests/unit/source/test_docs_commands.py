"""Commands that README and docs print can be typed, links lead somewhere, and the index names every page."""

import re
import shlex
import warnings
from pathlib import Path

import pytest

from tests.conftest import ROOT
from verl.cli import VERBS
from verl.config import load_config
from verl.utils.external_code import load_object

PRESETS = {"sft": "sft_trainer", "sft_trainer": "sft_trainer", "eval": "evaluation", "main_eval": "evaluation"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> list[list[str]]:
    """The words of every command of ours in a fenced block."""
    blocks = re.split(r"^```.*$", page.read_text(encoding="utf-8"), flags=re.M)[1::2]
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    ours = re.compile(r"^(verl |torchrun .*-m verl\.|python3? -m verl\.)")
    return [shlex.split(line, comments=True) for line in lines if ours.match(line)]


ALL = [(page.relative_to(ROOT), words) for page in PAGES for words in commands(page)]


def test_the_pages_hold_commands():
    assert len(ALL) > 20


@pytest.mark.parametrize(
    ("page", "words"), ALL, ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else str(value)
)
def test_a_printed_command_can_be_typed(page: Path, words: list[str]):
    if words[0] == "verl":
        assert words[1] in VERBS, page
        verb = words[1]
    else:
        verb = words[words.index("-m") + 1].rpartition(".")[2]
        assert (ROOT / "verl" / "trainer" / verb).with_suffix(".py").exists() or (
            ROOT / "verl" / "trainer" / verb
        ).is_dir()
    overrides = [word for word in words if re.match(r"^[+~]*[a-z_]+\.[\w.]+=", word)]
    if verb == "serve":
        overrides = [f"actor_rollout_ref.{word}" for word in overrides]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_config(overrides, config_name=PRESETS.get(verb, "ppo_trainer"))


def links(page: Path) -> list[Path]:
    """The files a page points to."""
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8"))
    return [(page.parent / target).resolve() for target in targets]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    assert [str(target) for target in links(page) if not target.exists()] == []


def test_the_index_names_every_page():
    named = set(links(ROOT / "docs" / "index.md"))
    pages = {page for page in PAGES[1:] if "adr" not in page.parts and page.name != "index.md"}
    assert pages - named == set()


def test_the_reward_of_the_tutorial_tells_wrong_answers_apart_by_nothing(tmp_path: Path):
    """Where length alone tells them apart, a group without a right answer learns to say nothing."""
    code = re.search(r"^```python\n(# my_reward\.py\n.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    assert code
    (tmp_path / "my_reward.py").write_text(code[1])
    reward = load_object(str(tmp_path / "my_reward.py"), "compute_score", "reward.custom_reward_function.path")
    scores = [reward("quickstart/addition", answer, "12")["score"] for answer in ("", "13", "4+8=12,0+0+1=2;21")]
    assert scores[0] == scores[1] == scores[2]
    assert reward("", "4+8=12;12", "12")["score"] > reward("", "4+8=12,0+0+1=1;12", "12")["score"] > scores[0]
