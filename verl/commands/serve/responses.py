"""POST /v1/responses of the OpenAI protocol, as a chat: nothing is stored, so each request brings its conversation."""

import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from verl.commands.serve.answers import Job, finish_reason
from verl.commands.serve.request_body import CHOICE, FLAG, LIST, NUMBER, OBJECT, TEXT, Kind, RequestError, whole
from verl.workers.rollout.base import Completion

_INPUT = Kind(
    "a text, or a list of messages, function_call and function_call_output items",
    lambda v: bool(v) and isinstance(v, str | list),
)
_CHOICE = Kind(
    '"auto", "none", "required" or {"type": "function", "name": NAME}',
    lambda v: isinstance(v, str | dict) and CHOICE.accepts(_choice(v)),
)
_FIELDS = {
    "model": TEXT, "input": _INPUT, "instructions": TEXT, "max_output_tokens": whole(1, 2**31), "stream": FLAG,
    "temperature": NUMBER, "top_p": NUMBER, "tools": LIST, "tool_choice": _CHOICE, "parallel_tool_calls": FLAG,
    "text": OBJECT, "metadata": OBJECT, "store": FLAG, "user": TEXT, "safety_identifier": TEXT,
    "prompt_cache_key": TEXT, "stream_options": OBJECT,  # the last six have no effect
}  # fmt: skip
_NEUTRAL: dict[str, Any] = {"background": False, "include": [], "truncation": "disabled", "service_tier": "auto"}
_NEUTRAL |= {"top_logprobs": 0, "reasoning": {}}
_PASSED_ON = ("model", "temperature", "top_p", "stream", "tool_choice", "parallel_tool_calls", "user", "metadata")
_TEXT_PARTS = ("input_text", "output_text", "text")


def read_response_request(data: bytes) -> dict[str, Any]:
    """The fields that are not null; RequestError names a field that is wrong or not supported."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    for name, value in body.items():
        kind = _FIELDS.get(name)
        if kind is None and (name not in _NEUTRAL or value != _NEUTRAL[name]):
            raise RequestError(f"{name:.80} is not supported here; leave it out (found {value!r:.80})", name[:80])
        if kind is not None and not kind.accepts(value):
            raise RequestError(f"{name} must be {kind.says}, found {value!r:.80}", name)
    if "input" not in body:
        raise RequestError(f"input is missing; it must be {_INPUT.says}", "input")
    return body


def as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat request that asks for the same."""
    chat = {name: body[name] for name in _PASSED_ON if name in body}
    if "max_output_tokens" in body:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    items = [{"role": "user", "content": body["input"]}] if isinstance(body["input"], str) else body["input"]
    given = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    chat["messages"] = given + [_message(item) for item in items]
    if "tool_choice" in chat:
        chat["tool_choice"] = _choice(chat["tool_choice"])
    if body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in body["tools"]]
    form = body.get("text", {}).get("format") or {"type": "text"}
    if not isinstance(form, dict):
        raise RequestError(f"text.format must be an object, found {form!r:.80}", "text")
    if form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {name: v for name, v in form.items() if name != "type"}}
    chat["response_format"] = form
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _message(item: Any) -> dict[str, Any]:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": str(item.get("call_id")), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output" and isinstance(item.get("output"), str):
        return {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": item["output"]}
    content = item.get("content") if kind == "message" else None
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") in _TEXT_PARTS for p in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise RequestError(
            f"input: an item is a message {{role, content}} of text, a function_call or a function_call_output with a "
            f"text, found {item!r:.120}",
            "input",
        )
    role = item.get("role")
    return {"role": "system" if role == "developer" else role, "content": content}


def _choice(choice: Any) -> Any:
    """`tool_choice` in the form of a chat request."""
    named = isinstance(choice, dict) and choice.keys() == {"type", "name"}
    return {"type": choice["type"], "function": {"name": choice["name"]}} if named else choice


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise RequestError(f"tools: only functions can be called here, found {tool!r:.80}", "tools")
    return {"type": "function", "function": {n: v for n, v in tool.items() if n not in ("type", "strict")}}


