"""Errors about modules that the configuration names."""

import pytest

from verl.agent.loop import AGENT_LOOPS
from verl.agent.tools import load_tools
from verl.utils.errors import ConfigError
from verl.utils.external_code import check_user_object, import_external, load_object


@pytest.mark.parametrize("name", ["no_such_module", "no_such_package.losses"])
def test_a_missing_external_lib_is_one_sentence_that_says_where_modules_are_found(name):
    with pytest.raises(
        ConfigError, match=rf"external_lib={name}: there is no module 'no_such_\w+'; .*PYTHONPATH"
    ) as raised:
        import_external(name)
    assert "Traceback" not in str(raised.value) and "\n" not in str(raised.value)


def test_a_missing_part_of_a_package_is_named_in_full():
    with pytest.raises(ConfigError, match=r"there is no module 'json\.nothing'"):
        load_object("pkg://json.nothing", "any", "reward.custom_reward_function")


def test_a_module_that_itself_imports_a_missing_one_shows_the_line(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"importing half_installed failed:\n(.|\n)*import not_there"):
        import_external("half_installed")


BINDS = [
    "def f(): ...", "async def f(): ...", "class f: ...", "f = len", "f: object = len", "import f", "import f.g",
    "import json as f", "from json import loads as f", "a, (f, *b) = 1, (2, 3)", "if (f := len): ...",
    "try:\n    from fast import f\nexcept ImportError:\n    def f(): ...", "for f in (1, 2): ...",
    "with open(__file__) as f: ...", "def make():\n    global f\n    f = len\nmake()",
    "while True:\n    f = 1\n    break", "match 3:\n    case f: ...",
]  # fmt: skip
MAY_BIND = [
    "from os.path import *", "globals()['f'] = len", "import sys\nsetattr(sys.modules[__name__], 'f', len)",
    "exec('f = len')", "vars()['f'] = 1", "def __getattr__(name): return len",
]  # fmt: skip
LACKS = ["", "def g():\n    f = 1", "class C:\n    def f(self): ...", "g = lambda f: f", "x.f = 1", "f2 = 1"]


@pytest.mark.parametrize("text", BINDS + MAY_BIND)
def test_a_file_that_defines_the_name_or_may_do_so_is_accepted_unrun(tmp_path, text):
    (tmp_path / "r.py").write_text(f"raise SystemExit\n{text}\n")
    check_user_object(str(tmp_path / "r.py"), "f", "reward.custom_reward_function")


@pytest.mark.parametrize("text", LACKS)
def test_a_file_that_cannot_define_the_name_is_refused_in_the_words_of_loading_it(tmp_path, text):
    (tmp_path / "r.py").write_text(f"class x: ...\n{text}\n")
    said = []
    for look in (check_user_object, load_object):
        with pytest.raises(ConfigError) as raised:
            look(f"file://{tmp_path}/r.py", "f", "reward.custom_reward_function")
        said.append(str(raised.value))
    assert said[0] == said[1] and "reward.custom_reward_function.name='f' is not defined in file://" in said[0]


def test_modules_and_nothing_are_not_looked_at():
    check_user_object(None, "f", "k")
    check_user_object("pkg://no.such.module", "f", "k")


TOOL_FILE = """
from verl.experimental.agent_loop import AgentLoopBase, register
from verl.tools.function_tool import function_tool

@register("loop_of_%s")
class Mine(AgentLoopBase):
    async def run(self, sampling_params, **kwargs): ...

@function_tool
def look(word: str) -> str:
    \"\"\"Look.

    Args:
        word: what for
    \"\"\"
    return word
"""


@pytest.mark.parametrize("first", ["external_lib", "function_tool_path"])
@pytest.mark.parametrize("as_file", [False, True], ids=["module", "file"])
def test_one_file_may_be_external_lib_and_function_tool_path(tmp_path, monkeypatch, first, as_file):
    name = f"both_{first}_{as_file}".lower()
    (file := tmp_path / f"{name}.py").write_text(TOOL_FILE % name)
    monkeypatch.syspath_prepend(tmp_path)
    steps = {
        "external_lib": lambda: import_external(str(file) if as_file else name),
        "function_tool_path": lambda: load_tools(None, str(file)),
    }
    steps.pop(first)()
    [second] = steps.values()
    second()
    assert list(load_tools(None, str(file))) == ["look"] and f"loop_of_{name}" in AGENT_LOOPS
    assert list(load_tools(None, f"pkg://{name}")) == ["look"]
