"""The policy as an agent loop sees it: it asks for an answer to token ids, and gets token ids."""

import asyncio
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from verl.observe.tracing.recorder import fill_turn
from verl.observe.tracing.spans import GENERATION, span
from verl.utils.errors import DataError
from verl.utils.seeds import derive_seed
from verl.workers.rollout.base import Completion, GenerationRequest, RolloutEngine, SamplingParams


@dataclass
class TokenOutput:
    """One answer of the policy."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None  # "completed", "length" or "aborted"
    num_preempted: int = -1
    extra_fields: dict[str, Any] = field(default_factory=dict)  # min_global_steps, max_global_steps: policy versions
    routed_experts: Any = None  # no engine reports them so far
    segments: tuple[tuple[int, int], ...] = ()  # (version, tokens that it sampled), in order, if there were several


class LLMServerClient:
    """The policy for the agent loop of one sample; all turns of a conversation go to the same replica."""

    def __init__(
        self,
        engine: RolloutEngine,
        sampling: SamplingParams,
        max_sequence_length: int,
        group_id: int,
        sample_index: int,
        vocabulary_size: int | None = None,
    ):
        self.vocabulary_size = vocabulary_size
        self.generating = 0  # calls of `generate` in progress
        self.failure: BaseException | None = None  # what the engine raised last
        self.engine, self.sampling, self.max_sequence_length = engine, sampling, max_sequence_length
        self.group_id, self.sample_index = group_id, sample_index
        self.answers: list[TokenOutput] = []
        self.turn = 0

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: Mapping[str, Any] | None = None, **media: Any
    ) -> TokenOutput:
        """One answer to `prompt_ids`. Every turn of every sample has its own random stream.

        It has at most `max_tokens` and fits `max_sequence_length`; it is empty (stop_reason "length") at that limit.
        """
        refuse_media(**media)
        prompt_ids = self.check_tokens(prompt_ids, "prompt_ids of generate()")
        if not prompt_ids:
            raise DataError("prompt_ids of generate() is empty; give the conversation so far")
        if self.turn >= (most := max(MIN_TURN_LIMIT, self.max_sequence_length)):
            raise DataError(f"it asked for an answer {most} times, more often than tokens fit; end the loop before")
        request_number = derive_seed(self.group_id, self.sample_index, self.turn)
        self.turn += 1
        params = {
            n: v for n, v in (sampling_params or {}).items() if v is not None and v != _NEUTRAL_SAMPLING_VALUES.get(n)
        }
        params.pop("logprobs", None)  # log-probs are always returned
        unknown = sorted(params.keys() - _SUPPORTED_SAMPLING_PARAMS)
        if unknown:
            raise DataError(
                f"sampling_params[{unknown[0]!r}]={params[unknown[0]]!r} of an agent loop is not known to the rollout "
                f"engines; known: {', '.join(sorted(_SUPPORTED_SAMPLING_PARAMS))}"
            )
        for name in ("stop", "stop_token_ids"):
            more = params.get(name, ())
            params[name] = (*getattr(self.sampling, name), *([more] if isinstance(more, str) else more))
        token_budget = min(
            params.get("max_tokens", self.sampling.max_tokens), self.max_sequence_length - len(prompt_ids)
        )
        if token_budget < 1:
            await asyncio.sleep(0)  # a loop that asks on must not stop the others
            return TokenOutput([], [], "length", extra_fields=dict.fromkeys(_VERSION_FIELDS, self.engine.version))
        sampling = replace(self.sampling, **{**params, "n": 1, "max_tokens": token_budget})
        request = GenerationRequest(
            request_number, prompt_ids, sampling, conversation=derive_seed(self.group_id, self.sample_index)
        )
        with span("generate", GENERATION) as traced:
            completion = await self._ask_engine(request)
        if traced is not None:
            c = completion
            fill_turn(traced, len(prompt_ids), c.token_ids, c.logprobs, c.stop_reason, c.policy_version)
        answer = TokenOutput(
            completion.token_ids,
            completion.logprobs,
            "completed" if completion.stop_reason == "stop" else completion.stop_reason,
            extra_fields=dict(zip(_VERSION_FIELDS, completion.policy_version, strict=True)),
            segments=completion.segments,
        )
        self.answers.append(replace(answer, token_ids=list(answer.token_ids)))  # the loop may change its own list
        return answer

    async def _ask_engine(self, request: GenerationRequest) -> Completion:
        self.generating += 1
        try:
            [completion] = await self.engine.generate(request)
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.generating -= 1
        return completion

    def check_tokens(self, values: Any, name: str) -> list[int]:
        """`values` as a list of token ids of the vocabulary; DataError names the first other one."""
        ids = whole_numbers(values, name)
        size = self.vocabulary_size
        if size is None or not ids or (min(ids) >= 0 and max(ids) < size):
            return ids
        sampled = {token for answer in self.answers for token in answer.token_ids}  # also beyond the tokenizer's
        for position, token in enumerate(ids):
            if not 0 <= token < size and token not in sampled:
                raise DataError(f"{name}[{position}]={token} is outside the vocabulary; allowed: 0 to {size - 1}")
        return ids


MIN_TURN_LIMIT = 1000  # turns of a conversation in which only few tokens fit
_VERSION_FIELDS = ("min_global_steps", "max_global_steps")
_SUPPORTED_SAMPLING_PARAMS = {
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
}
_NEUTRAL_SAMPLING_VALUES = {
    "n": 1, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0,
}  # fmt: skip


def whole_numbers(values: Any, name: str) -> list[int]:
    """`values` (a list, an array or a one-dimensional tensor) as a list of Python integers."""
    try:
        items = values.tolist() if hasattr(values, "tolist") else list(values)
        if any(isinstance(item, bool) for item in items):
            raise TypeError
        return [operator.index(item) for item in items]
    except TypeError:
        raise DataError(f"{name}={values!r:.80} must be a list of token ids, whole numbers") from None


def refuse_media(**media: Any) -> None:
    """DataError where an agent loop passes images, videos or audio."""
    for name, value in media.items():
        if value and name.startswith(("image", "video", "audio")):
            raise DataError(f"an agent loop gives {name}={value!r:.80}; only text is supported so far")
