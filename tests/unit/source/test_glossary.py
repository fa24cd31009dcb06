"""The glossary names what is there, and words that were given up do not come back."""

import ast
import re
import subprocess

from tests.conftest import ROOT

GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
ROWS = [line.strip("| ").split("|") for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
OLD_WORDS = [word for row in ROWS if len(row) == 3 for word in re.findall(r"`([^`]+)`", row[2])]
NAMES = [word for row in ROWS for word in re.findall(r"`([A-Z]\w+|[a-z]+_\w+)`", row[1])]
LOOKED_AT = (
    "verl",
    "tests",
    "docs",
    "benchmarks",
    "examples",
    "plugins",
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
)
HISTORY = ("docs/reference/glossary.md", "benchmarks/results/")


def texts() -> dict[str, str]:
    command = ["git", "ls-files", "-co", "--exclude-standard", *LOOKED_AT]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    names = [n for n in listed if n.endswith((".py", ".md", ".rst", ".yaml", ".sh", ".j2")) and (ROOT / n).is_file()]
    return {n: (ROOT / n).read_text() for n in names if not n.startswith(HISTORY)}


def test_words_that_were_given_up_stay_away():
    assert len(OLD_WORDS) > 25
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, OLD_WORDS))})\b")
    found = [
        f"{name}:{number}: {match[0]}"
        for name, text in texts().items()
        for number, line in enumerate(text.splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert not found, "docs/reference/glossary.md has another word for:\n" + "\n".join(found)


def test_every_name_in_the_glossary_exists():
    defined = {
        node.name
        for path in (ROOT / "verl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    assert len(NAMES) > 20 and not set(NAMES) - defined
