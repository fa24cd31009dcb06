"""Servers that speak the protocols of SGLang and TGI over our own engine."""

import asyncio
import itertools
import math
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors.torch import load_file
from transformers import PreTrainedModel

from verl.utils.errors import VerlError
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import NativeEngine


class FakeServer(ABC):
    """A server in a thread of its own; `url` is where it listens, at any `port` with 0."""

    def __init__(self, engine: NativeEngine, tokenizer: Any, port: int = 0):
        self.engine, self.tokenizer = engine, tokenizer
        self.request_numbers: dict[str, int] = {}
        self.unseeded = itertools.count(-1, -1)
        self.calls: list[tuple[str, Any]] = []
        self.expected, self.last_step = 0, math.inf
        self.delay = 0.0  # seconds before a sample is begun
        step = engine.core.step
        self.loop = asyncio.new_event_loop()

        def paused_step() -> Any:
            if len(engine.core.states) < self.expected or self.paused:
                threading.Event().wait(0.001)
                return []
            self.expected = 0
            return step()

        engine.core.step = paused_step  # type: ignore[method-assign]
        self.runner = web.AppRunner(self.application())
        self.url = f"http://127.0.0.1:{self.loop.run_until_complete(self._start(port))}"
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    async def _start(self, port: int) -> int:
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port).start()
        return int(self.runner.addresses[0][1])

    @abstractmethod
    def application(self) -> web.Application:
        """The endpoints."""

    def pause_after(self, samples: float, steps: int) -> None:
        """Begin when so many samples are here, and stand still after so many steps, until `resume`."""
        self.expected, self.last_step = samples, self.engine.core.counters.decode_steps + steps

    @property
    def paused(self) -> bool:
        return self.engine.core.counters.decode_steps >= self.last_step

    def resume(self) -> None:
        self.expected, self.last_step = 0, math.inf

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)

    async def answer(self, name: str, ids: list[int], sampling: SamplingParams) -> Any:
        number = sampling.seed or next(self.unseeded)  # the stream of random numbers must depend on nothing else
        await asyncio.sleep(self.delay)
        self.request_numbers[name] = number
        if number in self.engine.core.states:  # its client hung up and asks again
            await self.engine.abort(number)
        [completion] = await self.engine.generate(GenerationRequest(number, ids, sampling))
        return completion


def bias_and_min_p(given: dict[str, Any]) -> dict[str, Any]:
    bias = tuple((int(token), value) for token, value in (given.get("logit_bias") or {}).items())
    return {"min_p": given.get("min_p", 0.0), "logit_bias": bias}


class FakeSGLangServer(FakeServer):
    """The endpoints of SGLang 0.5.23 that the engine uses, with the fields of its request classes."""

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(
            [
                *(web.get(f"/{name}", self.info) for name in SGLANG_QUESTIONS),
                *(web.post(f"/{name}", getattr(self, name)) for name in SGLANG_PATHS),
            ]
        )
        return app

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(("generate", body))
        ids, given = body["input_ids"], body["sampling_params"]
        sampling = SamplingParams(
            temperature=given.get("temperature", 1.0), top_p=given.get("top_p", 1.0), top_k=given.get("top_k", -1),
            max_tokens=given["max_new_tokens"], min_tokens=given.get("min_new_tokens", 0),
            stop=tuple(given.get("stop") or ()), stop_token_ids=tuple(given.get("stop_token_ids") or ()),
            ignore_eos=given.get("ignore_eos", False), seed=given.get("sampling_seed") or 0, **bias_and_min_p(given),
        )  # fmt: skip
        meta: dict[str, Any] = {}
        if body.get("logprob_start_len") == 0:
            scores = logprobs_of(self.engine.model, ids)
            meta["input_token_logprobs"] = [
                [None if i == 0 else v, t, None] for i, (v, t) in enumerate(zip(scores, ids, strict=True))
            ]
        try:
            done = await self.answer(body.get("rid", ""), ids, sampling)
        except VerlError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        reasons = {"stop": "stop", "length": "length", "aborted": "abort"}
        meta["finish_reason"] = {"type": reasons[done.stop_reason]}
        meta["output_token_logprobs"] = [[v, t, None] for v, t in zip(done.logprobs, done.token_ids, strict=True)]
        return web.json_response({"output_ids": done.token_ids, "meta_info": meta})

    async def start_profile(self, request: web.Request) -> web.Response:
        self.calls.append(("start_profile", await request.json()))
        return web.json_response({})

    async def stop_profile(self, request: web.Request) -> web.Response:
        self.calls.append(("stop_profile", {}))
        return web.json_response({})

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await request.json()
        for name, number in self.request_numbers.items():
            if body.get("abort_all") or name.startswith(body.get("rid") or "\0"):
                await self.engine.abort(number)
        return web.Response(text="")

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(("update", body))
        params = dict(self.engine.model.named_parameters())
        for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                if name not in params:
                    return web.json_response({"success": False, "message": f"no parameter {name}"})
                params[name].data.copy_(tensor)
        await self.engine.update_weights(self.engine.model, int(body["weight_version"]))
        return web.json_response({"success": True, "message": "ok"})

    async def release_memory_occupation(self, request: web.Request) -> web.Response:
        self.calls.append(("release", await request.json()))
        await self.engine.sleep()
        return web.Response(text="")

    async def resume_memory_occupation(self, request: web.Request) -> web.Response:
        self.calls.append(("resume", await request.json()))
        await self.engine.wake()
        return web.Response(text="")


