"""HTTP handlers of the OpenAI protocol over a rollout engine."""

import asyncio
import contextlib
import hmac
import itertools
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web
from transformers import PreTrainedTokenizerBase

from verl.agent.tool_parsers import ToolParser
from verl.commands.serve.answers import ChoiceStream, Job
from verl.commands.serve.callers import check_is_near, check_origin
from verl.commands.serve.connections import read_limited
from verl.commands.serve.prompt_reader import PromptReader
from verl.commands.serve.request_body import (
    RequestError,
    read_body,
    read_opening,
    read_response_format,
    read_tools,
    stop_strings,
)
from verl.commands.serve.responses import ResponseWriter, as_chat, read_response_request
from verl.utils.errors import VerlError, WorkerError
from verl.workers.rollout.base import Completion, GenerationRequest, RolloutEngine, SamplingParams
from verl.workers.rollout.request_limits import check_request

T = TypeVar("T")
logger = logging.getLogger(__name__)
TOKENS: ContextVar[str] = ContextVar("tokens", default="")  # of the current request, for its line
_THREADS = 4  # that tokenise prompts and write answers, so that the event loop goes on sampling


@dataclass(frozen=True)
class ServerLimits:
    """Who may ask, how much, and how long a client may keep the server waiting."""

    api_key: str | None = None
    max_concurrent: int = 256
    max_body_bytes: int = 16 << 20
    client_timeout_s: float = 30.0
    allow_sleep: bool = False  # POST /sleep and /wake_up
    host: str = "127.0.0.1"  # the name or address that it listens on


