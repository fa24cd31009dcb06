"""Tool calls in the text of an answer, in the formats that model families are trained on (`multi_turn.format`).

Nothing is evaluated: arguments are JSON, or text that stays text unless the tool's schema says otherwise. A call that
cannot be read is handed on as it is, so that the policy is told what is wrong with it.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl.utils.registry import Registry


@dataclass(frozen=True)
class FunctionCall:
    """A call as written: `arguments` is JSON text, valid or not."""

    name: str
    arguments: str
    tool_call_id: str | None = None


TOOL_PARSERS: Registry[type["ToolParser"]] = Registry("tool parser")


class ToolParser(ABC):
    """Finds tool calls in sampled tokens. Parsers of your own: `@ToolParser.register(name)`."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    @staticmethod
    def register(name: str) -> Callable[[type["ToolParser"]], type["ToolParser"]]:
        """File a parser under a value of `multi_turn.format`."""
        return TOOL_PARSERS.register(name)

    @staticmethod
    def get_tool_parser(name: str, tokenizer: Any) -> "ToolParser":
        """The parser of `multi_turn.format`."""
        return TOOL_PARSERS.get(name)(tokenizer)

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a turn with a call, where the end-of-sequence token does not."""
        return []

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """Text around the calls, and the calls in order. `tools`: schemas, for formats that do not type arguments."""


class TextParser(ToolParser):
    """A parser of decoded text."""

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(list(responses_ids))
        return self.find(text, parameter_types(tools))

    @abstractmethod
    def find(self, text: str, types: dict[str, dict[str, str]]) -> tuple[str, list[FunctionCall]]:
        """`text` without the calls, and the calls; `types`: JSON type of each parameter by tool."""


def parameter_types(tools: Sequence[Any] | None) -> dict[str, dict[str, str]]:
    """JSON types by tool and parameter, from schemas (objects or dictionaries)."""
    found: dict[str, dict[str, str]] = {}
    for tool in tools or ():
        function = (tool if isinstance(tool, dict) else tool.model_dump())["function"]
        properties = (function.get("parameters") or {}).get("properties") or {}
        found[function["name"]] = {name: str(value.get("type", "string")) for name, value in properties.items()}
    return found


def _typed(text: str, kind: str) -> Any:
    """An argument written as plain text, in the type its schema wants; text where it cannot be."""
    if kind == "string":
        return text
    try:
        value = json.loads(text)
        json.dumps(value)  # what is nested too deeply to be written again stays text
        return value
    except (ValueError, RecursionError):
        return {"true": True, "false": False}.get(text.strip().lower(), text)


def _call(name: str, values: dict[str, str], types: dict[str, dict[str, str]]) -> FunctionCall:
    kinds = types.get(name, {})
    arguments = {key: _typed(value, kinds.get(key, "string")) for key, value in values.items()}
    return FunctionCall(name, json.dumps(arguments, ensure_ascii=False))


def _json_call(text: str) -> FunctionCall:
    """`{"name": …, "arguments": {…}}`; what is not valid JSON becomes a call that says so."""
    try:
        raw = json.loads(text)
        arguments = raw.get("arguments", raw.get("parameters", {}))
        return FunctionCall(str(raw["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        name = re.search(r'"name"\s*:\s*"([^"]*)"', text)
        return FunctionCall(name.group(1) if name else "", text)


def split(text: str, opening: str, closing: str, last_open: bool = False) -> tuple[str, list[str]]:
    """`text` without what lies between the marks, and that; `last_open`: the last piece needs no closing mark.

    In time proportional to the text, which a pattern is not: a policy that repeats one token would stop the run.
    """
    outside, inside, place = [], [], 0
    while (begin := text.find(opening, place)) >= 0:
        end = text.find(closing, begin + len(opening))
        if end < 0 and not last_open:
            break
        outside.append(text[place:begin])
        inside.append(text[begin + len(opening) : end if end >= 0 else len(text)])
        place = end + len(closing) if end >= 0 else len(text)
    return "".join([*outside, text[place:]]).strip(), inside


def _named(text: str, opening: str, closing: str, last_open: bool = False) -> list[tuple[str, str]]:
    """(name, body) of every `opening name>body closing`."""
    pieces = split(text, opening, closing, last_open)[1]
    return [(name.strip(), body) for name, mark, body in (piece.partition(">") for piece in pieces) if mark]


class TagParser(TextParser):
    """A parser of calls between two marks."""

    opening: str
    closing: str

    def find(self, text: str, types: dict[str, dict[str, str]]) -> tuple[str, list[FunctionCall]]:
        rest, pieces = split(text, self.opening, self.closing)
        return rest, [call for piece in pieces for call in self.read(piece.strip(), types)]

    @abstractmethod
    def read(self, piece: str, types: dict[str, dict[str, str]]) -> list[FunctionCall]:
        """The calls between one pair of marks."""


@TOOL_PARSERS.register("hermes")
class HermesParser(TagParser):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen2.5, Qwen3)."""

    opening, closing = "<tool_call>", "</tool_call>"

    def read(self, piece: str, types: dict[str, dict[str, str]]) -> list[FunctionCall]:
        return [_json_call(piece)]


