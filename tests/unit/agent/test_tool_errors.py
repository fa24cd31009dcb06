"""Tools that misbehave and files that are wrong: a reply the policy reads, or an error that says what to repair."""

import asyncio
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from verl.agent.agent_runner import load_agent_loops
from verl.agent.tool_schemas import OpenAIFunctionToolSchema
from verl.agent.tools import BaseTool, ToolResponse, call_tool, load_tools
from verl.utils.errors import ConfigError

FUNCTIONS = '''
import time
from verl.tools.function_tool import function_tool

@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return str(a + b)

@function_tool(timeout=0.05)
def slow(x: int) -> str:
    """Wait.

    Args:
        x: ignored
    """
    time.sleep(300)
    return "done"
'''


class Misbehaving(BaseTool):
    """Does what its configuration says."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema.model_validate({"function": {"name": "bad"}})

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        match self.config.get("does"):
            case "exit":
                raise SystemExit(3)
            case "text":
                return "plain text"
            case "picture":
                return ToolResponse("see", image=[b"x"]), 0.0, {}
            case "own timeout":
                raise TimeoutError("the shop did not answer")
        return ToolResponse("done"), None, None

    async def release(self, instance_id: str, **_: Any) -> None:
        if self.config.get("does") == "release":
            raise ValueError("no such instance")
        if self.config.get("does") == "release hangs":
            await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("well", "done"),
        ("exit", "Error when executing bad: SystemExit: 3"),
        ("text", "Error when executing bad: ValueError: too many values to unpack (expected 3)"),
        ("picture", "Error when executing bad: ValueError: it returned images or videos"),
        ("own timeout", "Error when executing bad: TimeoutError: the shop did not answer"),
        ("release", "Error when executing bad: ValueError: no such instance"),
        ("release hangs", "Error: bad took longer than 0.2 seconds"),
    ],
)
def test_no_tool_ends_the_run(does: str, says: str):
    tools = {"bad": Misbehaving({"does": does, "timeout": 0.2 if does == "release hangs" else 60})}
    assert str(asyncio.run(call_tool(tools, "bad", "{}", {}))[0].text).startswith(says)


def test_arguments_nested_beyond_reading_are_a_reply():
    response, _, _ = asyncio.run(call_tool({"bad": Misbehaving({})}, "bad", "[" * 100_000, {}))
    assert "not valid JSON" in str(response.text)


def test_calls_that_hang_delay_neither_others_nor_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "hanging.py").write_text(FUNCTIONS)
    tools = load_tools(None, str(tmp_path / "hanging.py"))

    async def many() -> list[str]:
        hang = [call_tool(tools, "slow", '{"x": 1}', {}) for _ in range(40)]
        results = await asyncio.gather(*hang, call_tool(tools, "add", '{"a": 1, "b": 2}', {}))
        return [str(response.text) for response, _, _ in results]

    begin = time.perf_counter()
    *hung, added = asyncio.run(many())
    assert added == "3" and set(hung) == {"Error: slow took longer than 0.05 seconds"}
    assert time.perf_counter() - begin < 100  # a call takes 300
    [said] = [record.getMessage() for record in caplog.records]  # once, not 40 times
    assert 'tool slow took longer than its timeout of 0.05 seconds with the arguments {"x": 1}' in said


@dataclass(eq=True)
class Unhashable(Misbehaving):
    """One that compares by its fields, and so has no hash."""

    config: dict[str, Any]

    def __post_init__(self) -> None:
        BaseTool.__init__(self, self.config)


def test_each_tool_says_once_that_it_is_slow_also_without_a_hash(caplog: pytest.LogCaptureFixture):
    two = [Unhashable({"does": "release hangs", "timeout": 0.02}) for _ in range(2)]
    assert two[0].__hash__ is None and two[0].config == two[1].config
    for tool in (*two, *two):
        response, _, _ = asyncio.run(call_tool({"bad": tool}, "bad", "{}", {}))
        assert response.text == "Error: bad took longer than 0.02 seconds"
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tools: [", r"tools.yaml is not YAML"),
        ("- a", r"tools.yaml: expected a list under `tools`, of"),
        ("tools: [a]", r"tools.yaml: expected a list under `tools`, of"),
        ("tools: [{class_name: Search}]", r"class_name='Search' must be a dotted path"),
        ("tools: [{class_name: pathlib.Pat}]", r"name='Pat' is not defined .* did you mean 'Path'"),
        ("tools: [{class_name: pathlib.Path}]", r"pathlib.Path\(config, tool_schema\) failed:\n.*TypeError"),
        (
            "tools: [{class_name: collections.ChainMap}]",
            r"'collections.ChainMap' is not a verl.tools.base_tool.BaseTool",
        ),
        ("tools: [{class_name: verl.tools.base_tool.BaseTool}]", "BaseTool has no tool_schema"),
        (f"tools: [{{class_name: {__name__}.Misbehaving, config: [1]}}]", r"config=\[1\] of .*Misbehaving must be a"),
        (f"tools: [{{class_name: {__name__}.Misbehaving, config: {{timeout: 5s}}}}]", "tool bad: timeout='5s' must be"),
        ("tools: [{class_name: verl.tools.base_tool.BaseTool, tool_schema: x}]", "a tool schema must be .* found 'x'"),
        (
            "tools: [{class_name: verl.tools.base_tool.BaseTool, tool_schema: {function: {name: a, parameters: "
            "{properties: {x: integer}}}}}]",
            "a tool schema must be .*'x': 'integer'",
        ),
    ],
)
def test_a_wrong_tool_file_says_what_is_wrong(tmp_path: Path, text: str, says: str):
    (tmp_path / "tools.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.compile(says, re.DOTALL)):
        load_tools(str(tmp_path / "tools.yaml"), None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- name: [", r"is not YAML"),
        ("name: x", r"expected a list of entries with `name` and `_target_`"),
        ("- {name: x, _target_: Mine}", r"_target_='Mine' must be the dotted path of an agent loop"),
        ("- {name: x, _target_: no_such_module.Mine}", r"there is no module 'no_such_module'"),
        ("- {name: x, _target_: pathlib.Path}", r"_target_='pathlib.Path' must be the dotted path of an agent loop"),
        ("- {name: x, _target_: verl.agent.tool_agent.ToolAgentLoop}\n" * 2, r"two loops are called 'x'"),
    ],
)
def test_a_wrong_file_of_loops_says_what_is_wrong(tmp_path: Path, text: str, says: str):
    (tmp_path / "loops.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_agent_loops(str(tmp_path / "loops.yaml"))


ALIASES = "a: &l0 [x, x]\n" + "".join(f"b{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 9))


@pytest.mark.parametrize("read", [lambda path: load_tools(path, None), load_agent_loops], ids=["tools", "loops"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tools: " + "[" * 1000 + "]" * 1000, "more than 64 levels deep"),
        ("tools: " + "{a: " * 1000 + "1" + "}" * 1000, "more than 64 levels deep"),
        ("tools: &x [*x]", "an alias stands for a list or dictionary that holds it"),
        (ALIASES, "with its aliases written out it has more than 100000 values"),
        ("tools: 2026-99-99", "is not YAML: month must be in"),
    ],
    ids=["lists", "dictionaries", "list of itself", "aliases of aliases", "date"],
)
def test_a_yaml_file_beyond_reading_is_one_sentence(tmp_path: Path, read: Any, text: str, says: str):
    (tmp_path / "deep.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        read(str(tmp_path / "deep.yaml"))
    assert "deep.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_two_files_may_have_a_tool_of_one_name(tmp_path: Path):
    text = "from verl.tools.function_tool import function_tool\n\n\n@function_tool\ndef add(a: int) -> str:\n"
    for name in ("one", "two"):
        body = f'    """Add.\n\n    Args:\n        a: number.\n    """\n    return "{name}"\n'
        (tmp_path / f"{name}.py").write_text(text + body)
    for name in ("one", "two", "one"):
        tools = load_tools(None, str(tmp_path / f"{name}.py"))
        assert tools["add"].function(1) == name
