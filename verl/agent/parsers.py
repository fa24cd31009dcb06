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
        return json.loads(text)
    except ValueError:
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
    except (ValueError, KeyError, AttributeError, TypeError):
        name = re.search(r'"name"\s*:\s*"([^"]*)"', text)
        return FunctionCall(name.group(1) if name else "", text)


def _outside(pattern: "re.Pattern[str]", text: str, read: Callable[[str], list[FunctionCall]]) -> Any:
    calls = [call for match in pattern.finditer(text) for call in read(match.group(1))]
    return pattern.sub("", text).strip(), calls


@TOOL_PARSERS.register("hermes")
class HermesParser(TextParser):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen2.5, Qwen3)."""

    pattern = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)

    def find(self, text: str, types: dict[str, dict[str, str]]) -> tuple[str, list[FunctionCall]]:
        return _outside(self.pattern, text, lambda inner: [_json_call(inner)])


class FunctionTagParser(TextParser):
    """`<function=name><parameter=key>value</parameter></function>` inside an outer tag."""

    outer: "re.Pattern[str]"
    function = re.compile(r"<function=([^>\s]+)\s*>(.*?)(?:</function>|$)", re.DOTALL)
    parameter = re.compile(r"<parameter=([^>\s]+)\s*>(.*?)</parameter>", re.DOTALL)

    def find(self, text: str, types: dict[str, dict[str, str]]) -> tuple[str, list[FunctionCall]]:
        def read(inner: str) -> list[FunctionCall]:
            return [
                _call(name, {k: _unframed(v) for k, v in self.parameter.findall(body)}, types)
                for name, body in self.function.findall(inner)
            ]

        return _outside(self.outer, text, read)


def _unframed(value: str) -> str:
    """A value without the one newline that the format puts before and after it."""
    return value.removeprefix("\n").removesuffix("\n")


@TOOL_PARSERS.register("qwen3_coder")
class Qwen3CoderParser(FunctionTagParser):
    """Function tags inside `<tool_call>` (Qwen3-Coder, Qwen3.5)."""

    outer = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@TOOL_PARSERS.register("seed")
class SeedParser(FunctionTagParser):
    """Function tags inside `<seed:tool_call>` (Seed-OSS)."""

    outer = re.compile(r"<seed:tool_call>\s*(.*?)\s*</seed:tool_call>", re.DOTALL)


class InvokeParser(TextParser):
    """`<invoke name="…"><parameter name="…">value</parameter></invoke>` inside an outer tag."""

    outer: "re.Pattern[str]"
    mark = ""  # before every tag name

    def find(self, text: str, types: dict[str, dict[str, str]]) -> tuple[str, list[FunctionCall]]:
        mark = self.mark
        invoke = re.compile(rf'<{mark}invoke name="?([^">]+)"?\s*>(.*?)</{mark}invoke>', re.DOTALL)
        parameter = re.compile(
            rf'<{mark}parameter name="?([^">]+)"?(?:\s+string="(true|false)")?\s*>(.*?)</{mark}parameter>', re.DOTALL
        )

        def read(inner: str) -> list[FunctionCall]:
            calls = []
            for name, body in invoke.findall(inner):
                kinds = dict(types.get(name, {}))
                values = {}
                for key, is_string, value in parameter.findall(body):
                    values[key] = _unframed(value)
                    if is_string:
                        kinds[key] = "string" if is_string == "true" else "object"
                calls.append(_call(name, values, {name: kinds}))
            return calls

        return _outside(self.outer, text, read)


@TOOL_PARSERS.register("minimax")
class MiniMaxParser(InvokeParser):
    """Invokes inside `<minimax:tool_call>` (MiniMax-M2)."""

    outer = re.compile(r"<minimax:tool_call>\s*(.*?)\s*</minimax:tool_call>", re.DOTALL)


@TOOL_PARSERS.register("deepseek_v4")
class DeepSeekV4Parser(InvokeParser):
    """Invokes marked DSML, which say themselves whether a value is text (DeepSeek-V3.2 and V4)."""

    mark = "\uff5cDSML\uff5c"  # between two full-width bars
    outer = re.compile(rf"<{mark}(?:tool|function)_calls>\s*(.*?)\s*</{mark}(?:tool|function)_calls>", re.DOTALL)


@TOOL_PARSERS.register("glm")
class GLMParser(TextParser):
    """`<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>` (GLM-4.5 and later)."""

    outer = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
    argument = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

    def find(self, text: str, types: dict[str, dict[str, str]]) -> tuple[str, list[FunctionCall]]:
        def read(inner: str) -> list[FunctionCall]:
            name = inner.split("<arg_key>", 1)[0].strip()
            return [_call(name, {k.strip(): _unframed(v) for k, v in self.argument.findall(inner)}, types)]

        return _outside(self.outer, text, read)


@TOOL_PARSERS.register("kimi")
class KimiParser(TextParser):
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` in a section (Kimi-K2)."""

    section = re.compile(r"<\|tool_calls_section_begin\|>(.*?)(?:<\|tool_calls_section_end\|>|$)", re.DOTALL)
    call = re.compile(
        r"<\|tool_call_begin\|>\s*(.*?)\s*<\|tool_call_argument_begin\|>\s*(.*?)\s*<\|tool_call_end\|>", re.DOTALL
    )

    def find(self, text: str, types: dict[str, dict[str, str]]) -> tuple[str, list[FunctionCall]]:
        def read(inner: str) -> list[FunctionCall]:
            return [
                FunctionCall(head.removeprefix("functions.").split(":")[0], arguments, head)
                for head, arguments in self.call.findall(inner)
            ]

        return _outside(self.section, text, read)


@TOOL_PARSERS.register("gpt-oss")
class GPTOSSParser(TextParser):
    """`<|channel|>commentary to=functions.name … <|message|>{…}<|call|>` (the harmony format of GPT-OSS)."""

    call = re.compile(
        r"(?:<\|start\|>assistant)?(?:\s*to=functions\.(?P<early>[\w.-]+))?<\|channel\|>commentary"
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

    outer = re.compile(r"<\|tool_call>\s*call:([\w.-]+)\s*(\{.*?\})\s*<tool_call\|>", re.DOTALL)
    quoted = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
    key = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")

    def find(self, text: str, types: dict[str, dict[str, str]]) -> tuple[str, list[FunctionCall]]:
        calls = [FunctionCall(name, self._json(body)) for name, body in self.outer.findall(text)]
        return self.outer.sub("", text).strip(), calls

    def _json(self, body: str) -> str:
        """The body as JSON: texts are taken out first, so that nothing inside them is mistaken for syntax."""
        texts: list[str] = []

        def take(match: "re.Match[str]") -> str:
            texts.append(json.dumps(match.group(1), ensure_ascii=False))
            return f"\x00{len(texts) - 1}\x00"

        keyed = self.key.sub(r'\1"\2":', self.quoted.sub(take, body))
        return re.sub(r"\x00(\d+)\x00", lambda match: texts[int(match.group(1))], keyed)