SGLANG_QUESTIONS = ("health", "server_info")
SGLANG_PATHS = (
    "generate",
    "abort_request",
    "update_weights_from_disk",
    "start_profile",
    "stop_profile",
    "release_memory_occupation",
    "resume_memory_occupation",
)


class FakeTGIServer(FakeServer):
    """TGI's /info and /generate, or (with `openai`) the completions of an OpenAI-compatible server."""

    openai = False

    def application(self) -> web.Application:
        app = web.Application()
        if self.openai:
            app.add_routes([web.post("/v1/completions", self.completions)])
        else:
            app.add_routes([web.get("/info", self.info), web.post("/generate", self.generate)])
        return app

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_id": "stand-in"})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        given = body["parameters"]
        ids = self.tokenizer(body["inputs"], add_special_tokens=False)["input_ids"]
        sampling = SamplingParams(
            temperature=given.get("temperature", 0.0) if given["do_sample"] else 0.0, top_p=given.get("top_p", 1.0),
            top_k=given.get("top_k", -1), max_tokens=given["max_new_tokens"], stop=tuple(given["stop"]),
            seed=given["seed"],
        )  # fmt: skip
        done = await self.answer("", ids, sampling)
        tokens = [
            {"id": t, "text": "", "logprob": v, "special": False}
            for t, v in zip(done.token_ids, done.logprobs, strict=True)
        ]
        reason = "length" if done.stop_reason == "length" else "eos_token"
        details = {"finish_reason": reason, "generated_tokens": len(tokens), "seed": given["seed"], "tokens": tokens}
        return web.json_response({"generated_text": self.tokenizer.decode(done.token_ids), "details": details})

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        sampling = SamplingParams(
            temperature=body["temperature"], top_p=body["top_p"], max_tokens=body["max_tokens"], seed=body["seed"],
            stop=tuple(body.get("stop") or ()), min_tokens=body.get("min_tokens", 0), top_k=body.get("top_k", -1),
            stop_token_ids=tuple(body.get("stop_token_ids") or ()), ignore_eos=body.get("ignore_eos", False),
            **bias_and_min_p(body),
        )  # fmt: skip
        done = await self.answer("", body["prompt"], sampling)
        choice = {
            "index": 0, "text": self.tokenizer.decode(done.token_ids), "finish_reason": done.stop_reason,
            "token_ids": done.token_ids, "logprobs": {"token_logprobs": done.logprobs, "tokens": []},
        }  # fmt: skip
        return web.json_response({"choices": [choice]})


class FakeOpenAIServer(FakeTGIServer):
    openai = True


def logprobs_of(model: PreTrainedModel, ids: list[int]) -> list[float]:
    """Of each token given those before it; 0 for the first."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    taken = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return [0.0, *taken.tolist()]
