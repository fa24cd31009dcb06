"""`rollout.name=tgi`: a client of a running TGI or OpenAI-compatible server, for generation without training.

For evaluation, agents and frozen models. TGI returns token ids and log-probs. Requests to OpenAI-compatible servers set
`return_token_ids`; if a server does not support it, the client tokenises the text and omits log-probs (0).
"""

import asyncio
import json
from typing import Any

from verl.config.rollout import RolloutConfig
from verl.data.chat import end_marks
from verl.utils.errors import ConfigError, WorkerError
from verl.utils.seeds import derive_seed
from verl.workers.rollout.base import (
    JSON_FORMATS,
    Completion,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    response_schema,
)
from verl.workers.rollout.engine_stats import EngineStats
from verl.workers.rollout.registry import why_not_trained
from verl.workers.rollout.remote.http_client import HTTPClient
from verl.workers.rollout.request_limits import check_request

_ABORTED_TASKS: "list[asyncio.Task[Completion]]" = []  # marks a request aborted before it was sent
_REASONS = {"eos_token": "stop", "stop_sequence": "stop", "length": "length", "stop": "stop"}


class TGIEngine(RolloutEngine):
    """Client of the server at `rollout.server.url`."""

    response_formats = JSON_FORMATS

    def __init__(self, config: RolloutConfig, tokenizer: Any):
        if config.server.url is None:
            raise ConfigError("rollout.name=tgi needs actor_rollout_ref.rollout.server.url, such as http://host:8080")
        self.config, self.tokenizer = config, tokenizer
        self.max_model_len = config.max_model_len or config.prompt_length + config.response_length
        # The server knows the model's own; templates may end answers with another one.
        self.ends = [token for token in end_marks(tokenizer) if token != tokenizer.eos_token_id]
        self.client = HTTPClient(config.server.url, config.server)
        self.is_tgi: bool | None = None
        self.model: str | None = None
        self._in_flight: dict[int, list[asyncio.Task[Completion]]] = {}
        self._asleep, self._generated = False, 0

    @property
    def version(self) -> int:
        return 0

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        if self._asleep:
            raise WorkerError(0, "generate", "the client is asleep; call wake() first")
        check_request(request, self.max_model_len, self._in_flight, True)
        self._in_flight[request.request_id] = []
        try:
            if self.is_tgi is None:
                self.is_tgi = await self._detect_tgi()
                self.model = self.config.server.model or (None if self.is_tgi else await self._served_model())
            tasks = self._in_flight[request.request_id]
            if tasks is _ABORTED_TASKS:
                return [Completion([], [], "aborted", (0, 0))] * request.sampling.n
            tasks += [asyncio.create_task(self._sample(request, number)) for number in range(request.sampling.n)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._in_flight.pop(request.request_id, None)
        completions = []
        for result in results:
            if isinstance(result, asyncio.CancelledError):  # abort(): the server returns no partial answer
                result = Completion([], [], "aborted", (0, 0))
            if isinstance(result, BaseException):
                raise result
            completions.append(result)
        return completions

    async def _detect_tgi(self) -> bool:
        try:
            info = await self.client.call("GET", "/info")
        except WorkerError:
            return False
        return isinstance(info, dict) and "model_id" in info

    async def _served_model(self) -> str:
        """The first model that an OpenAI-compatible server names."""
        try:
            return str((await self.client.call("GET", "/v1/models"))["data"][0]["id"])
        except (WorkerError, LookupError, TypeError):
            return "default"

    async def _sample(self, request: GenerationRequest, number: int) -> Completion:
        params, seed = request.sampling, derive_seed(request.sampling.seed, request.stream_id, number) % 2**31
        generate = self._generate_tgi if self.is_tgi else self._generate_openai
        try:
            completion = await generate(request.prompt_ids, params, seed)
        except (LookupError, TypeError, ValueError) as error:
            url, kind = self.client.url, "TGI" if self.is_tgi else "OpenAI-compatible"
            raise WorkerError(0, "generate", f"{url} does not answer as {kind} servers do: {error!r}") from error
        self._generated += len(completion.token_ids)
        return completion

    async def _generate_tgi(self, prompt_ids: list[int], params: SamplingParams, seed: int) -> Completion:
        if params.stop_token_ids or params.min_tokens or params.ignore_eos:
            raise ConfigError("TGI has neither stop_token_ids, min_tokens nor ignore_eos; leave them at their defaults")
        parameters: dict[str, Any] = {
            "max_new_tokens": params.max_tokens, "details": True, "seed": seed, "do_sample": params.temperature > 0,
            "stop": [*params.stop, *map(str, self.tokenizer.convert_ids_to_tokens(self.ends))],
        }  # fmt: skip
        if params.presence_penalty:
            raise ConfigError("TGI has no presence_penalty; leave it out, or use frequency_penalty")
        if params.min_p or params.logit_bias:
            raise ConfigError("TGI has neither min_p nor logit_bias; leave them out")
        extra = {"frequency_penalty": params.frequency_penalty, "top_n_tokens": params.top_logprobs}
        parameters |= {name: value for name, value in extra.items() if value}
        parameters |= {"repetition_penalty": params.repetition_penalty} if params.repetition_penalty != 1 else {}
        if schema := response_schema(params):
            parameters["grammar"] = {"type": "json", "value": json.loads(schema)}
        if params.temperature > 0:
            parameters["temperature"] = params.temperature
            parameters |= {"top_p": params.top_p} if params.top_p < 1 else {}
            parameters |= {"top_k": params.top_k} if params.top_k > 0 else {}
        text, bos = self.tokenizer.decode(prompt_ids), self.tokenizer.bos_token
        if bos and text.startswith(bos) and self.tokenizer(text)["input_ids"] != prompt_ids:
            text = text.removeprefix(bos)  # the server adds one itself
        reply = await self.client.call("POST", "/generate", {"inputs": text, "parameters": parameters})
        details = reply["details"]
        tokens = [(int(t["id"]), float(t["logprob"] or 0.0)) for t in details["tokens"]]
        reason = _REASONS.get(str(details["finish_reason"]), "aborted")
        top = [[(int(t["id"]), float(t["logprob"])) for t in entry] for entry in details.get("top_tokens") or ()]
        return Completion([i for i, _ in tokens], [v for _, v in tokens], reason, (0, 0), top or None)

    async def _generate_openai(self, prompt_ids: list[int], params: SamplingParams, seed: int) -> Completion:
        if params.top_logprobs:
            raise ConfigError("top_logprobs: an OpenAI-compatible server behind this one reports no token ids of them")
        body: dict[str, Any] = {
            "model": self.model, "prompt": prompt_ids, "max_tokens": params.max_tokens,
            "temperature": params.temperature, "top_p": params.top_p, "seed": seed, "logprobs": 0,
            "stop": list(params.stop) or None, "return_token_ids": True,
        }  # fmt: skip
        extra: dict[str, Any] = {"top_k": params.top_k, "min_tokens": params.min_tokens}
        extra["stop_token_ids"] = [*params.stop_token_ids, *(() if params.ignore_eos else self.ends)]
        extra |= {"frequency_penalty": params.frequency_penalty, "presence_penalty": params.presence_penalty}
        body |= {name: value for name, value in extra.items() if value not in (-1, 0, [])}
        body |= {"repetition_penalty": params.repetition_penalty} if params.repetition_penalty != 1 else {}
        body |= {"min_p": params.min_p} if params.min_p else {}
        body |= {"logit_bias": {str(i): bias for i, bias in params.logit_bias}} if params.logit_bias else {}
        body |= {"response_format": json.loads(params.response_format)} if params.response_format else {}
        body |= {"ignore_eos": True} if params.ignore_eos else {}
        [choice] = (await self.client.call("POST", "/v1/completions", body))["choices"]
        ids = choice.get("token_ids") or self.tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
        token_logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        logprobs = [float(v) for v in token_logprobs] if len(token_logprobs) == len(ids) else [0.0] * len(ids)
        return Completion(ids, logprobs, _REASONS.get(choice["finish_reason"], "aborted"), (0, 0))

    async def update_weights(self, weights: Any, version: int) -> None:
        raise ConfigError(why_not_trained(self.config.name))

    async def sleep(self) -> None:
        self._asleep = True

    async def wake(self) -> None:
        self._asleep = False

    async def abort(self, request_id: int | None = None) -> None:
        for number, tasks in self._in_flight.items():
            if request_id in (None, number):
                for task in tasks:
                    task.cancel()
                if not tasks:  # not sent yet
                    self._in_flight[number] = _ABORTED_TASKS

    async def stats(self) -> list[EngineStats]:
        return [EngineStats({"generated_tokens": self._generated})]
