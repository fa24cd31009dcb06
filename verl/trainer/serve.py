"""`verl serve model=DIR`: an OpenAI-compatible server over a rollout engine, on loopback unless told otherwise.

POST /v1/chat/completions and /v1/completions (n, max_tokens, temperature, top_p, seed, stop, logprobs; `stream` sends
the whole answer as one piece), GET /v1/models, GET /health.
"""

import argparse
import json
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.config import load_config
from verl.data.chat import PromptTemplate, read_messages
from verl.utils.errors import ConfigError, VerlError
from verl.workers.rollout.base import Completion, GenerationRequest, RolloutEngine, SamplingParams

MODEL = "actor_rollout_ref.model.path"


class RequestError(Exception):
    """A request that cannot be answered; the message goes back to the client with status 400."""


class OpenAIServer:
    """Handlers of one model. Requests are batched by the engine."""

    def __init__(self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, name: str, longest: int):
        self.engine, self.tokenizer, self.name, self.longest = engine, tokenizer, name, longest
        self.template = PromptTemplate(tokenizer)
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

        app = web.Application(client_max_size=64 << 20)
        app.on_startup.append(wake)
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
            body = await request.json()
            if not isinstance(body, dict):
                raise RequestError("the body must be a JSON object")
            prompts = [self._chat_ids(body)] if chat else self._prompt_ids(body)
            answers = [await self.engine.generate(self._request(body, ids)) for ids in prompts]
        except (RequestError, VerlError, ValueError) as error:
            failure = {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}
            return web.json_response({"error": failure}, status=400)
        choices = [c for group in answers for c in group]
        if not body.get("stream"):
            return web.json_response(self._reply(body, prompts, choices, chat))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for piece in self._pieces(body, choices, chat):
            await stream.write(f"data: {json.dumps(piece)}\n\n".encode())
        await stream.write(b"data: [DONE]\n\n")
        return stream

    def _chat_ids(self, body: dict[str, Any]) -> list[int]:
        text = self.template.render(read_messages(body.get("messages")))
        return self.template.encode([text])[0]

    def _prompt_ids(self, body: dict[str, Any]) -> list[list[int]]:
        """A text, a list of texts, token ids, or a list of those."""
        prompt = body.get("prompt")
        many = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
        ids = []
        for one in many:
            if isinstance(one, str):
                ids.append(self.tokenizer(one)["input_ids"])
            elif isinstance(one, list) and all(isinstance(i, int) for i in one):
                ids.append(one)
            else:
                raise RequestError("prompt must be a text, token ids, or a list of either")
        return ids

    def _request(self, body: dict[str, Any], ids: list[int]) -> GenerationRequest:
        self._next += 1
        stop = body.get("stop") or ()
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or max(1, self.longest - len(ids))
        seed = body.get("seed")
        sampling = SamplingParams(
            temperature=_number(body, "temperature", 1.0),
            top_p=_number(body, "top_p", 1.0),
            top_k=int(_number(body, "top_k", -1)),
            n=int(_number(body, "n", 1)),
            max_tokens=int(limit),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            seed=self._next if seed is None else int(seed),
        )
        return GenerationRequest(self._next, ids, sampling)

    def _text(self, completion: Completion, stop: Any) -> str:
        """The answer without what ended it, as OpenAI gives it."""
        text = str(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True))
        ends = [stop] if isinstance(stop, str) else list(stop or ())
        places = [text.index(end) for end in ends if end in text]
        return text[: min(places)] if places else text

    def _reply(self, body: dict[str, Any], prompts: list[list[int]], answers: list[Completion], chat: bool) -> Any:
        choices = []
        for number, answer in enumerate(answers):
            text = self._text(answer, body.get("stop"))
            content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            logprobs = self._logprobs(body, answer, chat)
            choices.append({"index": number, **content, "finish_reason": _reason(answer), "logprobs": logprobs})
        made, given = sum(len(a.token_ids) for a in answers), sum(map(len, prompts))
        usage = {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
        return {**self._head(chat, ""), "choices": choices, "usage": usage}

    def _pieces(self, body: dict[str, Any], answers: list[Completion], chat: bool) -> list[dict[str, Any]]:
        head, out = self._head(chat, ".chunk" if chat else ""), []
        for number, answer in enumerate(answers):
            text = self._text(answer, body.get("stop"))
            content = {"delta": {"role": "assistant", "content": text}} if chat else {"text": text}
            empty: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
            out.append({**head, "choices": [{"index": number, **content, "finish_reason": None}]})
            out.append({**head, "choices": [{"index": number, **empty, "finish_reason": _reason(answer)}]})
        return out

    def _head(self, chat: bool, suffix: str) -> dict[str, Any]:
        kind = "chat.completion" if chat else "text_completion"
        return {
            "id": f"verl-{uuid.uuid4().hex}",
            "object": kind + suffix,
            "created": int(time.time()),
            "model": self.name,
        }

    def _logprobs(self, body: dict[str, Any], answer: Completion, chat: bool) -> dict[str, Any] | None:
        if body.get("logprobs") in (None, False):
            return None
        tokens = [str(self.tokenizer.decode([i])) for i in answer.token_ids]
        if not chat:
            return {"tokens": tokens, "token_logprobs": answer.logprobs, "top_logprobs": None, "text_offset": []}
        content = [
            {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
            for token, value in zip(tokens, answer.logprobs, strict=True)
        ]
        return {"content": content}


def _number(body: dict[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, found {value!r}")
    return value


def _reason(completion: Completion) -> str:
    return "stop" if completion.stop_reason == "stop" else "length"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted. 2: a mistake the message explains."""
    parser = argparse.ArgumentParser(prog="verl serve", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port (default: %(default)s)")
    parser.add_argument("--name", help="model name clients ask for (default: the name of its folder)")
    parser.add_argument("overrides", nargs="*", help=f"model=DIR ({MODEL}) and rollout.* keys")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    short = {"model": MODEL}
    overrides = [f"{short.get(k, k)}{eq}{v}" for k, eq, v in (o.partition("=") for o in options.overrides)]
    overrides = [f"actor_rollout_ref.{o}" if o.startswith("rollout.") else o for o in overrides]
    try:
        return run(overrides, options.host, options.port, options.name)
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(overrides: list[str], host: str, port: int, name: str | None) -> int:
    from verl.models.load import load_tokenizer
    from verl.trainer.ppo.rollout import load_engine

    try:
        from aiohttp import web
    except ImportError as error:
        raise ConfigError("`verl serve` needs aiohttp: pip install 'verl[serve]'") from error
    config = load_config(overrides)
    rollout, path = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model.path
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    longest = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    name = name or Path(str(path)).name
    server = OpenAIServer(load_engine(config, tokenizer), tokenizer, name, longest)
    print(f"serving {server.name} on http://{host}:{port}/v1 (at most {longest} tokens a conversation)", flush=True)
    web.run_app(server.application(), host=host, port=port, print=None)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
