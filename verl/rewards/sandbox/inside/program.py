"""Runs one untrusted program in this process, which ends with it. Nothing here is trusted by anybody outside."""

import atexit
import builtins
import contextlib
import importlib
import json
import os
import resource
import sys
import threading
import traceback
import types
from typing import Any

# Loaded once before the forks; in a fallback, where no file can be opened, these and what they import are all there is.
MODULES = """abc array ast asyncio base64 binascii bisect calendar cmath collections concurrent.futures contextlib copy
ctypes dataclasses datetime decimal enum fractions functools gc hashlib heapq inspect io itertools json locale math
mmap numbers operator os pprint queue random re secrets statistics string struct sys textwrap threading time traceback
types typing unicodedata uuid warnings zlib"""
# What function tests find defined, as the sites do from which they come.
PRELUDE = """import sys, math, random, re, string, itertools, functools, collections, heapq, bisect, operator, copy
from typing import *
from collections import *
from functools import *
from itertools import *
from heapq import *
from bisect import *
from math import inf, gcd, sqrt, ceil, floor, comb
"""
MAIN = "main.py"


def preload(packages: dict[str, str]) -> None:
    """Import what programs use often, and packages from the folders that hold them."""
    for name in MODULES.split():
        importlib.import_module(name)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as the module site does
    for name, folder in packages.items():
        sys.path.append(folder)
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def address_space_bytes() -> int:
    """Address space of this process now; a program gets its own on top."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def read_request(descriptor: int) -> dict:
    """The JSON object in a file of memory."""
    with open(descriptor, "rb", closefd=False) as file:
        return json.loads(file.read())


def run(request: dict) -> None:
    """Run {source} as a program, or {source, call} as a function whose value goes to stdout as JSON; never returns."""
    code = 1
    try:
        is_call = "call" in request
        if is_call:
            values = os.dup(1)
            os.dup2(2, 1)  # what it prints is no value
        _renew_streams()
        module = types.ModuleType("solution" if is_call else "__main__")
        module.__dict__["__file__"] = MAIN
        sys.modules[module.__name__] = module
        _run_source(request["source"], module, request.get("call"), values if is_call else -1)
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:
        code = 1
        _print_error(error)
    _end(code)


def _renew_streams() -> None:
    for name, number, mode, errors in (
        ("stdin", 0, "r", "surrogateescape"), ("stdout", 1, "w", "strict"), ("stderr", 2, "w", "backslashreplace"),
    ):  # fmt: skip
        stream = os.fdopen(number, mode, encoding="utf-8", errors=errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run_source(source: str, module: types.ModuleType, call: dict | None, values: int) -> None:
    names = module.__dict__
    if call is not None:
        exec(PRELUDE, names)
    exec(compile(source, MAIN, "exec"), names)
    if call is None:
        return
    if "expression" in call:
        value = eval(compile(call["expression"], "call.py", "eval"), names)
    else:
        owner = names.get("Solution")
        found = names.get(call["function"]) if owner is None else getattr(owner(), call["function"])
        if found is None:
            raise NameError(f"the program defines no {call['function']!r}")
        value = found(*call["arguments"])
    with open(values, "wb") as file:
        file.write(json.dumps(plain(value)).encode())


def plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON: tuples are lists, dicts {"dict": [[key, value], ...]}, sets {"set": [...]}; the rest has a type.

    ValueError for what is nested deeper than 100.
    """
    if depth > 100:
        raise ValueError("the value is nested deeper than 100")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, dict):
        return {"dict": [[plain(key, depth + 1), plain(item, depth + 1)] for key, item in value.items()]}
    if isinstance(value, set | frozenset):
        return {"set": [plain(item, depth + 1) for item in value]}
    if isinstance(value, list | tuple) or type(value).__name__ in ("deque", "range"):
        return [plain(item, depth + 1) for item in value]
    if type(value).__module__ == "numpy":
        return plain(value.tolist(), depth + 1)
    return {"type": type(value).__name__}


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 255
    print(end.code, file=sys.stderr)
    return 1


def _print_error(error: BaseException) -> None:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
        sys.stderr.write(text)
        sys.stderr.flush()
    except BaseException:  # its __str__ is the program's own
        os._exit(1)


def _end(code: int) -> None:
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads, as the interpreter does
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        code = code or 1
    os._exit(code)