@TOOL_PARSERS.register("qwen3_coder")
class Qwen3CoderParser(TagParser):
    """`<function=name><parameter=key>value</parameter></function>` in `<tool_call>` (Qwen3-Coder, Qwen3.5)."""

    opening, closing = "<tool_call>", "</tool_call>"

    def read(self, piece: str, types: dict[str, dict[str, str]]) -> list[FunctionCall]:
        return [
            _call(name, {k: _unframed(v) for k, v in _named(body, "<parameter=", "</parameter>")}, types)
            for name, body in _named(piece, "<function=", "</function>", last_open=True)
        ]


def _unframed(value: str) -> str:
    """A value without the one newline that the format puts before and after it."""
    return value.removeprefix("\n").removesuffix("\n")


@TOOL_PARSERS.register("seed")
class SeedParser(Qwen3CoderParser):
    """The same in `<seed:tool_call>` (Seed-OSS)."""

    opening, closing = "<seed:tool_call>", "</seed:tool_call>"


@TOOL_PARSERS.register("minimax")
class MiniMaxParser(TagParser):
    """`<invoke name="…"><parameter name="…">value</parameter></invoke>` in `<minimax:tool_call>` (MiniMax-M2)."""

    opening, closing = "<minimax:tool_call>", "</minimax:tool_call>"
    mark = ""  # before the name of every tag
    parameter = re.compile(r'"?([^"]+)"?(?:\s+string="(true|false)")?')

    def read(self, piece: str, types: dict[str, dict[str, str]]) -> list[FunctionCall]:
        calls = []
        for head, body in _named(piece, f"<{self.mark}invoke name=", f"</{self.mark}invoke>"):
            name = head.strip('"')
            kinds, values = dict(types.get(name, {})), {}
            for attributes, value in _named(body, f"<{self.mark}parameter name=", f"</{self.mark}parameter>"):
                found = self.parameter.fullmatch(attributes)
                if found is None:
                    continue
                key, is_string = found.groups()
                values[key] = _unframed(value)
                if is_string:
                    kinds[key] = "string" if is_string == "true" else "object"
            calls.append(_call(name, values, {name: kinds}))
        return calls


@TOOL_PARSERS.register("deepseek_v4")
class DeepSeekV4Parser(MiniMaxParser):
    """Invokes marked DSML, which say themselves whether a value is text (DeepSeek-V3.2 and V4)."""

    mark = "\uff5cDSML\uff5c"  # between two full-width bars
    opening, closing = f"<{mark}tool_calls>", f"</{mark}tool_calls>"

    def find(self, text: str, types: dict[str, dict[str, str]]) -> tuple[str, list[FunctionCall]]:
        return super().find(text.replace(f"{self.mark}function_calls>", f"{self.mark}tool_calls>"), types)


