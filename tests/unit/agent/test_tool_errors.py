"""Tools that misbehave and files that are wrong: a reply the policy reads, or an error that says what to repair."""

import asyncio
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.agent_cases import ScriptedEngine, make_agent_runner, run_conversations, tool_call_text
from verl.agent.agent_runner import load_agent_loops
from verl.agent.tool_schemas import OpenAIFunctionToolSchema
from verl.agent.tools import BaseTool, FunctionTool, ToolResponse, call_tool, load_tools
from verl.data.batch import Batch
from verl.observe.ledger import Ledger
from verl.trainer.ppo.batch_metrics import turn_metrics
from verl.trainer.ppo.sources.saved_groups import trajectories_as_json, trajectories_from_json
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
        ("text", "plain text"),
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
        ("- {name: x, _target_: verl.experimental.agent_loop.ToolAgentLoop}\n" * 2, r"two loops are called 'x'"),
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


class Money:
    def __str__(self) -> str:
        return "3 coins"


REPLIES: list[tuple[Any, tuple[str, float, dict[str, Any]]]] = [
    ("text", ("text", 0.0, {})),
    (ToolResponse("text"), ("text", 0.0, {})),
    (("text", None), ("text", 0.0, {})),
    (("text", 0.5), ("text", 0.5, {})),
    (("text", True), ("text", 1.0, {})),
    (("text", 0.5, None), ("text", 0.5, {})),
    (("text", None, {"hits": 2}), ("text", 0.0, {"hits": 2})),
    ((ToolResponse("text"), None, None), ("text", 0.0, {})),
    (Money(), ("3 coins", 0.0, {})),
    (7, ("7", 0.0, {})),
    (None, ("None", 0.0, {})),
    ({"a": [1, None]}, ("{'a': [1, None]}", 0.0, {})),
]
REFUSED = [(), ("text",), ("text", 1, {}, 4), (1, 2), ({"a": 1}, 0.5), ("text", "good"), ("text", float("nan"))]


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_function_returns_is_a_reply_with_reward_and_metrics(is_async: bool):
    def call(value: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
        async def give_later() -> Any:
            return value

        give = give_later if is_async else lambda: value
        tool = FunctionTool(give, None, {"function": {"name": "give", "parameters": {}}}, None)
        return asyncio.run(call_tool({"give": tool}, "give", "{}", {}))

    for value, (text, reward, metrics) in REPLIES:
        response, *rest = call(value)
        assert (response.text, *rest, response.failure) == (text, reward, metrics, None), value
    for value in REFUSED:
        response, reward, metrics = call(value)
        assert str(response.text).startswith("Error when executing give: ValueError") and not reward, value
        assert response.failure


def test_a_tool_that_raises_is_told_once_counted_and_kept_in_the_ledger(
    tokenizer: Any, tool_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    calls = [
        tool_call_text("fail", x=1),
        tool_call_text("slow", x=1),
        tool_call_text("none"),
        tool_call_text("fail", x=2),
    ]
    runner = make_agent_runner(tokenizer, tool_file)
    failing = run_conversations(runner, ScriptedEngine(tokenizer, [*calls, "<|im_end|>"]), n=2)
    [fine] = run_conversations(runner, ScriptedEngine(tokenizer, [tool_call_text("add", a=1, b=1), "<|im_end|>"]))
    assert {name: value for name, value in turn_metrics([*failing, fine]).items() if "error" in name} == {
        "tool_errors/fail": 4, "tool_errors/slow": 2  # a tool that does not exist is the policy's mistake
    }  # fmt: skip
    assert not any("error" in name for name in turn_metrics([fine])) and "tool_errors" not in fine.told()
    [raised, _] = said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2 and 'tool fail failed with the arguments {"x": 1}' in raised  # the other one is slow
    assert 'raise ValueError("no such row")' in raised and "my_tools.py" in raised
    saved = trajectories_from_json(trajectories_as_json([*failing, fine]), 0, 0)
    errors = [[f"{name}: {why}" for name, why in t.tool_errors] for t in saved or []]
    batch = Batch.pack([replace(t, reward=0.0) for t in [*failing, fine]])
    path = Ledger(tmp_path / "ledger").append(1, batch, ["stop"] * 3, errors)
    why = ["fail: ValueError: no such row", "slow: took longer than 0.05 seconds", "fail: ValueError: no such row"]
    assert pq.read_table(path)["tool_errors"].to_pylist() == [why, why, []]
