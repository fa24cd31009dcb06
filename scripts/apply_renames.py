"""Apply a rename map to a tree: words, module paths, file paths, then the formatter.

    scripts/apply_renames.py MAP.json TREE              rename everything below TREE, in place
    scripts/apply_renames.py MAP.json --check BASE DIR  what differs between DIR here, and DIR at BASE after the renames

MAP.json holds `moves` (old path -> new path) and `words`: {old, new, in} or {regex, new, in}, `in` being globs of
old paths.
"""

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_ALONE = ("CHANGELOG.md", "benchmarks/results/", "scripts/renames.json", "scripts/apply_renames.py", "tests/data/")


def dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def touches(path: str, patterns: list[str]) -> bool:
    return any(
        pattern in ("**", path)
        or (pattern.endswith("/**") and path.startswith(pattern[:-2]))
        or fnmatch.fnmatch(path, pattern)
        for pattern in patterns
    )


def rename_words(texts: dict[str, str], words: list[dict]) -> None:
    for entry in words:
        pattern = re.compile(entry["regex"] if "regex" in entry else rf"\b{re.escape(entry['old'])}\b", re.M)
        hits = 0
        for path in texts:
            if touches(path, entry["in"]):
                texts[path], count = pattern.subn(entry["new"], texts[path])
                hits += count
        if not hits:
            print("matches nothing:", entry, file=sys.stderr)


def rename_modules(text: str, moves: dict[str, str]) -> str:
    """Dotted and slashed paths, and `from package import module`."""
    modules = {dotted(a): dotted(b) for a, b in moves.items() if a.endswith(".py")}
    for old in sorted(modules, key=len, reverse=True):
        package, _, name = old.rpartition(".")
        new_package, _, new_name = modules[old].rpartition(".")
        text = from_imports(text, package, name, new_package, new_name)
        text = re.sub(rf"(?<![\w.\0])(?<!-m ){re.escape(old)}(?![\w])", f"\0{modules[old]}", text)  # commands stay
    for old, new in sorted(moves.items(), key=lambda item: -len(item[0])):
        text = re.sub(rf"(?<![\w/\0]){re.escape(old)}(?!\w)", f"\0{new}", text)
    return text.replace("\0", "")


def from_imports(text: str, package: str, name: str, new_package: str, new_name: str) -> str:
    """`from package import a, name as x` loses `name`, which gets a line of its own; uses of the bare name follow."""

    def without(match: re.Match[str]) -> str:
        names = [n.strip() for n in match["names"].strip("()\n ").rstrip(",").split(",")]
        hit = next((n for n in names if n.split(" as ")[0] == name), None)
        if hit is None:
            return match[0]
        nonlocal used
        used = used or " as " not in hit
        alias = f" as {hit.split(' as ')[1]}" if " as " in hit else ""
        rest = [n for n in names if n != hit]
        lines = [f"{match['indent']}from {package} import {', '.join(rest)}"] if rest else []
        return "\n".join([*lines, f"{match['indent']}from \0{new_package} import {new_name}{alias}"])

    used = False
    pattern = rf"^(?P<indent> *)from {re.escape(package)} import (?P<names>\([^)]*\)|[^\n(]*)"
    text = re.sub(pattern, without, text, flags=re.M)
    if used and name != new_name:
        text = re.sub(rf"(?<![\w.\"'/]){name}(?=\.\w)(?!\.(?:py|md|safetensors|json)\b)", new_name, text)
        text = re.sub(rf"((?:[(=\[{{,]|^) *){name}(?=[,):]|$)", rf"\1{new_name}", text, flags=re.M)
    return text


def apply(map_path: Path, tree: Path) -> None:
    data = json.loads(map_path.read_text())
    moves: dict[str, str] = data["moves"]
    paths = [str(p.relative_to(tree)) for p in sorted(tree.rglob("*")) if p.is_file() and not p.is_symlink()]
    texts = {}
    for path in paths:
        if path.startswith(LEFT_ALONE) or "/." in f"/{path}".replace("/.ci", ""):
            continue
        try:
            texts[path] = (tree / path).read_text()
        except UnicodeDecodeError:
            continue
    rename_words(texts, data["words"])
    for path in texts:
        texts[path] = rename_modules(texts[path], moves)
        if path in moves and path.startswith("tests/"):
            deeper = moves[path].count("/") - path.count("/")
            texts[path] = re.sub(
                r"(Path\(__file__\)(?:\.resolve\(\))?\.parents)\[(\d)\]",
                lambda m, d=deeper: f"{m[1]}[{int(m[2]) + d}]",
                texts[path],
            )
    rename_words(texts, data["words_after"])
    for path in texts:
        (tree / path).write_text(texts[path])
    for old, new in moves.items():
        if (tree / old).exists():
            (tree / new).parent.mkdir(parents=True, exist_ok=True)
            if (tree / new).exists():  # two files become one; what they import is sorted out by hand
                (tree / new).write_text((tree / old).read_text() + (tree / new).read_text())
                (tree / old).unlink()
            else:
                shutil.move(tree / old, tree / new)
    if (tree / "verl").is_dir() and not (tree / "verl").is_symlink():
        for package in data["packages"]:
            (tree / package).mkdir(parents=True, exist_ok=True)
            (tree / package / "__init__.py").touch()
    python_files(tree)


def python_files(tree: Path) -> None:
    """Imports sorted and lines wrapped; in a tree without the library, this one's stands in, to sort alike."""
    ruff = shutil.which("ruff", path=f"{ROOT}/.venv/bin{os.pathsep}{os.environ['PATH']}")
    targets = [path.name for path in tree.iterdir()]
    if "verl" not in targets:
        (tree / "verl").symlink_to(ROOT / "verl")
        shutil.copy2(ROOT / "pyproject.toml", tree)
    for arguments in (["format"], ["check", "--fix", "--ignore", "E501"], ["format"]):
        subprocess.run([str(ruff), *arguments, "-q", *targets], cwd=tree, check=False)


def check(map_path: Path, base: str, folder: str) -> int:
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        archive = subprocess.run(["git", "archive", base, folder], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "x"], cwd=tree, input=archive.stdout, check=True)
        apply(map_path, tree)
        shown = ["diff", "-ru", "-x", "__pycache__", str(tree / folder), str(ROOT / folder)]
        return subprocess.run(shown, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("map", type=Path)
    parser.add_argument("tree", nargs="?", type=Path)
    parser.add_argument("--check", nargs=2, metavar=("BASE", "DIR"))
    arguments = parser.parse_args()
    if arguments.check:
        return check(arguments.map, *arguments.check)
    apply(arguments.map, arguments.tree)
    return 0


if __name__ == "__main__":
    sys.exit(main())
