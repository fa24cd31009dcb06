"""Print the lines of each package beside its ceiling, and the longest files.

A package over its ceiling is marked; the commit that takes it there says why. `--check` makes it an error.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COUNTED = (".py", ".js", ".css", ".html", ".j2")
CEILINGS = {  # docs/adr/0007-size-ceilings.md says why
    "__init__.py": 30,
    "cli.py": 120,
    "config": 4529,
    "plugin": 1350,
    "data": 2818,
    "algorithms": 2300,
    "runtime": 3409,
    "observe": 4685,
    "models": 6114,
    "workers/engine": 3700,
    "workers/rollout": 5920,
    "workers": 1186,  # the driver-side handles
    "checkpoint_engine": 973,  # transports, at the path where plug-ins look for their interface
    "weight_sync": 479,
    "agent": 2114,
    "rewards": 5363,
    "trainer": 9137,
    "commands": 7283,
    "utils": 1929,
}
CORE = ("config", "data", "algorithms", "runtime", "trainer")
CORE_CEILING, TOTAL_CEILING, FILE_CEILING = 21857, 63105, 400


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
    table.append(("core", sum(packages[name] for name in CORE), CORE_CEILING))
    table.append(("total", sum(packages.values()), TOTAL_CEILING))
    return table


def main() -> int:
    packages, files = count(ROOT)
    table = rows(packages)
    print(f"{'package':<24}{'lines':>7}{'ceiling':>9}")
    for name, lines, ceiling in table:
        mark = "  OVER" if ceiling is not None and lines > ceiling else ""
        print(f"{name:<24}{lines:>7}{ceiling or '-':>9}{mark}")
    long = [(n, name) for name, n in files.items() if n > FILE_CEILING]
    for lines, name in sorted(long, reverse=True):
        print(f"verl/{name}: {lines} lines, ceiling {FILE_CEILING}")
    over = bool(long) or any(ceiling is not None and lines > ceiling for _, lines, ceiling in table)
    return int(over and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
