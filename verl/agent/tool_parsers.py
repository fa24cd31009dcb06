"""Parsers of tool calls in the text of an answer, one per format of a model family (`multi_turn.format`).

No text is evaluated as code: arguments are JSON, or plain text that is converted to the type in the tool's schema. An
unreadable call is passed on unchanged, so that the tool's error reply goes to the policy. Thinking holds no calls.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl.agent.tool_schemas import json_types, schema_dict
from verl.data.chat import THINKING_ENDS, THINKING_STARTS, Message, begun_answer
from verl.utils.registry import Registry


@dataclass(frozen=True)
class FunctionCall:
    """A call as the policy wrote it: `arguments` is JSON text, valid or not."""

    name: str
    arguments: str
    tool_call_id: str | None = None


ParameterTypes = dict[str, dict[str, tuple[str, ...]]]
TOOL_PARSERS: Registry[type["ToolParser"]] = Registry("tool parser")

_ANALYSIS = "<|channel|>analysis<|message|>"  # thinking of GPT-OSS; its end mark ends other messages, too
_OPENED = re.compile(rf"(?:{THINKING_STARTS}|{re.escape(_ANALYSIS)})\s*$")


def split_thinking(text: str, start_mark: str | None = None, end_mark: str | None = None) -> tuple[str, str, str]:
    """(thinking, what may hold calls, thinking without an end): an answer in order. In a call such marks are text."""
    begin = max((match.end() for match in re.finditer(THINKING_ENDS, text)), default=0)
    in_call, calls = False, [re.escape(mark) for mark in (start_mark, end_mark) if mark]
    for match in re.compile("|".join([*calls, THINKING_STARTS])).finditer(text, begin):
        if match.group() in (start_mark, end_mark):
            in_call = match.group() == start_mark
        elif not in_call:
            return text[:begin], text[begin : match.start()], text[match.start() :]
    return text[:begin], text[begin:], ""


class ToolParser(ABC):
    """Finds tool calls in sampled tokens. Register your own parser with `@ToolParser.register(name)`."""

    start_mark: str | None = None  # the text with which calls begin, where it is always the same
    end_mark: str | None = None  # the text with which they end

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    @staticmethod
    def register(name: str) -> Callable[[type["ToolParser"]], type["ToolParser"]]:
        """Decorator that registers a parser for a value of `multi_turn.format`."""
        return TOOL_PARSERS.register(name)

    @staticmethod
    def get_tool_parser(name: str, tokenizer: Any) -> "ToolParser":
        """The parser of `multi_turn.format`."""
        return TOOL_PARSERS.get(name)(tokenizer)

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a turn with a call, besides the end-of-sequence token."""
        return []

    def opening(self, name: str | None) -> str | None:
        """The text with which a call of tool `name` (None: of any) begins; None if it is not known.

        It ends where the policy goes on as it would have, so that an answer can be made to begin with it.
        """
        return None

    def begun_ids(self, messages: Sequence[Message], prompt_ids: Sequence[int]) -> list[int]:
        """Tokens of what a prompt begins its answer with: a last message of the assistant, or the start of thinking."""
        match = _OPENED.search(self.tokenizer.decode(list(prompt_ids[-16:])))  # enough to hold the mark
        begun = begun_answer(messages) or (match.group() if match else "")
        return list(self.tokenizer(begun, add_special_tokens=False)["input_ids"]) if begun else []

    def spoken_ids(self, answer_ids: Sequence[int]) -> list[int]:
        """The tokens to look for calls in: those of an answer, without its thinking."""
        text = self.tokenizer.decode(list(answer_ids))
        spoken = split_thinking(text, self.start_mark, self.end_mark)[1]
        return list(answer_ids if spoken == text else self.tokenizer(spoken, add_special_tokens=False)["input_ids"])

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """Text around the calls, and the calls in order. `tools`: schemas, for formats without argument types."""