class ResponseWriter:
    """Writes one answer as a response object, whole or as events."""

    def __init__(self, body: dict[str, Any], job: Job):
        self.job = job
        self.id, self.message_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        sampling = job.requests[0].sampling
        self.base = {
            "id": self.id, "object": "response", "created_at": int(time.time()), "model": job.model, "error": None,
            "instructions": body.get("instructions"), "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata", {}), "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "temperature": sampling.temperature, "top_p": sampling.top_p, "tools": body.get("tools", []),
            "tool_choice": body.get("tool_choice", "auto"), "previous_response_id": None, "store": False,
            "truncation": "disabled", "text": body.get("text", {"format": {"type": "text"}}),
        }  # fmt: skip
        self.num_events = 0

    async def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The response that is not streamed; there is one completion."""
        [completion] = completions
        reply = await self.job.reply(completions)
        message = reply["choices"][0]["message"]
        calls = message.get("tool_calls", [])
        return self._response(message["content"] or "", calls, finish_reason(completion, calls), reply["usage"])

    def _response(
        self, text: str, calls: list[dict[str, Any]], reason: str | None, usage: dict[str, int] | None
    ) -> dict[str, Any]:
        status = "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"
        output = [] if reason is None or (calls and not text) else [self._message(text, status)]
        response = {**self.base, "status": status, "output": output + [_call_item(call) for call in calls]}
        response["incomplete_details"] = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response["usage"] = None if usage is None else {
            "input_tokens": usage["prompt_tokens"], "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }  # fmt: skip
        return response

    def _message(self, text: str, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [_text_part(text)]
        return {"id": self.message_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self.num_events, **fields}
        self.num_events += 1
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()

    def event_of_error(self, error: Exception) -> bytes:
        return self.event("error", code=None, message=str(error), param=None)

    async def events(self, chunks: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[bytes]:
        """The events of a response whose chat chunks are `chunks`."""
        async with contextlib.aclosing(chunks), contextlib.aclosing(self._events(chunks)) as events:
            async for event in events:
                yield event

    async def _events(self, chunks: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[bytes]:
        text, reason, usage = "", None, None
        calls: list[dict[str, Any]] = []
        place = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        async for chunk in chunks:
            if not self.num_events:
                for kind in ("response.created", "response.in_progress"):
                    yield self.event(kind, response=self._response("", [], None, None))
            usage = chunk.get("usage", usage)
            for choice in chunk["choices"]:
                delta, reason = choice["delta"], choice["finish_reason"] or reason
                calls += [{n: v for n, v in call.items() if n != "index"} for call in delta.get("tool_calls", [])]
                piece = delta.get("content") or ""
                if not text and (piece or (reason and not calls)):
                    item = self._message("", "in_progress")
                    yield self.event("response.output_item.added", output_index=0, item=item)
                    yield self.event("response.content_part.added", **place, part=_text_part(""))
                if piece:
                    text += piece
                    yield self.event("response.output_text.delta", **place, delta=piece, logprobs=[])
        response = self._response(text, calls, reason, usage)
        for index, item in enumerate(response["output"]):
            for event in self._last_events(index, item, place):
                yield event
        yield self.event(f"response.{response['status']}", response=response)

    def _last_events(self, index: int, item: dict[str, Any], place: dict[str, Any]) -> list[bytes]:
        if item["type"] == "message":
            text = item["content"][0]["text"]
            events = [self.event("response.output_text.done", **place, text=text, logprobs=[])]
            events.append(self.event("response.content_part.done", **place, part=_text_part(text)))
        else:
            where = {"item_id": item["id"], "output_index": index}
            begun = {**item, "arguments": "", "status": "in_progress"}
            events = [self.event("response.output_item.added", output_index=index, item=begun)]
            events.append(self.event("response.function_call_arguments.delta", **where, delta=item["arguments"]))
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self.event("response.function_call_arguments.done", **where, **done))
        return [*events, self.event("response.output_item.done", output_index=index, item=item)]


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: dict[str, Any]) -> dict[str, Any]:
    identity = {"id": f"fc_{call['id']}", "type": "function_call", "status": "completed", "call_id": call["id"]}
    return {**identity, **call["function"]}
