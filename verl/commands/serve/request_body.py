"""Parses the body of an OpenAI request: supported fields with their types, and refused fields."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from verl.agent.tool_parsers import ToolParser
from verl.agent.tools import OpenAIFunctionToolSchema
from verl.utils.errors import ConfigError
from verl.workers.rollout.base import JSON_FORMATS
from verl.workers.rollout.request_limits import MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS

MAX_ANSWERS = 1024  # answers to one request
MAX_BIASES = 1024  # tokens in the logit_bias of one request
MAX_STOPS, MAX_STOP_LENGTH = 64, 4096  # stop strings of one request, characters of one
_INT32 = 2**31


class RequestError(Exception):
    """A request that cannot be answered; the message goes back to the client with `status`."""

    def __init__(self, message: str, field: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.field, self.status, self.code = field, status, code


class Kind(NamedTuple):
    """The values that a field may hold, and their description in an error."""

    says: str
    accepts: Callable[[Any], bool]


def whole(low: int, high: int) -> Kind:
    return Kind(f"a whole number of at most {high} (and at least {low})", lambda v: type(v) is int and low <= v <= high)


def _is_text_list(value: Any) -> bool:
    values = [value] if isinstance(value, str) else value
    return isinstance(values, list) and all(isinstance(v, str) and 0 < len(v) <= MAX_STOP_LENGTH for v in values)


def _is_bias(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MAX_BIASES
        and all(token.isascii() and token.isdecimal() and len(token) <= 9 for token in value)
        and len({int(token) for token in value}) == len(value)
        and all(NUMBER.accepts(bias) and abs(bias) <= MAX_LOGIT_BIAS for bias in value.values())
    )


def _is_choice(value: Any) -> bool:
    if not isinstance(value, dict):
        return value in ("auto", "none", "required")
    function = value.get("function")
    return value.get("type") == "function" and isinstance(function, dict) and isinstance(function.get("name"), str)


FLAG = Kind("true or false", lambda v: isinstance(v, bool))
TEXT = Kind("a text", lambda v: isinstance(v, str))
OBJECT = Kind("an object", lambda v: isinstance(v, dict))
NUMBER = Kind("a number", lambda v: type(v) in (int, float) and abs(v) < 1e300 and math.isfinite(v))
TOKEN_IDS = Kind(
    "a list of token ids, at most 1024",
    lambda v: isinstance(v, list) and len(v) <= 1024 and all(type(i) is int and 0 <= i < _INT32 for i in v),
)
STOP = Kind(
    f"a text or a list of texts (1 to {MAX_STOP_LENGTH} characters, at most {MAX_STOPS} texts)",
    lambda v: _is_text_list(v) and (isinstance(v, str) or len(v) <= MAX_STOPS),
)
LIST = Kind("a list", lambda v: isinstance(v, list))
SHARE = Kind("a number from 0 to 1", lambda v: NUMBER.accepts(v) and 0 <= v <= 1)
BIAS = Kind(
    f'an object such as {{"1234": -5}} of at most {MAX_BIASES} token ids, each with a number from {-MAX_LOGIT_BIAS} to '
    f"{MAX_LOGIT_BIAS}",
    _is_bias,
)
CHOICE = Kind('"auto", "none", "required" or {"type": "function", "function": {"name": NAME}}', _is_choice)
FIELDS = {
    "model": TEXT, "n": whole(1, MAX_ANSWERS), "max_tokens": whole(1, _INT32), "min_tokens": whole(0, _INT32),
    "max_completion_tokens": whole(1, _INT32), "temperature": NUMBER, "top_p": NUMBER, "top_k": whole(-1, _INT32),
    "seed": whole(-(2**63), 2**64), "stop": STOP, "stop_token_ids": TOKEN_IDS, "ignore_eos": FLAG, "stream": FLAG,
    "stream_options": OBJECT, "return_token_ids": FLAG, "frequency_penalty": NUMBER, "presence_penalty": NUMBER,
    "repetition_penalty": NUMBER, "response_format": OBJECT, "min_p": SHARE, "logit_bias": BIAS,
    "user": TEXT, "metadata": OBJECT, "store": FLAG,  # these have no effect
}  # fmt: skip
CHAT_FIELDS = {
    "messages": LIST, "logprobs": FLAG, "top_logprobs": whole(0, MAX_TOP_LOGPROBS), "chat_template_kwargs": OBJECT,
    "tools": LIST, "tool_choice": CHOICE, "parallel_tool_calls": FLAG,
}  # fmt: skip
PROMPT = Kind("a text, token ids, or a list of either", lambda v: isinstance(v, str | list))
TEXT_FIELDS = {"prompt": PROMPT, "logprobs": whole(0, MAX_TOP_LOGPROBS)}
NEUTRAL: dict[str, Any] = {  # unsupported fields with the value that has no effect; other values are refused
    "functions": [], "function_call": "none", "echo": False, "suffix": "", "best_of": 1,
    "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "top_logprobs": 0, "modalities": ["text"],
    "service_tier": "auto",
}  # fmt: skip


def read_body(data: bytes, chat: bool) -> dict[str, Any]:
    """The fields of a request that are not null; RequestError names a field that is wrong or not supported."""
    try:
        body = json.loads(data)
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    kinds = FIELDS | (CHAT_FIELDS if chat else TEXT_FIELDS)
    for name, value in body.items():
        kind = kinds.get(name)
        if kind is None and (name not in NEUTRAL or value != NEUTRAL[name]):
            raise RequestError(f"{name:.80} is not supported here; leave it out (found {value!r:.80})", name[:80])
        if kind is not None and not kind.accepts(value):
            raise RequestError(f"{name} must be {kind.says}, found {value!r:.80}", name)
    required = "messages" if chat else "prompt"
    if required not in body:
        raise RequestError(f"{required} is missing; it must be {kinds[required].says}", required)
    options = body.get("stream_options", {})
    for name in options:
        if name not in ("include_usage", "include_obfuscation") or not isinstance(options[name], bool | None):
            raise RequestError(f"stream_options may hold include_usage (true or false), found {options!r:.80}", name)
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
    return body


def read_tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas of the tools that the answer may call; none with `tool_choice` "none"."""
    tools = body.get("tools", [])
    for number, tool in enumerate(tools):
        try:
            schema = OpenAIFunctionToolSchema.model_validate(tool)
        except ConfigError as error:
            raise RequestError(f"tools: {error}", "tools") from error
        if not isinstance(schema.function.name, str):
            raise RequestError(f"tools: the name of tool {number} must be a text", "tools")
    return tools if body.get("tool_choice") != "none" else []


