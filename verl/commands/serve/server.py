"""`verl serve model=DIR`: an OpenAI-compatible server over a rollout engine, on loopback unless told otherwise.

POST /v1/chat/completions and /v1/completions (n, max_tokens, temperature, top_p, top_k, seed, stop, stop_token_ids,
min_tokens, ignore_eos, logprobs, stream, stream_options.include_usage, return_token_ids, chat_template_kwargs), GET
/v1/models, GET /health. What a request does not say is as rollout.* says. A client that goes away ends its request.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from verl.commands.serve.request_body import (
    MAX_ANSWERS,
    RequestError,
    read_body,
    read_flag,
    read_integer,
    read_number,
    read_token_ids,
)
from verl.commands.serve.text_stream import TextStream, cut_at_stop
from verl.config import load_config
from verl.config.load import unread_keys
from verl.data.chat import PromptTemplate, read_messages
from verl.utils.errors import ConfigError, VerlError, WorkerError
from verl.workers.rollout.base import Completion, GenerationRequest, RolloutEngine, SamplingParams, check_request

T = TypeVar("T")
MODEL_PATH_KEY = "actor_rollout_ref.model.path"


class OpenAIServer:
    """Handlers of one model. Requests are batched by the engine."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        max_length: int,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        self.engine, self.tokenizer, self.name, self.max_length = engine, tokenizer, name, max_length
        self.sampling, self.template_kwargs = sampling, dict(template_kwargs or {})
        self._next = 0

    def application(self) -> Any:
        """The aiohttp application."""
        from aiohttp import web

        async def models(request: Any) -> Any:
            entry = {"id": self.name, "object": "model", "created": 0, "owned_by": "verl"}
            return web.json_response({"object": "list", "data": [entry]})

        async def health(request: Any) -> Any:
            return web.json_response({"status": "ok"})

        async def chat(request: Any) -> Any:
            return await self._answer(request, chat=True)

        async def completions(request: Any) -> Any:
            return await self._answer(request, chat=False)

        async def wake(_: Any) -> None:
            await self.engine.wake()

        async def close(_: Any) -> None:
            self.engine.close()

        app = web.Application(client_max_size=64 << 20)
        app.on_startup.append(wake)
        app.on_cleanup.append(close)
        app.add_routes(
            [
                web.get("/health", health),
                web.get("/v1/models", models),
                web.post("/v1/chat/completions", chat),
                web.post("/v1/completions", completions),
            ]
        )
        return app

    async def _answer(self, request: Any, chat: bool) -> Any:
        from aiohttp import web

        try:
            body = read_body(await request.read(), chat)
            prompts = [self._chat_ids(body)] if chat else self._prompt_ids(body)
            requests = [self._request(body, ids) for ids in prompts]
            if read_flag(body, "stream"):
                return await self._send_stream(request, body, requests, chat)
            answers = await _gather_or_cancel([self.engine.generate(r) for r in requests])
        except (VerlError, RequestError) as error:
            return web.json_response(_error_body(error), status=500 if isinstance(error, WorkerError) else 400)
        return web.json_response(self._reply(body, prompts, [c for group in answers for c in group], chat))

    async def _send_stream(
        self, request: Any, body: dict[str, Any], requests: list[GenerationRequest], chat: bool
    ) -> Any:
        """Server-sent events. The first token decides about the status: what fails before it is an ordinary error."""
        from aiohttp import web

        async with contextlib.aclosing(self._chunks(body, requests, chat)) as chunks:
            chunk = await anext(chunks)
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await stream.prepare(request)
            try:
                await stream.write(_event(chunk))
                async for chunk in chunks:
                    await stream.write(_event(chunk))
                await stream.write(b"data: [DONE]\n\n")
            except VerlError as error:
                await stream.write(_event(_error_body(error)))
            except ConnectionResetError:
                pass  # the client has gone, and nobody is left to tell
        return stream

    async def _chunks(
        self, body: dict[str, Any], requests: list[GenerationRequest], chat: bool
    ) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of an answer, each as soon as its text is certain. Closing the iterator aborts the requests."""
        header, queue = self._header(chat, ".chunk" if chat else ""), asyncio.Queue[dict[str, Any] | None]()

        async def stream_request(number: int, request: GenerationRequest) -> int:
            n = request.sampling.n
            choices = [ChoiceStream(self, body, number * n + sample, chat) for sample in range(n)]

            def receive(sample: int, token_ids: list[int], logprobs: list[float]) -> None:
                for chunk in choices[sample].add(token_ids, logprobs):
                    queue.put_nowait(chunk)

            completions = await self.engine.stream(request, receive)
            for choice, completion in zip(choices, completions, strict=True):
                queue.put_nowait(choice.end(completion))
            return sum(len(c.token_ids) for c in completions)

        all_requests = asyncio.ensure_future(_gather_or_cancel([stream_request(i, r) for i, r in enumerate(requests)]))
        all_requests.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (chunk := await queue.get()) is not None:
                yield {**header, "choices": [chunk]}
            num_generated = sum(await all_requests)
            if (body.get("stream_options") or {}).get("include_usage"):
                yield {**header, "choices": [], "usage": _usage([r.prompt_ids for r in requests], num_generated)}
        finally:
            all_requests.cancel()

    def _chat_ids(self, body: dict[str, Any]) -> list[int]:
        kwargs = body.get("chat_template_kwargs") or {}
        if not isinstance(kwargs, dict):
            raise RequestError(f"chat_template_kwargs must be an object, found {kwargs!r}")
        template = PromptTemplate(self.tokenizer, self.template_kwargs | kwargs)
        try:
            return template.encode([template.render(read_messages(body.get("messages")))])[0]
        except Exception as error:  # a template is the model author's code
            raise RequestError(f"messages: {error}") from error

    def _prompt_ids(self, body: dict[str, Any]) -> list[list[int]]:
        """A text, a list of texts, token ids, or a list of those."""
        prompt = body.get("prompt")
        many = prompt if isinstance(prompt, list) and prompt and type(prompt[0]) is not int else [prompt]
        ids = []
        for one in many:
            if isinstance(one, str):
                ids.append(self.tokenizer(one)["input_ids"])
            elif isinstance(one, list) and all(type(i) is int for i in one):
                ids.append(one)
            else:
                raise RequestError("prompt must be a text, token ids, or a list of either")
        return ids

    def _request(self, body: dict[str, Any], ids: list[int]) -> GenerationRequest:
        self._next += 1
        default = self.sampling
        limit = read_integer(body, "max_tokens", max(1, self.max_length - len(ids)))
        sampling = SamplingParams(
            temperature=read_number(body, "temperature", default.temperature),
            top_p=read_number(body, "top_p", default.top_p),
            top_k=read_integer(body, "top_k", default.top_k),
            n=read_integer(body, "n", 1, MAX_ANSWERS),
            max_tokens=read_integer(body, "max_completion_tokens", limit),
            min_tokens=read_integer(body, "min_tokens", default.min_tokens),
            stop=self.stop_strings(body),
            stop_token_ids=read_token_ids(body, "stop_token_ids", default.stop_token_ids),
            ignore_eos=read_flag(body, "ignore_eos", default.ignore_eos),
            seed=read_integer(body, "seed", self._next, 2**64),
        )
        request = GenerationRequest(self._next, ids, sampling)
        check_request(request, self.max_length, (), has_tokenizer=True)  # all of them, before one begins
        return request

    def decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _reply(self, body: dict[str, Any], prompts: list[list[int]], answers: list[Completion], chat: bool) -> Any:
        choices = []
        for index, answer in enumerate(answers):
            text = cut_at_stop(self.decode(answer.token_ids), self.stop_strings(body))
            content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            details = self.token_details(body, answer.token_ids, answer.logprobs, chat)
            choices.append({"index": index, **content, "finish_reason": _reason(answer), **details})
        usage = _usage(prompts, sum(len(a.token_ids) for a in answers))
        return {**self._header(chat, ""), "choices": choices, "usage": usage}

    def _header(self, chat: bool, suffix: str) -> dict[str, Any]:
        kind = "chat.completion" if chat else "text_completion"
        return {
            "id": f"verl-{uuid.uuid4().hex}",
            "object": kind + suffix,
            "created": int(time.time()),
            "model": self.name,
        }

    def stop_strings(self, body: dict[str, Any]) -> tuple[str, ...]:
        """The texts that end an answer."""
        stop = body.get("stop")
        if stop is None:
            return self.sampling.stop
        stop_strings = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop_strings, list) or not all(isinstance(end, str) and end for end in stop_strings):
            raise RequestError(f"stop must be a text or a list of texts, found {stop!r}")
        return tuple(stop_strings)

    def token_details(
        self, body: dict[str, Any], token_ids: list[int], logprobs: list[float], chat: bool
    ) -> dict[str, Any]:
        """Log-probs and token ids of a choice, where they are asked for."""
        ids = {"token_ids": token_ids} if read_flag(body, "return_token_ids") else {}
        if body.get("logprobs") is None or body["logprobs"] is False:
            return {"logprobs": None, **ids}
        tokens = [str(self.tokenizer.decode([i])) for i in token_ids]
        if not chat:
            return {"logprobs": {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None}, **ids}
        content = [
            {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
            for token, value in zip(tokens, logprobs, strict=True)
        ]
        return {"logprobs": {"content": content}, **ids}


class ChoiceStream:
    """The chunks of one choice: whole characters, never a part of a stop string, log-probs with their text."""

    def __init__(self, server: OpenAIServer, body: dict[str, Any], index: int, chat: bool):
        self.server, self.body, self.index, self.chat = server, body, index, chat
        self.text = TextStream(server.decode, server.stop_strings(body))
        self.token_ids: list[int] = []  # not yet sent
        self.logprobs: list[float] = []
        self.content: dict[str, Any] = {"role": "assistant"} if chat else {}  # goes with the first chunk

    def add(self, token_ids: list[int], logprobs: list[float]) -> list[dict[str, Any]]:
        """The chunk that new tokens complete, if any."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        text = self.text.add(token_ids)
        return [self._chunk(text, None)] if text else []

    def end(self, completion: Completion) -> dict[str, Any]:
        """What is left, and why it ended."""
        return self._chunk(self.text.add([], last=True), _reason(completion))

    def _chunk(self, text: str, reason: str | None) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {**self.content, "content": text}} if self.chat else {"text": text}
        details = self.server.token_details(self.body, self.token_ids, self.logprobs, self.chat)
        self.content, self.token_ids, self.logprobs = {}, [], []
        return {"index": self.index, **content, "finish_reason": reason, **details}


