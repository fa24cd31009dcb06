"""Every command that README and docs print is run here or says what it needs; links lead somewhere.

A fenced block of commands is `bash`. One of two marks says how far it is tested:
    ```bash run           runs here, in order of the page, in a folder as `make quickstart` leaves it (a tiny model);
                          commands that train are cut to TRAINING_STEPS
    # needs: WHAT         the first line of a block that cannot run here, also of a plain one that shows what is printed
The commands of ours in blocks and between single backquotes have a verb, options and keys that exist; those
that explain or print the configuration run.
A ```python FILE block is a file that the reader saves; where a file of that name is in the repository, both are equal.
"""

import contextlib
import os
import re
import runpy
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from verl import cli
from verl.cli import VERBS
from verl.commands.completion import options_of
from verl.commands.quickstart.addition_task import CHARACTERS, make_split, write_split
from verl.commands.quickstart.small_model import make_model
from verl.config import load_config
from verl.utils.external_code import load_object

PRESETS = {"sft": "sft_trainer", "eval": "evaluation", "main_eval": "evaluation"}
PRESETS |= {"sft_trainer": "sft_trainer", "sft_trainer_ray": "sft_trainer"}
PRESETS |= {"dpo": "dpo_trainer", "dpo_trainer": "dpo_trainer"}
PRESETS |= {"reward-model": "reward_trainer", "reward_trainer": "reward_trainer"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "examples").rglob("*.md"))]
OTHERS += sorted((ROOT / "plugins").rglob("*.md"))
OURS = re.compile(r"^(?:\$ |[A-Z_]+=\S+ |.* -- )*((?:verl |torchrun .*-m verl\.|python3? -m verl\.).*)")  # or launched
INLINE = re.compile(r"`((?:verl|python3? -m verl\.[\w.]+) [^`\n]+)`")
KEY = re.compile(r"^[+~]*[a-z_]+\.[\w.]+=")
PLACEHOLDERS = ("key=value", "model=")  # `verl serve model=DIR` is a name of its own
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", flags=re.M | re.S)
TRAINING_STEPS = 3
TRAINING = ("train", "main_ppo", "sft", "sft_trainer", "dpo", "reward-model")