class TextParser(ToolParser):
    """A parser of decoded text."""

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(list(responses_ids))
        thought, spoken, unfinished = split_thinking(text, self.start_mark, self.end_mark)
        outside, calls = self.parse_text(spoken, parameter_types(tools))
        space = spoken[: len(spoken) - len(spoken.lstrip())] if thought else ""
        return f"{thought}{space}{outside}{unfinished}".rstrip() if thought or unfinished else outside, calls

    def spoken_ids(self, answer_ids: Sequence[int]) -> list[int]:
        return list(answer_ids)  # `extract_tool_calls` takes the thinking out

    @abstractmethod
    def parse_text(self, text: str, types: ParameterTypes) -> tuple[str, list[FunctionCall]]:
        """`text` without the calls, and the calls; `types`: those of each parameter by tool."""


def parameter_types(tools: Sequence[Any] | None) -> ParameterTypes:
    """JSON types by tool and parameter, from schemas (objects or dictionaries)."""
    types: ParameterTypes = {}
    for tool in tools or ():
        function = schema_dict(tool)["function"]
        parameters = function.get("parameters") or {}
        properties = (parameters.get("properties") or {}).items()
        types[function["name"]] = {name: json_types(value, parameters) or ("string",) for name, value in properties}
    return types


def _parse_argument(text: str, kinds: tuple[str, ...]) -> Any:
    """A plain-text argument converted to the first of its JSON types that is not null; the text where that fails."""
    if "null" in kinds and text.strip().lower() == "null":
        return None
    if next((kind for kind in kinds if kind != "null"), "") == "string":
        return text
    try:
        value = json.loads(text)
        json.dumps(value)  # a value nested too deeply to be serialised stays text
        return value
    except (ValueError, RecursionError):
        return {"true": True, "false": False}.get(text.strip().lower(), text)


def _make_call(name: str, values: dict[str, str], types: ParameterTypes) -> FunctionCall:
    kinds = types.get(name, {})
    arguments = {key: _parse_argument(value, kinds.get(key, ("string",))) for key, value in values.items()}
    return FunctionCall(name, json.dumps(arguments, ensure_ascii=False))


