"""What CONTRIBUTING and SECURITY promise about the source, checked on the source."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts.size_table import CEILINGS_FILE, mixed_commits
from tests.conftest import skip_or_fail

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted((ROOT / "verl").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
FORBIDDEN_CALLS = {"eval", "exec", "os.system", "os.popen", "os.execv"}
PROGRAMS_RUN_IN = "verl/rewards/sandbox/inside/program.py"  # of a child without rights: its task is exec()
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
VAGUE_OPENINGS = {"Those", "That", "Of", "By", "Its", "What"}
FORBIDDEN_NAMES = {"misc", "helper", "helpers", "common", "manager", "util"}


def dotted(node: ast.expr) -> str:
    """'os.system' for the expression os.system; '' for anything but names and attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and dotted(node.value):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def is_true(call: ast.Call, keyword: str) -> bool:
    values = [k.value for k in call.keywords if k.arg == keyword]
    return any(isinstance(v, ast.Constant) and v.value is True for v in values)


def unsafe(text: str) -> list[str]:
    """'line: what' for everything that runs text as code or unpickles bytes."""
    out = []
    for node in ast.walk(ast.parse(text)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        out += [f"{node.lineno}: import {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name in FORBIDDEN_CALLS:
            out.append(f"{node.lineno}: {name}()")
        if name == "torch.load" and not is_true(node, "weights_only"):
            out.append(f"{node.lineno}: torch.load without weights_only=True")
        out += [f"{node.lineno}: {word}=True" for word in ("shell", "trust_remote_code") if is_true(node, word)]
        if any(k.arg == "allow_pickle" and is_true(node, "allow_pickle") for k in node.keywords):
            out.append(f"{node.lineno}: allow_pickle=True")
    return out


def test_nothing_runs_text_as_code_or_unpickles_bytes():
    found = [f"{path.relative_to(ROOT)}:{line}" for path in SOURCES for line in unsafe(path.read_text())]
    outside = [line for line in found if not line.startswith(PROGRAMS_RUN_IN)]
    assert len(found) == len(outside) + 3 and not outside, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "eval('1')",
        "import os\nos.system('ls')",
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(f)",
        "subprocess.run('ls', shell=True)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "numpy.load(f, allow_pickle=True)",
    ],
)
def test_each_unsafe_form_is_found(code):
    assert unsafe(code)
    assert not unsafe("model.eval()\nsubprocess.run(['ls'], shell=False)\ntorch.load(f, weights_only=True)")


def test_no_exception_is_swallowed():
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                broad = node.type is None or dotted(node.type) in ("Exception", "BaseException")
                if broad and all(isinstance(statement, ast.Pass | ast.Continue) for statement in node.body):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found, found


def test_every_module_says_what_it_is_for():
    silent = [str(p.relative_to(ROOT)) for p in SOURCES if p.read_text().strip() and not ast.get_docstring(parse(p))]
    assert not silent, silent


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def docstring_openings(text: str) -> list[str]:
    """'name: first words' of each docstring that begins with a word of VAGUE_OPENINGS."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    found = [(getattr(node, "name", "module"), ast.get_docstring(node) or "") for node in documented]
    return [f"{name}: {words[:40]}" for name, words in found if words.split(" ")[0] in VAGUE_OPENINGS]


def test_docstrings_begin_with_their_subject():
    assert docstring_openings('def f():\n    """Those of a rank."""\n') == ["f: Those of a rank."]
    assert [f"{path.name} {opening}" for path in SOURCES for opening in docstring_openings(path.read_text())] == []


def test_files_are_nouns_and_fit_a_sitting():
    vague = [p.name for p in SOURCES if p.stem in FORBIDDEN_NAMES]
    long = [f"{p.relative_to(ROOT)}: {n}" for p in [*SOURCES, *TESTS] if (n := len(p.read_text().splitlines())) > 400]
    assert not vague and not long, (vague, long)


def test_a_todo_names_an_issue():
    lines = [(p, i, line) for p in SOURCES for i, line in enumerate(p.read_text().splitlines(), 1)]
    nameless = [f"{p.relative_to(ROOT)}:{i}" for p, i, line in lines if "TODO" in line and "issue" not in line]
    assert not nameless, nameless


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_said_once_and_the_same():
    import verl

    assert verl.__version__ == project()["version"]


def test_the_size_table_counts_every_line_once():
    done = subprocess.run([sys.executable, ROOT / "scripts/size_table.py"], capture_output=True, text=True, check=True)
    (total,) = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("total")]
    pages = [p for p in (ROOT / "verl").rglob("*") if p.suffix in (".js", ".css", ".html", ".j2")]
    assert pages and total == sum(len(p.read_text().splitlines()) for p in [*SOURCES, *pages])


def test_only_a_commit_of_its_own_changes_a_ceiling(tmp_path):
    def commit(title: str, **files: str) -> None:
        for name, text in files.items():
            (tmp_path / name.replace("ceilings", CEILINGS_FILE)).write_text(text)
        git("add", "-A")
        git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", title)

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)

    (tmp_path / "scripts").mkdir()
    git("init", "-q")
    commit("first", ceilings="1", source="1")
    commit("raise", ceilings="2")
    commit("use", source="2")
    assert mixed_commits(tmp_path) == []
    commit("both", ceilings="3", other="new")
    assert [title.split()[1] for title in mixed_commits(tmp_path)] == ["both"]
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{tmp_path}", tmp_path / "shallow"], check=True)
    assert mixed_commits(tmp_path / "shallow") == []


def test_extras_are_installed_from_a_checkout():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *SOURCES]
    others = [str(page) for page in pages if re.search(r"install ['\"]?verl\[", page.read_text())]
    assert others == [], "an index has another package of this name"


def test_shell_scripts_are_sound():
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        skip_or_fail("no shellcheck in PATH")
    scripts = [*sorted((ROOT / "scripts").glob("*.sh")), *sorted(p for p in (ROOT / ".ci").iterdir() if p.is_file())]
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_two_test_files_have_the_same_name():
    """pytest imports a test file by its name alone, where its folder is no package."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert not {name for name in names if names.count(name) > 1}
