"""Answers in the form of the OpenAI protocol, whole or in chunks while their tokens arrive."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.agent.tool_parsers import FunctionCall, ToolParser
from verl.commands.serve.text_stream import TextStream, cut_at_stop
from verl.workers.rollout.base import Alternatives, Completion, GenerationRequest


@dataclass(frozen=True)
class Job:
    """One HTTP request: what it asks for, and how its answers are written."""

    tokenizer: PreTrainedTokenizerBase
    model: str
    chat: bool
    body: dict[str, Any]
    requests: list[GenerationRequest]
    stop: tuple[str, ...]
    tools: list[dict[str, Any]]
    parser: ToolParser
    opening: list[int]  # tokens of a forced call, at the end of the prompt

    def header(self, suffix: str = "") -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        identity = {"id": f"verl-{uuid.uuid4().hex}", "object": kind + suffix}
        return {**identity, "created": int(time.time()), "model": self.model}

    def usage(self, num_generated: int) -> dict[str, int]:
        num_prompt = sum(len(request.prompt_ids) for request in self.requests)
        total = num_prompt + num_generated
        return {"prompt_tokens": num_prompt, "completion_tokens": num_generated, "total_tokens": total}

    async def reply(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [await self._choice(index, completion) for index, completion in enumerate(completions)]
        usage = self.usage(sum(len(c.token_ids) for c in completions))
        return {**self.header(), "choices": choices, "usage": usage}

    async def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        text, calls = await self.read_answer(completion)
        details = self.token_details(completion.token_ids, completion.logprobs, completion.alternatives)
        content: dict[str, Any] = {"text": text}
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
            content = {"message": {**message, "tool_calls": tool_call_objects(calls)} if calls else message}
        return {"index": index, **content, "finish_reason": finish_reason(completion, calls), **details}

    async def read_answer(self, completion: Completion) -> tuple[str, list[FunctionCall]]:
        """The text of an answer, and the tools that it calls."""
        if self.tools:
            ids = completion.token_ids
            if completion.stop_reason == "stop" and ids and ids[-1] in self.tokenizer.all_special_ids:
                ids = ids[:-1]  # the end of the turn; a call's own end mark may stay open
            begun = self.opening or self.parser.begun_ids(self.body["messages"], self.requests[0].prompt_ids)
            spoken = self.parser.spoken_ids([*begun, *ids])
            outside, calls = await self.parser.extract_tool_calls(spoken, self.tools)
            if calls:
                outside = outside.removeprefix(str(self.tokenizer.decode(begun))).strip()
                single = isinstance(self.body.get("tool_choice"), dict) or not self.body.get(
                    "parallel_tool_calls", True
                )
                return outside, calls[:1] if single else calls
        return cut_at_stop(self.decode([*self.opening, *completion.token_ids]), self.stop), []

    def decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def token_details(
        self, token_ids: list[int], logprobs: list[float], alternatives: list[Alternatives] | None
    ) -> dict[str, Any]:
        """Log-probs and token ids of a choice, if the request asks for them."""
        ids = {"token_ids": token_ids} if self.body.get("return_token_ids") else {}
        asked = self.body.get("logprobs")
        if asked is None or asked is False:
            return {"logprobs": None, **ids}
        tokens = [self._token_text(i) for i in token_ids]
        tops = [[(self._token_text(i), value) for i, value in top] for top in alternatives or [[]] * len(tokens)]
        if not self.chat:
            lists: dict[str, Any] = {"tokens": tokens, "token_logprobs": logprobs}
            return {"logprobs": {**lists, "top_logprobs": [dict(top) for top in tops] if asked else None}, **ids}
        content = [
            {**_logprob(token, value), "top_logprobs": [_logprob(*pair) for pair in top]}
            for token, value, top in zip(tokens, logprobs, tops, strict=True)
        ]
        return {"logprobs": {"content": content, "refusal": None}, **ids}

    def _token_text(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id]))


def _logprob(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}


def tool_call_objects(calls: Sequence[FunctionCall]) -> list[dict[str, Any]]:
    """Tool calls in the protocol's form; each gets an id."""
    return [
        {
            "id": call.tool_call_id or f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]


def finish_reason(completion: Completion, calls: Sequence[FunctionCall] = ()) -> str:
    if calls:
        return "tool_calls"
    return "stop" if completion.stop_reason == "stop" else "length"


class ChoiceStream:
    """The chunks of one choice: whole characters, never a part of a stop string, log-probs with their text.

    Where tools can be called, the text up to the first call is streamed; the calls follow whole, in the last chunk.
    """

    def __init__(self, job: Job, index: int):
        self.job, self.index = job, index
        self.mark = job.parser.start_mark if job.tools else None
        marks = (self.mark,) if self.mark else ()
        self.text = TextStream(self._decode, (*job.stop, *marks))
        self.token_ids: list[int] = []  # not yet sent
        self.logprobs: list[float] = []
        self.alternatives: list[Alternatives] | None = None
        self.content: dict[str, Any] = {"role": "assistant"} if job.chat else {}  # goes with the first chunk
        self.sent = ""

    def _decode(self, token_ids: list[int]) -> str:
        """The text of tokens without special ones, except a special token that begins a call."""
        mark_id = self.job.tokenizer.convert_tokens_to_ids(self.mark) if self.mark else None
        if self.mark and mark_id in token_ids and mark_id in self.job.tokenizer.all_special_ids:
            return self.job.decode(token_ids[: token_ids.index(mark_id)]) + self.mark
        return self.job.decode(token_ids)

    def add(
        self, token_ids: list[int], logprobs: list[float], alternatives: list[Alternatives] | None = None
    ) -> list[dict[str, Any]]:
        """The chunk that new tokens complete, if any."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        if alternatives is not None:
            self.alternatives = [*(self.alternatives or ()), *alternatives]
        if self.job.opening or (self.job.tools and not self.mark):
            return []  # inside a call, or the format has no fixed first mark: only the whole answer says what is a call
        text = self.text.add(token_ids)
        return [self._chunk({"content": text}, text, None)] if text else []

    async def end(self, completion: Completion) -> dict[str, Any]:
        """The last chunk: the remaining text, the tool calls and the finish reason."""
        if not self.job.tools:
            text = self.text.add([], last=True)
            return self._chunk({"content": text}, text, finish_reason(completion))
        text, calls = await self.job.read_answer(completion)
        begun = self.sent.strip() if calls else self.sent  # a parser strips the text around calls
        rest = text[len(begun) :] if text.startswith(begun) else ""
        delta: dict[str, Any] = {"content": rest} if rest or not calls else {}
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(tool_call_objects(calls))]
        return self._chunk(delta, rest, finish_reason(completion, calls))

    def _chunk(self, delta: dict[str, Any], text: str, reason: str | None) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {**self.content, **delta}} if self.job.chat else {"text": text}
        details = self.job.token_details(self.token_ids, self.logprobs, self.alternatives)
        self.content, self.token_ids, self.logprobs, self.alternatives = {}, [], [], None
        self.sent += text
        return {"index": self.index, **content, "finish_reason": reason, **details}
