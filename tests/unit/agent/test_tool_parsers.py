"""Every tool-call format: text around calls, several calls, types by schema, broken calls."""

import asyncio
import json
import time

import pytest

from verl.agent.tool_parsers import TOOL_PARSERS, FunctionCall, ToolParser, parameter_types
from verl.agent.tool_schemas import json_types
from verl.agent.tools import FunctionTool
from verl.utils.errors import ConfigError

BAR = "\uff5c"
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}},
    },
}
ONE = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 3, "note": "x<y"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=note>\nx<y\n</parameter>\n"
    "</function>\n</tool_call>",
    "seed": "<seed:tool_call><function=add><parameter=a>3</parameter><parameter=note>x<y</parameter></function>"
    "</seed:tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">3</parameter>\n'
    '<parameter name="note">x<y</parameter>\n</invoke>\n</minimax:tool_call>',
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n<arg_key>note</arg_key>\n"
    "<arg_value>x<y</arg_value>\n</tool_call>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 3, "note": "x<y"}<|tool_call_end|><|tool_calls_section_end|>',
    "gpt-oss": "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    '{"a": 3, "note": "x<y"}<|call|>',
    "gemma4": '<|tool_call>call:add{a:3,note:<|"|>x<y<|"|>}<tool_call|>',
    "deepseek_v4": f'<{BAR}DSML{BAR}tool_calls>\n<{BAR}DSML{BAR}invoke name="add">\n'
    f'<{BAR}DSML{BAR}parameter name="a" string="false">3</{BAR}DSML{BAR}parameter>\n'
    f'<{BAR}DSML{BAR}parameter name="note" string="true">x<y</{BAR}DSML{BAR}parameter>\n'
    f"</{BAR}DSML{BAR}invoke>\n</{BAR}DSML{BAR}tool_calls>",
}


def find(name: str, text: str):
    return TOOL_PARSERS.get(name)(None).parse_text(text, parameter_types([SCHEMA]))


def test_the_nine_formats_are_there_and_others_are_refused():
    assert set(TOOL_PARSERS.names()) == set(ONE)
    with pytest.raises(ConfigError, match=r"unknown tool parser 'hermess'.*hermes"):
        TOOL_PARSERS.get("hermess")


@pytest.mark.parametrize("name", ONE)
def test_calls_are_found_with_typed_arguments_and_the_text_around_them_is_kept(name: str):
    text, calls = find(name, f"I will add.{ONE[name]}")
    assert text == "I will add."
    [call] = calls
    assert call.name == "add" and json.loads(call.arguments) == {"a": 3, "note": "x<y"}


@pytest.mark.parametrize("name", ONE)
def test_two_calls_are_found_in_order(name: str):
    other = ONE[name].replace("add", "sub")
    _, calls = find(name, ONE[name] + "\n" + other)
    assert [call.name for call in calls] == ["add", "sub"]


@pytest.mark.parametrize("name", ONE)
def test_text_without_calls_is_left_alone(name: str):
    assert find(name, "3 < 4 and nothing else") == ("3 < 4 and nothing else", [])


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("tool", ["add", None])
def test_a_call_that_goes_on_after_the_opening_is_the_whole_call(name: str, tool: str | None):
    """The opening of a forced call is what the call begins with, up to spaces."""
    opening = TOOL_PARSERS.get(name)(None).opening(tool)
    whole = ONE[name].removeprefix("<|start|>assistant")  # the generation prompt has it
    cuts = (cut for cut in range(len(whole)) if "".join(whole[:cut].split()) == "".join(opening.split()))
    assert ("add" in opening) == (tool is not None)
    [call] = find(name, opening + whole[next(cuts) :])[1]
    assert call.name == "add" and json.loads(call.arguments) == {"a": 3, "note": "x<y"}


def test_a_broken_json_call_is_handed_on_so_that_the_policy_is_told():
    [call] = find("hermes", '<tool_call>{"name": "add", "arguments": {"a": 3}</tool_call>')[1]
    assert call.name == "add" and call.arguments.startswith('{"name"')
    [call] = find("gemma4", "<|tool_call>call:add{a:3<tool_call|>")[1]
    assert call == FunctionCall("add", '{"a":3')


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("filler", [" ", "\n", "["])
def test_degenerate_text_takes_time_in_proportion_to_its_length(name: str, filler: str):
    opening = ONE[name].split("add")[0]
    begin = time.perf_counter()
    for text in (opening * 20_000, opening + filler * 100_000, (opening + filler) * 20_000):
        find(name, text)
    assert time.perf_counter() - begin < 30  # 0.1 seconds; patterns took minutes


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_arguments_nested_beyond_reading_are_handed_on(name: str):
    [call] = find(name, ONE[name].replace("3", "[" * 100_000))[1]
    assert call.name == "add"


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax"])
def test_spaces_and_line_breaks_of_a_text_argument_are_kept(name: str):
    [call] = find(name, ONE[name].replace("x<y", "\n  x<y  \n"))[1]
    assert json.loads(call.arguments)["note"].strip("\n") == "  x<y  "


def test_kimi_keeps_the_id_of_a_call():
    assert find("kimi", ONE["kimi"])[1][0].tool_call_id == "functions.add:0"