@TOOL_PARSERS.register("glm")
class GLMParser(TagParser):
    """`<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>` (GLM-4.5 and later)."""

    opening, closing = "<tool_call>", "</tool_call>"

    def read(self, piece: str, types: dict[str, dict[str, str]]) -> list[FunctionCall]:
        values = {}
        for argument in split(piece, "<arg_key>", "</arg_value>")[1]:
            key, _, value = argument.partition("</arg_key>")
            values[key.strip()] = _unframed(value.lstrip().removeprefix("<arg_value>"))
        return [_call(piece.split("<arg_key>", 1)[0].strip(), values, types)]


@TOOL_PARSERS.register("kimi")
class KimiParser(TextParser):
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` in a section (Kimi-K2)."""

    def find(self, text: str, types: dict[str, dict[str, str]]) -> tuple[str, list[FunctionCall]]:
        rest, sections = split(text, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", last_open=True)
        pieces = [p for s in sections for p in split(s, "<|tool_call_begin|>", "<|tool_call_end|>")[1]]
        calls = []
        for head, mark, arguments in (piece.partition("<|tool_call_argument_begin|>") for piece in pieces):
            if mark:
                head = head.strip()
                calls.append(FunctionCall(head.removeprefix("functions.").split(":")[0], arguments.strip(), head))
        return rest, calls


@TOOL_PARSERS.register("gpt-oss")
class GPTOSSParser(TextParser):
    """`<|channel|>commentary to=functions.name … <|message|>{…}<|call|>` (the harmony format of GPT-OSS)."""

    call = re.compile(
        r"(?:<\|start\|>assistant)?(?: ?to=functions\.(?P<early>[\w.-]+))?<\|channel\|>commentary"
        r"(?:\s+to=functions\.(?P<late>[\w.-]+))?[^<]*(?:<\|constrain\|>\w+)?<\|message\|>(?P<arguments>.*?)"
        r"(?:<\|call\|>|<\|end\|>|$)",
        re.DOTALL,
    )

    @property
    def stop_token_ids(self) -> list[int]:
        found = self.tokenizer.convert_tokens_to_ids("<|call|>")
        return [found] if isinstance(found, int) and found != self.tokenizer.unk_token_id else []

    def find(self, text: str, types: dict[str, dict[str, str]]) -> tuple[str, list[FunctionCall]]:
        calls, rest, done = [], [], 0
        for match in self.call.finditer(text):
            name = match["early"] or match["late"]
            if name:  # a commentary without recipient is a preamble for the user
                calls.append(FunctionCall(name, match["arguments"]))
                rest.append(text[done : match.start()])
                done = match.end()
        return "".join([*rest, text[done:]]).strip(), calls


@TOOL_PARSERS.register("gemma4")
class Gemma4Parser(TextParser):
    """`<|tool_call>call:name{key:<|"|>text<|"|>,number:3}<tool_call|>` (Gemma 4)."""

    quoted = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
    key = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")

    def find(self, text: str, types: dict[str, dict[str, str]]) -> tuple[str, list[FunctionCall]]:
        rest, pieces = split(text, "<|tool_call>", "<tool_call|>")
        heads = (piece.strip().removeprefix("call:").partition("{") for piece in pieces)
        return rest, [FunctionCall(name.strip(), self._json(brace + body)) for name, brace, body in heads]

    def _json(self, body: str) -> str:
        """The body as JSON: texts are taken out first, so that nothing inside them is mistaken for syntax."""
        texts: list[str] = []

        def take(match: "re.Match[str]") -> str:
            texts.append(json.dumps(match.group(1), ensure_ascii=False))
            return f"\x00{len(texts) - 1}\x00"

        keyed = self.key.sub(r'\1"\2":', self.quoted.sub(take, body))
        return re.sub(r"\x00(\d+)\x00", lambda match: texts[int(match.group(1))], keyed)
