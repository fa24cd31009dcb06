"""Writes to attributes of other objects in verl/: `run.progress = ...`, where `run` is not self.

A constructor should say what an object needs.

    python -m scripts.foreign_writes          # how many, by file
    python -m scripts.foreign_writes --list   # each, with its line
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OWN = ("self", "cls")


def foreign_writes(path: Path) -> Iterator[tuple[int, str]]:
    """(line, target) of each assignment to an attribute of anything but `self` and `cls` itself."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        for target in targets:
            for one in ast.walk(target):
                is_stored = isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
                if is_stored and not (isinstance(one.value, ast.Name) and one.value.id in OWN):
                    yield one.lineno, ast.unparse(one)


def main() -> int:
    found = {path: list(foreign_writes(path)) for path in sorted((ROOT / "verl").rglob("*.py"))}
    by_file = Counter({path: len(writes) for path, writes in found.items() if writes})
    for path, count in by_file.most_common():
        print(f"{count:5} {path.relative_to(ROOT)}")
        for line, target in found[path] if "--list" in sys.argv[1:] else ():
            print(f"        {line}: {target}")
    print(f"{sum(by_file.values()):5} in all")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
