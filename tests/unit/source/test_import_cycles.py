"""No module needs itself, inside a package or a function either."""

import ast
from pathlib import Path

import scripts.layers as layers

ROOT = Path(__file__).resolve().parents[3]


def imports_of(tree: ast.AST) -> list[ast.stmt]:
    """Import statements, also inside functions, but not for types alone (`if TYPE_CHECKING:`)."""
    found: list[ast.stmt] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            found += [n for child in node.orelse for n in imports_of(child)]
        else:
            found += imports_of(node)
    return found


def import_graph(root: Path) -> dict[str, set[str]]:
    """module -> modules of `verl` that it imports, early or late; doors for other people's code look anywhere."""
    paths = {layers.module_name(path, root): path for path in (root / "verl").rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        if layers.covers(layers.SHIMS, module):
            graph[module] = set()
            continue
        package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
        needed: set[str] = set()
        for node in imports_of(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                needed |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*base, *([node.module] if node.module else [])])
                names = [f"{source}.{alias.name}" for alias in node.names]
                needed |= {name if name in paths else source for name in names}
        graph[module] = (needed & paths.keys()) - {module}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Each cycle that a depth-first walk closes."""
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for needed in sorted(graph[module]):
                walk(needed, [*path, module])
            done.add(module)

    for module in sorted(graph):
        walk(module, [])
    return found


def test_no_modules_import_each_other():
    assert [" -> ".join(cycle) for cycle in cycles(import_graph(ROOT))] == []


def test_a_cycle_inside_a_package_is_found(tmp_path: Path):
    package = tmp_path / "verl"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from verl import b\n")
    (package / "b.py").write_text("def later():\n    from verl.c import x\n")
    (package / "c.py").write_text("if TYPE_CHECKING:\n    import verl.b\nimport verl.a\n")
    assert cycles(import_graph(tmp_path)) == [["verl.a", "verl.b", "verl.c", "verl.a"]]
