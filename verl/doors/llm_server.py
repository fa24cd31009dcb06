"""The policy as a published agent loop asks it: `server_manager.generate`."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from verl.agent.policy import Policy
from verl.utils.errors import DataError
from verl.workers.rollout.base import Completion, SamplingParams


@dataclass
class TokenOutput:
    """One answer of the policy."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None  # "completed", "length" or "aborted"
    num_preempted: int = -1
    extra_fields: dict[str, Any] = field(default_factory=dict)  # min_global_steps, max_global_steps: policy versions
    routed_experts: Any = None  # no engine reports them so far


class LLMServerClient:
    """The policy of one conversation in the words of a loop; remembers its answers. `vocabulary_size`: of tokens that
    a loop may use."""

    def __init__(self, policy: Policy, vocabulary_size: int | None = None):
        self.policy, self.vocabulary_size = policy, vocabulary_size
        self.answers: list[Completion] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: Mapping[str, Any] | None = None, **media: Any
    ) -> TokenOutput:
        """One answer to `prompt_ids`. Every turn of every sample has its own random stream.

        It has at most `max_tokens` and fits the sequence length; it is empty (stop_reason "length") at that limit.
        """
        refuse_media(**media)
        prompt_ids = self.check_tokens(prompt_ids, "prompt_ids of generate()")
        if not prompt_ids:
            raise DataError("prompt_ids of generate() is empty; give the conversation so far")
        if self.policy.turn >= (most := max(MIN_TURN_LIMIT, self.policy.max_sequence_length)):
            raise DataError(f"it asked for an answer {most} times, more often than tokens fit; end the loop before")
        answer = await self.policy.generate(prompt_ids, self.sampling(sampling_params or {}))
        self.answers.append(answer)
        return TokenOutput(
            list(answer.token_ids),  # the loop may change its own lists
            list(answer.logprobs),
            "completed" if answer.stop_reason == "stop" else answer.stop_reason,
            extra_fields=dict(zip(VERSION_FIELDS, answer.policy_version, strict=True)),
        )

    def sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        """The run's settings with those of a loop; DataError for one that engines do not know."""
        params = {n: v for n, v in given.items() if v is not None and v != _NEUTRAL_SAMPLING_VALUES.get(n)}
        params.pop("logprobs", None)  # log-probs are always returned
        unknown = sorted(params.keys() - SUPPORTED_PARAMS)
        if unknown:
            raise DataError(
                f"sampling_params[{unknown[0]!r}]={params[unknown[0]]!r} of an agent loop is not known to the rollout "
                f"engines; known: {', '.join(sorted(SUPPORTED_PARAMS))}"
            )
        for name in ("stop", "stop_token_ids"):
            more = params.get(name, ())
            params[name] = (*getattr(self.policy.sampling, name), *([more] if isinstance(more, str) else more))
        return replace(self.policy.sampling, **params)

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
VERSION_FIELDS = ("min_global_steps", "max_global_steps")
SUPPORTED_PARAMS = {
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