async def _gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order; when one fails or the caller is cancelled, the others are cancelled too."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def _error_body(error: Exception) -> dict[str, Any]:
    kind = "server_error" if isinstance(error, WorkerError) else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": None}}


def _usage(prompts: Sequence[Sequence[int]], num_generated: int) -> dict[str, int]:
    num_prompt_tokens = sum(map(len, prompts))
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt_tokens + num_generated,
    }


def _reason(completion: Completion) -> str:
    return "stop" if completion.stop_reason == "stop" else "length"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted. 2: a mistake the message explains."""
    parser = argparse.ArgumentParser(prog="verl serve", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port (default: %(default)s)")
    parser.add_argument("--name", help="model name clients ask for (default: the name of its folder)")
    parser.add_argument("overrides", nargs="*", help=f"model=DIR ({MODEL_PATH_KEY}) and rollout.* keys")
    options = parser.parse_intermixed_args(sys.argv[1:] if argv is None else argv)
    short = {"model": MODEL_PATH_KEY}
    overrides = [f"{short.get(k, k)}{eq}{v}" for k, eq, v in (o.partition("=") for o in options.overrides)]
    overrides = [f"actor_rollout_ref.{o}" if o.startswith("rollout.") else o for o in overrides]
    try:
        return run(overrides, options.host, options.port, options.name)
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _max_length(requested: int, path: str | None) -> int:
    """Tokens of a conversation: as many as were asked for, as far as the model, where it is here, has positions."""
    from verl.models.load import load_config as load_model_config

    # without config.json it is a tokenizer alone, for a model that another server runs
    if not (Path(str(path)).expanduser() / "config.json").is_file():
        return requested
    return min(requested, getattr(load_model_config(str(path)), "max_position_embeddings", None) or requested)


def run(overrides: list[str], host: str, port: int, name: str | None) -> int:
    from verl.models.load import load_tokenizer
    from verl.trainer.ppo.rollout_setup import load_rollout_engine, training_sampling

    try:
        from aiohttp import web
    except ImportError as error:
        raise ConfigError("`verl serve` needs aiohttp: pip install 'verl[serve]'") from error
    config = load_config(overrides)
    rollout, path = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model.path
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    max_length = rollout.max_model_len or _max_length(rollout.prompt_length + rollout.response_length, path)
    name = name or Path(str(path)).name
    sampling, kwargs = training_sampling(rollout), config.data.apply_chat_template_kwargs
    server = OpenAIServer(load_rollout_engine(config, tokenizer), tokenizer, name, max_length, sampling, kwargs)
    for key in unread_keys(config):
        print(f"warning: {key} was set, but nothing reads it here", file=sys.stderr)
    print(f"serving {server.name} on http://{host}:{port}/v1 (at most {max_length} tokens a conversation)", flush=True)
    try:
        web.run_app(server.application(), host=host, port=port, print=None, handler_cancellation=True)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {error}") from error
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