def _parse_json_call(text: str) -> FunctionCall:
    """The call in `{"name": …, "arguments": {…}}`; invalid JSON becomes the arguments, unchanged."""
    try:
        raw = json.loads(text)
        arguments = raw.get("arguments", raw.get("parameters", {}))
        return FunctionCall(str(raw["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        name = re.search(r'"name"\s*:\s*"([^"]*)"', text)
        return FunctionCall(name.group(1) if name else "", text)


def extract_between(text: str, start_mark: str, end_mark: str, allow_unclosed: bool = False) -> tuple[str, list[str]]:
    """`text` without its marked pieces, and these pieces; `allow_unclosed`: the last piece needs no end mark.

    Takes linear time. A regular expression would not: a policy that repeats one token would stall the run.
    """
    outside, inside, position = [], [], 0
    while (begin := text.find(start_mark, position)) >= 0:
        end = text.find(end_mark, begin + len(start_mark))
        if end < 0 and not allow_unclosed:
            break
        outside.append(text[position:begin])
        inside.append(text[begin + len(start_mark) : end if end >= 0 else len(text)])
        position = end + len(end_mark) if end >= 0 else len(text)
    return "".join([*outside, text[position:]]).strip(), inside


def _named_blocks(text: str, start_mark: str, end_mark: str, allow_unclosed: bool = False) -> list[tuple[str, str]]:
    """(name, body) of every `start_mark name>body end_mark`."""
    pieces = extract_between(text, start_mark, end_mark, allow_unclosed)[1]
    return [(name.strip(), body) for name, mark, body in (piece.partition(">") for piece in pieces) if mark]


class TagParser(TextParser):
    """A parser of calls between a start mark and an end mark."""

    start_mark: str
    end_mark: str

    def parse_text(self, text: str, types: ParameterTypes) -> tuple[str, list[FunctionCall]]:
        outside, pieces = extract_between(text, self.start_mark, self.end_mark)
        return outside, [call for piece in pieces for call in self.parse_block(piece.strip(), types)]

    @abstractmethod
    def parse_block(self, piece: str, types: ParameterTypes) -> list[FunctionCall]:
        """The calls between one pair of marks."""


@TOOL_PARSERS.register("hermes")
class HermesParser(TagParser):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen2.5, Qwen3)."""

    start_mark, end_mark = "<tool_call>", "</tool_call>"

    def opening(self, name: str | None) -> str:
        return self.start_mark + '\n{"name": "' + (f'{name}", "arguments":' if name else "")

    def parse_block(self, piece: str, types: ParameterTypes) -> list[FunctionCall]:
        return [_parse_json_call(piece)]


@TOOL_PARSERS.register("qwen3_coder")
class Qwen3CoderParser(TagParser):
    """`<function=name><parameter=key>value</parameter></function>` in `<tool_call>` (Qwen3-Coder, Qwen3.5)."""

    start_mark, end_mark = "<tool_call>", "</tool_call>"

    def opening(self, name: str | None) -> str:
        return f"{self.start_mark}\n<function=" + (f"{name}>\n" if name else "")

    def parse_block(self, piece: str, types: ParameterTypes) -> list[FunctionCall]:
        return [
            _make_call(
                name,
                {k: _strip_frame_newlines(v) for k, v in _named_blocks(body, "<parameter=", "</parameter>")},
                types,
            )
            for name, body in _named_blocks(piece, "<function=", "</function>", allow_unclosed=True)
        ]


def _strip_frame_newlines(value: str) -> str:
    """`value` without the newline that the format puts before and after it."""
    return value.removeprefix("\n").removesuffix("\n")


@TOOL_PARSERS.register("seed")
class SeedParser(Qwen3CoderParser):
    """The Qwen3-Coder format in `<seed:tool_call>` (Seed-OSS)."""

    start_mark, end_mark = "<seed:tool_call>", "</seed:tool_call>"


@TOOL_PARSERS.register("minimax")
class MiniMaxParser(TagParser):
    """`<invoke name="…"><parameter name="…">value</parameter></invoke>` in `<minimax:tool_call>` (MiniMax-M2)."""

    start_mark, end_mark = "<minimax:tool_call>", "</minimax:tool_call>"
    tag_prefix = ""  # before the name of every tag
    parameter_pattern = re.compile(r'"?([^"]+)"?(?:\s+string="(true|false)")?')

    def opening(self, name: str | None) -> str:
        return f'{self.start_mark}\n<{self.tag_prefix}invoke name="' + (f'{name}">\n' if name else "")

    def parse_block(self, piece: str, types: ParameterTypes) -> list[FunctionCall]:
        calls = []
        for head, body in _named_blocks(piece, f"<{self.tag_prefix}invoke name=", f"</{self.tag_prefix}invoke>"):
            name = head.strip('"')
            kinds, values = dict(types.get(name, {})), {}
            for attributes, value in _named_blocks(
                body, f"<{self.tag_prefix}parameter name=", f"</{self.tag_prefix}parameter>"
            ):
                match = self.parameter_pattern.fullmatch(attributes)
                if match is None:
                    continue
                key, is_string = match.groups()
                values[key] = _strip_frame_newlines(value)
                if is_string:
                    kinds[key] = ("string" if is_string == "true" else "object",)
            calls.append(_make_call(name, values, {name: kinds}))
        return calls


@TOOL_PARSERS.register("deepseek_v4")
class DeepSeekV4Parser(MiniMaxParser):
    """The MiniMax format with DSML tags; an attribute says whether a value is text (DeepSeek-V3.2 and V4)."""

    tag_prefix = "\uff5cDSML\uff5c"  # between two full-width bars
    start_mark, end_mark = f"<{tag_prefix}tool_calls>", f"</{tag_prefix}tool_calls>"

    def parse_text(self, text: str, types: ParameterTypes) -> tuple[str, list[FunctionCall]]:
        return super().parse_text(
            text.replace(f"{self.tag_prefix}function_calls>", f"{self.tag_prefix}tool_calls>"), types
        )


@TOOL_PARSERS.register("glm")
class GLMParser(TagParser):
    """`<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>` (GLM-4.5 and later)."""

    start_mark, end_mark = "<tool_call>", "</tool_call>"

    def opening(self, name: str | None) -> str:
        return self.start_mark + (f"{name}\n" if name else "")

    def parse_block(self, piece: str, types: ParameterTypes) -> list[FunctionCall]:
        values = {}
        for argument in extract_between(piece, "<arg_key>", "</arg_value>")[1]:
            key, _, value = argument.partition("</arg_key>")
            values[key.strip()] = _strip_frame_newlines(value.lstrip().removeprefix("<arg_value>"))
        return [_make_call(piece.split("<arg_key>", 1)[0].strip(), values, types)]


@TOOL_PARSERS.register("kimi")
class KimiParser(TextParser):
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` in a section (Kimi-K2)."""

    start_mark, end_mark = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

    def opening(self, name: str | None) -> str:
        rest = f"{name}:0<|tool_call_argument_begin|>" if name else ""
        return f"{self.start_mark}<|tool_call_begin|>functions.{rest}"

    def parse_text(self, text: str, types: ParameterTypes) -> tuple[str, list[FunctionCall]]:
        outside, sections = extract_between(text, self.start_mark, self.end_mark, allow_unclosed=True)
        pieces = [p for s in sections for p in extract_between(s, "<|tool_call_begin|>", "<|tool_call_end|>")[1]]
        calls = []
        for head, mark, arguments in (piece.partition("<|tool_call_argument_begin|>") for piece in pieces):
            if mark:
                head = head.strip()
                calls.append(FunctionCall(head.removeprefix("functions.").split(":")[0], arguments.strip(), head))
        return outside, calls


@TOOL_PARSERS.register("gpt-oss")
class GPTOSSParser(TextParser):
    """`<|channel|>commentary to=functions.name … <|message|>{…}<|call|>` (the harmony format of GPT-OSS)."""

    call_pattern = re.compile(
        re.escape(_ANALYSIS)
        + r".*?(?:<\|end\|>|$)|(?:<\|start\|>assistant)?(?: ?to=functions\.(?P<early>[\w.-]+))?<\|channel\|>commentary"
        r"(?:\s+to=functions\.(?P<late>[\w.-]+))?[^<]*(?:<\|constrain\|>\w+)?<\|message\|>(?P<arguments>.*?)"
        r"(?:<\|call\|>|<\|end\|>|$)",
        re.DOTALL,
    )

    def opening(self, name: str | None) -> str:
        return "<|channel|>commentary to=functions." + (f"{name} <|constrain|>json<|message|>" if name else "")

    @property
    def stop_token_ids(self) -> list[int]:
        call_id = self.tokenizer.convert_tokens_to_ids("<|call|>")
        return [call_id] if isinstance(call_id, int) and call_id != self.tokenizer.unk_token_id else []

    def parse_text(self, text: str, types: ParameterTypes) -> tuple[str, list[FunctionCall]]:
        calls, outside, position = [], [], 0
        for match in self.call_pattern.finditer(text):
            name = match["early"] or match["late"]
            if name:  # a commentary without recipient is a preamble for the user, and an analysis is thinking
                calls.append(FunctionCall(name, match["arguments"]))
                outside.append(text[position : match.start()])
                position = match.end()
        return "".join([*outside, text[position:]]).strip(), calls


@TOOL_PARSERS.register("gemma4")
class Gemma4Parser(TextParser):
    """`<|tool_call>call:name{key:<|"|>text<|"|>,number:3}<tool_call|>` (Gemma 4)."""

    start_mark, end_mark = "<|tool_call>", "<tool_call|>"
    string_pattern = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
    key_pattern = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")

    def opening(self, name: str | None) -> str:
        return f"{self.start_mark}call:" + (f"{name}{{" if name else "")

    def parse_text(self, text: str, types: ParameterTypes) -> tuple[str, list[FunctionCall]]:
        outside, pieces = extract_between(text, self.start_mark, self.end_mark)
        heads = (piece.strip().removeprefix("call:").partition("{") for piece in pieces)
        return outside, [FunctionCall(name.strip(), self._to_json(brace + body)) for name, brace, body in heads]

    def _to_json(self, body: str) -> str:
        """The body as JSON. Placeholders replace strings first, so that no text inside them is parsed as syntax."""
        texts: list[str] = []

        def insert_placeholder(match: "re.Match[str]") -> str:
            texts.append(json.dumps(match.group(1), ensure_ascii=False))
            return f"\x00{len(texts) - 1}\x00"

        keyed = self.key_pattern.sub(r'\1"\2":', self.string_pattern.sub(insert_placeholder, body.replace("\x00", "")))
        return re.sub(r"\x00(\d+)\x00", lambda match: texts[int(match.group(1))], keyed)
