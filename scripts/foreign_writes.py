"""Writes to attributes of other objects of ours in verl/: `run.progress = ...`, where `run` is not self.

A constructor should say what an object needs, and a method what happens to it.

    python -m scripts.foreign_writes          # how many, by file
    python -m scripts.foreign_writes --list   # each, with its line
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OWN = ("self", "cls")
# Objects of libraries take what they need no other way.
LIBRARIES = {
    "Python": ("os.*", "sys.*", "builtins.*", "threading.*", "*.daemon", "*.atexit", "*.__class__", "*.__name__",
               "parser.*", "options.files", "log.level", "handler.emit", "file.name", "loader.name"),
    "torch": ("torch.*", "ctx.*", "options.*", "settings.store", "settings.timeout",
              "settings.group_*", "settings.global_ranks_in_group", "parameter.*", "master.grad", "elastic.*",
              "model.forward", "backbone.forward"),
    "transformers and peft": ("config.*", "model.config", "model._weight_conversions", "layer._disable_adapters",
                              "tokenizer.*", "fast.chat_template"),
    "vLLM": ("Sampler.*", "GPUSampler.*", "socket.recv_multipart"),
    "others": ("console.width", "library.propagate", "*.server.exporter"),
}  # fmt: skip


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


def library_of(target: str) -> str | None:
    """The library whose object `target` is an attribute of; None for ours."""
    return next((name for name, known in LIBRARIES.items() if any(fnmatch(target, one) for one in known)), None)


def main() -> int:
    every = {path: list(foreign_writes(path)) for path in sorted((ROOT / "verl").rglob("*.py"))}
    found = {path: [one for one in writes if library_of(one[1]) is None] for path, writes in every.items()}
    of_libraries = Counter(filter(None, (library_of(one) for writes in every.values() for _, one in writes)))
    by_file = Counter({path: len(writes) for path, writes in found.items() if writes})
    for path, count in by_file.most_common():
        print(f"{count:5} {path.relative_to(ROOT)}")
        for line, target in found[path] if "--list" in sys.argv[1:] else ():
            print(f"        {line}: {target}")
    others = ", ".join(f"{count} of {name}" for name, count in of_libraries.most_common())
    print(f"{sum(by_file.values()):5} in all; besides, of objects of libraries: {others}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