class OpenAIServer:
    """HTTP handlers for one model. The engine batches the requests."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        max_length: int,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        template_kwargs: Mapping[str, Any] | None = None,
        tool_format: str = "hermes",
        limits: ServerLimits = ServerLimits(),
    ):
        self.engine, self.tokenizer, self.name, self.max_length = engine, tokenizer, name, max_length
        self.sampling, self.limits = sampling, limits
        self.prompts = PromptReader(tokenizer, max_length, template_kwargs)
        self.parser = ToolParser.get_tool_parser(tool_format, tokenizer)
        self.threads = ThreadPoolExecutor(_THREADS, "serve")
        self.num_running = 0
        self.request_ids = itertools.count(1)

    def application(self) -> web.Application:
        """The aiohttp application."""

        async def chat(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, chat=True)

        async def completions(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, chat=False)

        async def wake(_: web.Application) -> None:
            await self.engine.wake()

        async def close(_: web.Application) -> None:
            self.threads.shutdown(wait=False, cancel_futures=True)
            self.engine.close()

        app = web.Application(middlewares=[self._guard], client_max_size=self.limits.max_body_bytes)
        app.on_startup.append(wake)
        app.on_cleanup.append(close)
        if self.limits.allow_sleep:
            for sleep, wake_up in (("/sleep", "/wake_up"), ("/release_memory_occupation", "/resume_memory_occupation")):
                app.add_routes([web.post(sleep, self._sleep), web.post(wake_up, self._wake)])  # as vLLM and SGLang
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{id:.+}", self._model),
                web.post("/v1/chat/completions", chat),
                web.post("/v1/completions", completions),
                web.post("/v1/responses", self._create_response),
            ]
        )
        return app

    async def _health(self, request: web.Request) -> web.Response:
        lost = self.engine.lost_replicas
        status = "lost" if self.engine.lost else "degraded" if lost else "ok"
        more = {"lost_replicas": list(lost)} if lost else {}
        return web.json_response({"status": status, **more}, status=503 if self.engine.lost else 200)

    async def _sleep(self, request: web.Request) -> web.Response:
        check_is_near(request)
        await self.engine.sleep()
        return web.json_response({})

    async def _wake(self, request: web.Request) -> web.Response:
        check_is_near(request)
        await self.engine.wake()
        return web.json_response({})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._entry()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["id"])
        return web.json_response(self._entry())

    def _entry(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "verl"}

    def _check_model(self, name: str) -> None:
        if name != self.name:
            raise RequestError(
                f"the model {name!r:.200} is not served here; the one that is: {self.name!r}",
                "model", status=404, code="model_not_found",
            )  # fmt: skip

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        """Checks the key, answers mistakes in the protocol's form, and logs one line a request."""
        started, status = time.perf_counter(), "client left"
        TOKENS.set("")
        try:
            try:
                check_origin(request, self.limits.host)
                self._check_key(request)
                response: web.StreamResponse = await handler(request)
            except web.HTTPException as error:
                said = RequestError(f"{request.method} {request.path}: {error.reason}")
                response = error_response(said, error.status)
            except RequestError as error:
                response = error_response(error, error.status)
            except VerlError as error:
                response = error_response(error, 500 if isinstance(error, WorkerError) else 400)
            status = str(response.status)
            return response
        finally:
            seconds, note = time.perf_counter() - started, TOKENS.get()
            line = "%s %s %s: %s in %.2f s%s"
            logger.info(line, request.remote, request.method, request.raw_path[:200], status, seconds, note)

    def _check_key(self, request: web.Request) -> None:
        if self.limits.api_key is None or request.path == "/health":
            return
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(errors="replace"), self.limits.api_key.encode()):
            raise RequestError(
                "the API key is missing or wrong; send the server's --api-key as `Authorization: Bearer KEY`",
                status=401, code="invalid_api_key",
            )  # fmt: skip

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[None]:
        """Counts a request inside the block; RequestError where as many run as may."""
        if self.num_running >= self.limits.max_concurrent:
            raise RequestError(
                f"{self.num_running} requests are running, as many as --max-concurrent allows; try again later",
                status=429, code="rate_limit_exceeded",
            )  # fmt: skip
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    async def _answer(self, request: web.Request, chat: bool) -> web.StreamResponse:
        with self._admitted():
            data = await read_limited(request, self.limits.client_timeout_s, self.limits.max_body_bytes)
            job = await self._in_thread(self.read_job, data, chat)
            if job.body.get("stream"):
                return await self._send_stream(request, _chunk_events(self._chunks(job)), _event_of_error)
            return await self._send_whole(job, job.reply)

    async def _create_response(self, request: web.Request) -> web.StreamResponse:
        with self._admitted():
            data = await read_limited(request, self.limits.client_timeout_s, self.limits.max_body_bytes)
            body = read_response_request(data)
            job = await self._in_thread(self.read_job, json.dumps(as_chat(body)).encode(), True)
            writer = ResponseWriter(body, job)
            if job.body.get("stream"):
                return await self._send_stream(request, writer.events(self._chunks(job)), writer.event_of_error)
            return await self._send_whole(job, writer.whole)

    async def _send_whole(
        self, job: Job, write: Callable[[Sequence[Completion]], Coroutine[Any, Any, dict[str, Any]]]
    ) -> web.Response:
        answers = await _gather_or_cancel([self.engine.generate(r) for r in job.requests])
        completions = [completion for group in answers for completion in group]
        reply = await self._in_thread(lambda: json.dumps(asyncio.run(write(completions))).encode())
        TOKENS.set(_note(job, sum(len(c.token_ids) for c in completions)))
        return web.Response(body=reply, content_type="application/json")

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)

    def read_job(self, data: bytes, chat: bool) -> Job:
        """The job that a body asks for; RequestError or DataError where it cannot be answered."""
        body = read_body(data, chat)
        self._check_model(body.get("model", self.name))
        tools = read_tools(body) if chat else []
        opening = self.tokenizer.encode(read_opening(body, tools, self.parser), add_special_tokens=False)
        body["response_format"] = read_response_format(body, self.engine.response_formats)
        prompts = [self.prompts.read_chat(body, tools) + opening] if chat else self.prompts.read_prompts(body)
        requests = [self.read_request(body, ids, number, tools) for number, ids in enumerate(prompts)]
        stop = stop_strings(body, self.sampling.stop)
        return Job(self.tokenizer, self.name, chat, body, requests, stop, tools, self.parser, opening)

    def read_request(
        self, body: dict[str, Any], ids: list[int], number: int = 0, tools: Sequence[Any] = ()
    ) -> GenerationRequest:
        """The request for prompt `number` of a body. With a seed, its random numbers depend on that and `number`."""
        default, room = self.sampling, self.max_length - len(ids)
        if room < 1:
            raise RequestError(
                f"{len(ids)} prompt tokens leave no room for an answer in the {self.max_length} tokens that one "
                "conversation may hold here; shorten the prompt",
                "messages" if "messages" in body else "prompt",
                code="context_length_exceeded",
            )
        limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        asked = body.get(limit, min(default.max_tokens, room))
        least = body.get("min_tokens", min(default.min_tokens, asked))
        if least > asked:
            raise RequestError(f"min_tokens={least} is above {limit}={asked}; lower it", "min_tokens")
        if asked > room:
            raise RequestError(
                f"{len(ids)} prompt tokens and {limit}={asked} exceed the {self.max_length} tokens that one "
                f"conversation may hold here; shorten the prompt, or lower {limit}",
                limit,
                code="context_length_exceeded",
            )
        extra_stops = self.parser.stop_token_ids if tools else []
        sampling = SamplingParams(
            temperature=body.get("temperature", default.temperature),
            top_p=body.get("top_p", default.top_p),
            top_k=body.get("top_k", default.top_k),
            n=body.get("n", 1),
            max_tokens=asked,
            min_tokens=least,
            stop=stop_strings(body, default.stop),
            stop_token_ids=(*body.get("stop_token_ids", default.stop_token_ids), *extra_stops),
            ignore_eos=body.get("ignore_eos", default.ignore_eos),
            seed=body.get("seed", default.seed) % 2**64,
            frequency_penalty=body.get("frequency_penalty", 0),
            presence_penalty=body.get("presence_penalty", 0),
            repetition_penalty=body.get("repetition_penalty", 1),
            min_p=body.get("min_p", 0),
            logit_bias=tuple((int(token), float(bias)) for token, bias in body.get("logit_bias", {}).items()),
            top_logprobs=body.get("top_logprobs", 0) if "messages" in body else body.get("logprobs", 0),
            response_format=body.get("response_format"),
        )
        stream = number if "seed" in body else None
        request = GenerationRequest(next(self.request_ids), ids, sampling, random_stream=stream)
        check_request(request, self.max_length, (), has_tokenizer=True)  # check all before any starts
        return request

    async def _send_stream(
        self, request: web.Request, events: AsyncGenerator[bytes], failed: Callable[[VerlError], bytes]
    ) -> web.StreamResponse:
        """Send server-sent events. A failure before the first token is an ordinary error response."""
        async with contextlib.aclosing(events):
            event = await anext(events)
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await stream.prepare(request)
            try:
                await stream.write(event)
                async for event in events:
                    await stream.write(event)
            except VerlError as error:
                await stream.write(failed(error))
            except ConnectionResetError:
                pass  # the client has disconnected
        return stream

    async def _chunks(self, job: Job) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of an answer, each as soon as its text is certain. Closing the iterator aborts the requests."""
        header, queue = job.header(".chunk" if job.chat else ""), asyncio.Queue[dict[str, Any] | None]()

        async def stream_request(number: int, request: GenerationRequest) -> int:
            n = request.sampling.n
            choices = [ChoiceStream(job, number * n + sample) for sample in range(n)]

            def receive(sample: int, *tokens: Any) -> None:
                for chunk in choices[sample].add(*tokens):
                    queue.put_nowait(chunk)

            completions = await self.engine.stream(request, receive)
            for choice, completion in zip(choices, completions, strict=True):
                queue.put_nowait(await choice.end(completion))
            return sum(len(c.token_ids) for c in completions)

        tasks = [stream_request(i, r) for i, r in enumerate(job.requests)]
        all_requests = asyncio.ensure_future(_gather_or_cancel(tasks))
        all_requests.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (chunk := await queue.get()) is not None:
                yield {**header, "choices": [chunk]}
            num_generated = sum(await all_requests)
            TOKENS.set(_note(job, num_generated))
            if job.body.get("stream_options", {}).get("include_usage"):
                yield {**header, "choices": [], "usage": job.usage(num_generated)}
        finally:
            all_requests.cancel()


def _note(job: Job, num_generated: int) -> str:
    usage = job.usage(num_generated)
    return f", {usage['prompt_tokens']} prompt + {num_generated} answer tokens"


async def _gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order; when one fails or the caller is cancelled, the others are cancelled too."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _chunk_events(chunks: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[bytes]:
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield _event(chunk)
    yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def _event_of_error(error: VerlError) -> bytes:
    return _event(_error_body(error))


def _error_body(error: Exception) -> dict[str, Any]:
    kind = "server_error" if isinstance(error, WorkerError) else "invalid_request_error"
    field, code = (error.field, error.code) if isinstance(error, RequestError) else (None, None)
    return {"error": {"message": str(error), "type": kind, "param": field, "code": code}}


def error_response(error: Exception, status: int) -> web.Response:
    """A mistake in the protocol's form. The connection ends where the request may not have been read whole."""
    response = web.json_response(_error_body(error), status=status)
    if status in (401, 403, 408, 413, 415, 429):
        response.force_close()
    return response