def read_opening(body: dict[str, Any], tools: Sequence[dict[str, Any]], parser: ToolParser) -> str:
    """The text with which the answer must begin, as `tool_choice` forces a call; empty where none is forced."""
    choice = body.get("tool_choice", "auto")
    if choice in ("auto", "none"):
        return ""
    names = [tool["function"]["name"] for tool in tools]
    name = names[0] if len(names) == 1 else None
    if choice != "required":
        name = choice["function"]["name"]
    if not names or (name is not None and name not in names):
        known = ", ".join(names) or "none"
        raise RequestError(
            f"tool_choice {json.dumps(choice):.80} needs one of the tools, which are: {known}", "tool_choice"
        )
    if body.get("response_format", {}).get("type", "text") != "text":
        raise RequestError("tool_choice forces a call, which response_format forbids; leave one out", "tool_choice")
    opening = parser.opening(name)
    if opening is None:
        raise RequestError(
            f'tool_choice must be "auto" or "none" here: {type(parser).__name__} does not say how a call begins',
            "tool_choice",
        )
    return opening


def read_response_format(body: dict[str, Any], supported: Any) -> str | None:
    """JSON text of `response_format`; None for plain text. `supported`: the types that the engine can produce."""
    asked = body.get("response_format", {"type": "text"})
    kind = asked.get("type")
    if kind == "text":
        return None
    if kind not in JSON_FORMATS or kind not in supported:
        known = ", ".join(["text", *supported])
        raise RequestError(
            f"response_format: this server's engine has {known}, found {asked!r:.80}; leave it out and ask for the "
            "form in the prompt, or serve with an engine that has it (rollout.name=sglang or tgi)",
            "response_format",
        )
    schema = asked.get("json_schema")
    if kind == "json_schema" and not (isinstance(schema, dict) and isinstance(schema.get("schema"), dict)):
        raise RequestError(
            f"response_format.json_schema must be {{name, schema: {{…}}}}, found {schema!r:.80}", "response_format"
        )
    return json.dumps(asked)


def stop_strings(body: dict[str, Any], default: tuple[str, ...]) -> tuple[str, ...]:
    """The stop strings of a request."""
    stop = body.get("stop", default)
    return (stop,) if isinstance(stop, str) else tuple(stop)
