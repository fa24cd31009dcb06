"""Parses the body of an OpenAI request: supported fields with their types, and refused fields."""

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from verl.agent.tools import OpenAIFunctionToolSchema
from verl.utils.errors import ConfigError
from verl.workers.rollout.base import JSON_FORMATS, MAX_TOP_LOGPROBS

MAX_ANSWERS = 1024  # answers to one request
MAX_STOPS, MAX_STOP_LENGTH = 64, 4096  # stop strings of one request, characters of one
_INT32 = 2**31


class RequestError(Exception):
    """A request that cannot be answered; the message goes back to the client with `status`."""

    def __init__(self, message: str, field: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.field, self.status, self.code = field, status, code


class Kind(NamedTuple):
    """What a field may hold, and how an error says so."""

    says: str
    accepts: Callable[[Any], bool]


def whole(low: int, high: int) -> Kind:
    return Kind(f"a whole number of at most {high} (and at least {low})", lambda v: type(v) is int and low <= v <= high)


def _is_text_list(value: Any) -> bool:
    values = [value] if isinstance(value, str) else value
    return isinstance(values, list) and all(isinstance(v, str) and 0 < len(v) <= MAX_STOP_LENGTH for v in values)


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
FIELDS = {
    "model": TEXT, "n": whole(1, MAX_ANSWERS), "max_tokens": whole(1, _INT32), "min_tokens": whole(0, _INT32),
    "max_completion_tokens": whole(1, _INT32), "temperature": NUMBER, "top_p": NUMBER, "top_k": whole(-1, _INT32),
    "seed": whole(-(2**63), 2**64), "stop": STOP, "stop_token_ids": TOKEN_IDS, "ignore_eos": FLAG, "stream": FLAG,
    "stream_options": OBJECT, "return_token_ids": FLAG, "frequency_penalty": NUMBER, "presence_penalty": NUMBER,
    "repetition_penalty": NUMBER, "response_format": OBJECT,
    "user": TEXT, "metadata": OBJECT, "store": FLAG,  # these have no effect
}  # fmt: skip
CHAT_FIELDS = {
    "messages": LIST, "logprobs": FLAG, "top_logprobs": whole(0, MAX_TOP_LOGPROBS), "chat_template_kwargs": OBJECT,
    "tools": LIST, "tool_choice": Kind('"auto" or "none": calls cannot be forced', lambda v: v in ("auto", "none")),
    "parallel_tool_calls": FLAG,
}  # fmt: skip
PROMPT = Kind("a text, token ids, or a list of either", lambda v: isinstance(v, str | list))
TEXT_FIELDS = {"prompt": PROMPT, "logprobs": whole(0, MAX_TOP_LOGPROBS)}
NEUTRAL: dict[str, Any] = {  # unsupported fields with the value that has no effect; other values are refused
    "functions": [], "function_call": "none", "min_p": 0, "logit_bias": {}, "echo": False, "suffix": "", "best_of": 1,
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
