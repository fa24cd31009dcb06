"""The body of a request in the OpenAI protocol: what is read, what is refused, and its values by type."""

import json
from typing import Any

SUPPORTED = {
    "model", "messages", "prompt", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed",
    "stop", "stop_token_ids", "min_tokens", "ignore_eos", "logprobs", "stream", "stream_options", "return_token_ids",
    "chat_template_kwargs", "user", "metadata", "store",  # the last three are for whoever keeps accounts
}  # fmt: skip
NEUTRAL: dict[str, Any] = {  # other parts of the protocol, and the value that asks for nothing; the rest is refused
    "tools": [], "tool_choice": "none", "functions": [], "response_format": {"type": "text"}, "frequency_penalty": 0,
    "presence_penalty": 0, "repetition_penalty": 1, "min_p": 0, "logit_bias": {}, "top_logprobs": 0, "echo": False,
    "suffix": "", "best_of": 1, "parallel_tool_calls": True,
}  # fmt: skip
MAX_ANSWERS = 1024  # answers to one request


class RequestError(Exception):
    """A request that cannot be answered; the message goes back to the client with status 400."""


def read_body(data: bytes, chat: bool) -> dict[str, Any]:
    """What a request asks for; RequestError names the part that cannot be answered."""
    try:
        body = json.loads(data)
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    for name, value in body.items():
        if name not in SUPPORTED and value is not None and value != NEUTRAL.get(name):
            raise RequestError(f"{name} is not supported here; leave it out (found {value!r:.80})")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise RequestError(f"stream_options must be an object, found {body['stream_options']!r}")
    if chat:
        read_flag(body, "logprobs")
    elif body.get("logprobs") not in (None, 0, 1):  # how many other tokens to tell of beside the sampled one
        raise RequestError(f"logprobs must be 0 or 1: only sampled tokens are told of, found {body['logprobs']!r}")
    return body


def read_flag(body: dict[str, Any], name: str, default: bool = False) -> bool:
    """True or false."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise RequestError(f"{name} must be true or false, found {value!r}")
    return default if value is None else value


def read_integer(body: dict[str, Any], name: str, default: int, limit: int = 2**31) -> int:
    """A whole number; `limit` bounds it on both sides."""
    value = body.get(name)
    if value is not None and (type(value) is not int or abs(value) > limit):
        raise RequestError(f"{name} must be a whole number of at most {limit}, found {value!r}")
    return default if value is None else value


def read_token_ids(body: dict[str, Any], name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """A list of token ids."""
    value = body.get(name)
    if value is not None and not (isinstance(value, list) and all(type(i) is int and 0 <= i < 2**31 for i in value)):
        raise RequestError(f"{name} must be a list of token ids, found {value!r}")
    return default if value is None else tuple(value)


def read_number(body: dict[str, Any], name: str, default: float) -> float:
    """Any number."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, found {value!r}")
    return value