def blocks(page: Path) -> list[tuple[str, str]]:
    """(what stands behind the three backquotes, text) of every fenced block."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def lines_of(text: str) -> list[str]:
    """Commands of a block, with continued lines joined."""
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def commands(page: Path) -> list[list[str]]:
    """The words of every command of ours, in a fenced block or between single backquotes."""
    found = [OURS.match(line) for _, text in blocks(page) for line in lines_of(text)]
    lines = [match[1] for match in found if match] + INLINE.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return [shlex.split(line, comments=True) for line in lines]


def is_marked(kind: str, text: str) -> bool:
    """Whether a block of commands is run, or says what it needs."""
    return kind == "bash run" or text.startswith("# needs: ")


ALL = [(page.relative_to(ROOT), words) for page in [*PAGES, *OTHERS] for words in commands(page)]
RUN_PAGES = [page for page in PAGES if any(kind == "bash run" for kind, _ in blocks(page))]


def test_the_pages_hold_commands():
    assert len(ALL) > 150 and len(RUN_PAGES) > 5


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_commands_is_run_or_says_what_it_needs(page: Path):
    for kind, text in blocks(page):
        language = kind.partition(" ")[0]
        if language in ("bash", "sh", "shell", "console") or any(map(OURS.match, lines_of(text))):
            assert is_marked(kind, text), f"{page.name}: write ```bash run, or begin with '# needs: ...':\n{text}"


@pytest.mark.parametrize("page", sorted({page for page, _ in ALL}), ids=str)
def test_a_printed_command_can_be_typed(page: Path):
    for words in (words for other, words in ALL if other == page):
        check_command(words)


def check_command(words: list[str]) -> None:
    """The verb, the options and the keys of a command exist; one that explains or prints the configuration runs."""
    verb, typed = verb_of(words), shlex.join(words)
    if words[0] == "verl":
        assert verb in VERBS, typed
    else:
        place = ROOT.joinpath(*words[words.index("-m") + 1].split("."))
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), typed
    rest = words[2:] if words[0] == "verl" else words[words.index("-m") + 2 :]
    options = [word.partition("=")[0] for word in rest if word.startswith("--")]
    if verb in VERBS:
        assert set(options) <= set(options_of(verb)), typed
    overrides = [word for word in rest if KEY.match(word)]
    settings = [word for word in rest if "=" in word and not word.startswith(("-", *PLACEHOLDERS))]
    assert overrides == settings, typed
    if verb == "serve":
        overrides = [f"actor_rollout_ref.{word}" for word in overrides]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_config(overrides, config_name=PRESETS.get(verb, "ppo_trainer"))
        if verb == "config" and not re.search(r"\b[A-Z]{3,}|\.\.\.|…|=value", " ".join(rest)):
            assert cli.main(["config", *rest]) == 0, typed


def verb_of(words: list[str]) -> str:
    """The verb of `verl VERB`, or the last part of the module of `python3 -m MODULE`."""
    return words[1] if words[0] == "verl" else words[words.index("-m") + 1].rpartition(".")[2]


@pytest.fixture(scope="module")
def after_quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with quickstart_out/ (a tiny random model in warm/), the examples, and the run tutorial/mine."""
    folder = tmp_path_factory.mktemp("docs")
    out = folder / "quickstart_out"
    make_model(out / "warm", CHARACTERS, 0, hidden=32, layers=1)
    write_split(make_split(0, 4, 8), out / "data")
    rows = (out / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    (out / "data" / "train.jsonl").write_text("".join(rows[:96]))
    (folder / "examples").symlink_to(ROOT / "examples")
    run_page(ROOT / "README.md", folder)
    return folder


@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_marked_run_do_run(page: Path, after_quickstart: Path, tmp_path: Path):
    if page.name == "README.md":
        return  # the fixture ran it
    folder = shutil.copytree(after_quickstart, tmp_path / "work", symlinks=True)
    run_page(page, folder)


def run_page(page: Path, folder: Path) -> None:
    """Run the page's blocks in `folder`, after saving its Python files there."""
    for kind, text in blocks(page):
        language, _, name = kind.partition(" ")
        if language == "python" and name and not (ROOT / name).exists():
            (folder / name).write_text(text)
    with in_folder(folder):
        for kind, text in blocks(page):
            if kind == "bash run":
                for line in lines_of(text):
                    run_line(line)


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """Commands run in `folder`; environment, search path and arguments are as before afterwards."""
    before, path, argv = dict(os.environ), list(sys.path), list(sys.argv)
    for name in ("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"):
        os.environ.pop(name, None)
    try:
        with contextlib.chdir(folder), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        sys.path[:], sys.argv[:] = path, argv


def run_line(line: str) -> None:
    """One command in this process (starting Python anew for each would take minutes); it must end with status 0."""
    words = shlex.split(line, comments=True)
    if not words or words[0] == ".":
        return
    if words[0] == "export":
        name, _, value = words[1].partition("=")
        os.environ[name] = value
        if name == "PYTHONPATH":
            sys.path.insert(0, str(Path(value).absolute()))
        return
    if OURS.match(line):
        verb = verb_of(words)
        arguments = words[2:] if words[0] == "verl" else words[words.index("-m") + 2 :]
        names = {module.partition(":")[0].rpartition(".")[2]: verb for verb, (module, _) in VERBS.items()}
        cut = [f"trainer.total_training_steps={TRAINING_STEPS}"] if verb in TRAINING else []
        assert cli.main([names.get(verb, verb), *arguments, *cut]) == 0, line
        return
    assert words[0] == "python3", f"{line!r}: commands of docs are verl, python3, export"
    sys.argv[:] = words[1:]
    runpy.run_path(words[1], run_name="__main__")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_file_that_a_page_prints_is_the_one_in_the_repository(page: Path):
    for kind, text in blocks(page):
        language, _, name = kind.partition(" ")
        if language == "python" and "/" in name:
            assert (ROOT / name).read_text(encoding="utf-8") == text, f"{page.name} prints another {name}"


def links(page: Path) -> list[Path]:
    """The files a page points to."""
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8"))
    return [(page.parent / target).resolve() for target in targets]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    assert [str(target) for target in links(page) if not target.exists()] == []


def test_the_index_names_every_page():
    index, decisions = ROOT / "docs" / "index.md", ROOT / "docs" / "why" / "adr" / "README.md"
    assert set(PAGES[1:]) - {index, *links(index), *links(decisions)} == set()


def test_pages_that_texts_name_exist():
    """A message, docstring or comment names a page by its path in the repository."""
    texts = [p for folder in ("verl", "examples", "docs") for p in (ROOT / folder).rglob("*")]
    texts = [p for p in texts if p.suffix in (".py", ".yaml", ".yml", ".sh", ".md", ".rst")]
    named = {(name, p) for p in texts for name in re.findall(r"(?<![\w/.-])docs/[\w/-]+\.(?:md|rst)", p.read_text())}
    assert len(named) > 50 and not [f"{p}: {name}" for name, p in named if not (ROOT / name).is_file()]


def test_the_reward_of_the_tutorial_tells_wrong_answers_apart_by_nothing(tmp_path: Path):
    """Where length alone tells them apart, a group without a right answer learns to say nothing."""
    code = re.search(r"^```python my_reward\.py\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    assert code
    (tmp_path / "my_reward.py").write_text(code[1])
    reward = load_object(str(tmp_path / "my_reward.py"), "compute_score", "reward.custom_reward_function.path")
    scores = [reward("quickstart/addition", answer, "12")["score"] for answer in ("", "13", "4+8=12,0+0+1=2;21")]
    assert scores[0] == scores[1] == scores[2]
    assert reward("", "4+8=12;12", "12")["score"] > reward("", "4+8=12,0+0+1=1;12", "12")["score"] > scores[0]
