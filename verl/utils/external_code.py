"""Objects from a user's own Python file or module, named in the configuration."""

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.utils.errors import ConfigError
from verl.utils.paths import expand_home
from verl.utils.suggest import did_you_mean

PACKAGE = Path(__file__).resolve().parents[1]


def load_object(path: str, name: str, key: str, name_key: str = "") -> Any:
    """Object `name` of the Python file or module `path`; `key` is the config section named in errors.

    `name_key` is the key of the name, where it is not the section's.

    `path` is a plain file path, `file://path`, or `pkg://dotted.module` (slashes are allowed too). A file runs only
    once per process.
    """
    module = load_module(path, key)
    if not hasattr(module, name):
        raise _not_defined(path, name, name_key or f"{key}.name", vars(module))
    return getattr(module, name)


def _not_defined(path: str, name: str, key: str, names: Iterable[str]) -> ConfigError:
    public = [item for item in names if not item.startswith("_")]
    return ConfigError(f"{key}={name!r} is not defined in {path}; {did_you_mean(name, public)}")


def load_module(path: str, key: str) -> ModuleType:
    """The Python file or module `path`, run once per process."""
    file = user_file(path, key)
    if file is None:
        name = path.removeprefix("pkg://").removesuffix(".py").strip("/").replace("/", ".")
        return _import(name, f"{key}.path={path!r}")
    return _run_file_once(file, path, key)


def user_file(path: str | None, key: str) -> Path | None:
    """The Python file `path`; None for a module or nothing; ConfigError where it is not there. Runs nothing."""
    if path is None or path.startswith("pkg://"):
        return None
    file = expand_home(path.removeprefix("file://"), f"{key}.path").absolute()
    if file.is_fifo():
        raise ConfigError(f"{key}.path: {file} is a pipe or a device, which is never waited for; give a file")
    if not file.is_file():
        siblings = [item.name for item in file.parent.glob("*.py")] if file.parent.is_dir() else []
        hint = did_you_mean(file.name, siblings) if siblings else "give the path of a Python file, or pkg://module"
        raise ConfigError(f"{key}.path={path!r}: there is no file {file}; {hint}")
    return file


def check_user_object(path: str | None, name: str, key: str, name_key: str = "") -> None:
    """ConfigError where the Python file `path` is not there, cannot be parsed, or does not define `name`. Runs nothing.

    Silent about a module, and about a file that may make names while it runs.
    """
    file = user_file(path, key)
    if file is None or path is None:
        return
    with _errors_explained(f"{key}.path={path!r}: running {file} failed"):
        tree = ast.parse(file.read_bytes(), str(file))
    names = _names_of_module(tree)
    if names is not None and name not in names:
        raise _not_defined(path, name, name_key or f"{key}.name", names)


_MAKES_NAMES = {
    "exec",
    "eval",
    "globals",
    "locals",
    "vars",
    "setattr",
    "modules",
    "__dict__",
    "__getattr__",
    "import_module",
}


def _names_of_module(tree: ast.Module) -> set[str] | None:
    """Names that the code of a module binds; None where it may bind others while it runs."""
    names: set[str] = set()
    for node in ast.walk(tree):
        used = [getattr(node, field, None) for field in ("id", "attr", "name")]
        if not _MAKES_NAMES.isdisjoint(word for word in used if isinstance(word, str)):
            return None
        names.update(node.names if isinstance(node, ast.Global) else ())
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue  # what it binds is its own
        if isinstance(node, ast.alias):
            if node.name == "*":
                return None
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        nodes.extend(ast.iter_child_nodes(node))
    return names


def import_external(names: str | Sequence[str] | None) -> None:
    """Import the modules or files of `model.external_lib`, which may register classes."""
    for name in [names] if isinstance(names, str) else names or ():
        if "/" in name or name.endswith(".py"):
            load_module(name, "model.external_lib")
        else:
            _import(name, f"model.external_lib={names}")


def _import(name: str, setting: str) -> ModuleType:
    with _errors_explained(f"{setting}: importing {name} failed"):
        try:
            found = None if name in sys.modules else importlib.util.find_spec(name)
            if found and found.origin and (run_before := sys.modules.get(_name_of(Path(found.origin)))):
                sys.modules[name] = run_before
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there, and imports one that is not
            missing = error.name
    raise ConfigError(
        f"{setting}: there is no module {missing!r}; install it, or put the folder that holds it into PYTHONPATH"
    )


def _name_of(file: Path) -> str:
    """The name of the file's module. The path is part of it, so that files of the same name stay apart."""
    return f"verl_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"


def _run_file_once(file: Path, path: str, key: str) -> ModuleType:
    module_name = _name_of(file)
    for name, module in list(sys.modules.items()):  # a name may stand for None
        if name == module_name or (name != "__main__" and getattr(module, "__file__", None) == str(file)):
            return module
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}.path={path!r}: {file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with _errors_explained(f"{key}.path={path!r}: running {file} failed"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


@contextlib.contextmanager
def _errors_explained(problem: str) -> Iterator[None]:
    """ConfigError for whatever user code raises at import, also SystemExit; Ctrl-C stays itself."""
    pressed = False

    def on_interrupt(*_: object) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    replaced = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if replaced:
        signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    except BaseException as error:
        if pressed:
            raise
        raise ConfigError(f"{problem}:\n{user_traceback(error)}") from error
    finally:
        if replaced and signal.getsignal(signal.SIGINT) is on_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def user_traceback(error: BaseException, frames: int = 4) -> str:
    """The last frames of a traceback, without those of verl that lead to it, and the error itself, indented.

    A SyntaxError says its place itself.
    """
    stack = traceback.extract_tb(None if isinstance(error, SyntaxError) else error.__traceback__)
    user = next((i for i, frame in enumerate(stack) if not Path(frame.filename).is_relative_to(PACKAGE)), 0)
    stack = traceback.StackSummary.from_list(stack[user:][-frames:])
    lines = [*traceback.format_list(stack), *traceback.format_exception_only(error)]
    return "".join("  " + line + "\n" for line in "".join(lines).rstrip().split("\n")).rstrip()
