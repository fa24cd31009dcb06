"""Print the lines of each package beside its ceiling, and the longest files.

A package over its ceiling is marked. `--check` makes that an error, as well as a commit that changes a ceiling and
another file: a ceiling is raised in a commit of its own, which says why.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COUNTED = (".py", ".js", ".css", ".html", ".j2")
CEILINGS_FILE = "scripts/ceilings.json"  # docs/why/adr/0007-size-ceilings.md says why
LIMITS = json.loads((ROOT / CEILINGS_FILE).read_text())
CEILINGS: dict[str, int] = LIMITS["packages"]
CORE = ("config", "data", "algorithms", "runtime", "trainer", "placement", "checks")


def package_of(path: Path) -> str:
    """The most specific entry of CEILINGS that holds `path` (relative to verl/); its first folder otherwise."""
    matches = [name for name in CEILINGS if path == Path(name) or Path(name) in path.parents]
    return max(matches, key=len) if matches else path.parts[0]


def count(root: Path) -> tuple[dict[str, int], dict[str, int]]:
    """(lines per package, lines per file) of what is written by hand below root/verl."""
    packages: dict[str, int] = dict.fromkeys(CEILINGS, 0)
    files: dict[str, int] = {}
    for path in sorted(p for p in (root / "verl").rglob("*") if p.suffix in COUNTED):
        relative = path.relative_to(root / "verl")
        files[str(relative)] = len(path.read_text().splitlines())
        package = package_of(relative)
        packages[package] = packages.get(package, 0) + files[str(relative)]
    return packages, files


def rows(packages: dict[str, int]) -> list[tuple[str, int, int | None]]:
    """(name, lines, ceiling) for every package, the core and the whole."""
    table: list[tuple[str, int, int | None]] = [(name, n, CEILINGS.get(name)) for name, n in packages.items()]
    table.append(("core", sum(packages.get(name, 0) for name in CORE), LIMITS["core"]))
    table.append(("total", sum(packages.values()), LIMITS["total"]))
    return table


def mixed_commits(root: Path) -> list[str]:
    """The commits that change a ceiling and another file, as far as the history is here.

    The oldest commit of a shallow clone adds every file, so it is none of them.
    """
    if not (root / ".git").exists():
        return []
    git = ["git", "-C", str(root), "log", "--no-merges", "--full-diff", "--name-status", "--format=%x00%h %s"]
    log = subprocess.run([*git, "--", CEILINGS_FILE], stdout=subprocess.PIPE, text=True, check=True).stdout
    commits = [entry.strip().split("\n") for entry in log.split("\0")[1:]]
    return [title for title, _, *files in commits if f"A\t{CEILINGS_FILE}" not in files and len(files) > 1]


def main() -> int:
    packages, files = count(ROOT)
    table = rows(packages)
    print(f"{'package':<24}{'lines':>7}{'ceiling':>9}")
    for name, lines, ceiling in table:
        mark = "  OVER" if ceiling is not None and lines > ceiling else ""
        print(f"{name:<24}{lines:>7}{ceiling or '-':>9}{mark}")
    long = [(n, name) for name, n in files.items() if n > LIMITS["file"]]
    for lines, name in sorted(long, reverse=True):
        print(f"verl/{name}: {lines} lines, ceiling {LIMITS['file']}")
    mixed = mixed_commits(ROOT)
    for commit in mixed:
        print(f"{commit}: changes {CEILINGS_FILE} and other files; change ceilings in a commit of their own")
    wrong = bool(long or mixed) or any(ceiling is not None and lines > ceiling for _, lines, ceiling in table)
    return int(wrong and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