def test_gpt_oss_preambles_are_no_calls():
    text = "<|channel|>commentary<|message|>Let me see.<|end|>" + ONE["gpt-oss"]
    assert [call.name for call in find("gpt-oss", text)[1]] == ["add"]


def test_gemma_text_may_look_like_syntax():
    [call] = find("gemma4", '<|tool_call>call:add{note:<|"|>a: {b}, c<|"|>,a:[1,2]}<tool_call|>')[1]
    assert json.loads(call.arguments) == {"note": "a: {b}, c", "a": [1, 2]}


class Words:
    def decode(self, ids):
        return "go NOW"


def test_a_parser_of_ones_own_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TOOL_PARSERS, "_items", dict(TOOL_PARSERS._items))

    @ToolParser.register("shouting")
    class Shouting(ToolParser):
        async def extract_tool_calls(self, responses_ids, tools=None):
            text = self.tokenizer.decode(responses_ids)
            return text, [FunctionCall(word.lower(), "{}") for word in text.split() if word.isupper()]

    parser = ToolParser.get_tool_parser("shouting", Words())
    assert asyncio.run(parser.extract_tool_calls([0])) == ("go NOW", [FunctionCall("now", "{}")])
    with pytest.raises(TypeError, match="abstract"):
        ToolParser(None)


def integer_or(*others):
    return {"anyOf": [{"type": "integer"}, *others]}


NULL = {"type": "null"}
DEFINITIONS = {
    "Size": {"type": "integer"},
    "a/b~c": {"type": "array", "items": {"type": "string"}},
    "Maybe": {"oneOf": [{"$ref": "#/$defs/Size"}, NULL]},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "number"}]},
    "Endless": {"$ref": "#/$defs/Endless"},
}
TYPED = [
    ({"type": "integer"}, "7", 7),
    (integer_or(NULL), "7", 7),
    (integer_or(NULL), "null", None),
    ({"anyOf": [NULL, {"type": "integer"}]}, "7", 7),
    ({"oneOf": [{"type": "array", "items": {"type": "string"}}, NULL]}, '["x"]', ["x"]),
    ({"anyOf": [{"type": "object"}, NULL]}, '{"k": [1]}', {"k": [1]}),
    ({"anyOf": [{"type": "boolean"}, NULL]}, "True", True),
    ({"anyOf": [{"type": "string"}, NULL]}, "7", "7"),
    ({"anyOf": [{"type": "string"}, NULL]}, "null", None),
    ({"type": "string"}, "null", "null"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "7", "7"),
    (integer_or({"type": "string"}), "seven", "seven"),
    ({"type": ["integer", "null"]}, "7", 7),
    ({"type": ["null", "string"]}, "7", "7"),
    ({"type": "string", "nullable": True}, "null", None),
    ({"$ref": "#/$defs/Size"}, "7", 7),
    ({"$ref": "#/$defs/Maybe"}, "null", None),
    ({"$ref": "#/$defs/a~1b~0c"}, "[]", []),
    ({"allOf": [{"$ref": "#/$defs/Size"}], "default": 3}, "7", 7),
    ({"$ref": "#/$defs/Loop"}, "0.5", 0.5),
    ({"$ref": "#/$defs/Endless"}, "7", "7"),
    ({"$ref": "#/$defs/Missing"}, "7", "7"),
    ({"$ref": "https://elsewhere/schema"}, "7", "7"),
    ({}, "7", "7"),
]


@pytest.mark.parametrize(("schema", "text", "value"), TYPED)
@pytest.mark.parametrize("name", ["qwen3_coder", "seed", "minimax", "glm"])
def test_arguments_have_the_first_type_of_the_schema_that_is_not_null(name: str, schema, text: str, value):
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": DEFINITIONS}
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    written = ONE[name].replace("3", text)
    [call] = TOOL_PARSERS.get(name)(None).parse_text(written, parameter_types([tool]))[1]
    found = json.loads(call.arguments)["a"]
    assert found == value and type(found) is type(value)


def test_types_of_a_tools_signature_reach_its_arguments():
    def search(words: list[str] | None, limit: int | None = None) -> str:
        """Search.

        Args:
            words: what for
            limit: how many
        """
        return ""

    tool = FunctionTool(search, None, None, None)
    assert parameter_types([tool.tool_schema]) == {"search": {"words": ("array", "null"), "limit": ("integer", "null")}}


def test_references_that_branch_again_and_again_take_no_time():
    """Two references to the next definition at each of 60 levels are 2**60 paths."""
    levels = {f"L{i}": {"anyOf": [{"$ref": f"#/$defs/L{i + 1}"}] * 2} for i in range(60)}
    root = {"$defs": {**levels, "L60": {"type": "integer"}}}
    assert json_types({"$ref": "#/$defs/L0"}, root) == ("integer",)


def test_a_gemma_call_may_hold_the_mark_that_stands_for_a_text():
    [call] = find("gemma4", '<|tool_call>call:add{note:<|"|>x<|"|>,a:\x0010\x00}<tool_call|>')[1]
    assert json.loads(call.arguments) == {"note": "x", "a": 10}
