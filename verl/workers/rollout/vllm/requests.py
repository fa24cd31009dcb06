"""Requests to vLLM: one for each sample of a request of ours."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.utils.seeds import derive_seed
from verl.workers.rollout.base import Completion, GenerationRequest
from verl.workers.rollout.partial_answer import PartialAnswer

PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")


@dataclass
class PendingRequest:
    """One request: its samples, and the future that its `generate` awaits."""

    request: GenerationRequest
    samples: list[PartialAnswer]
    future: "asyncio.Future[list[Completion]]"

    def add_token(self, sample: PartialAnswer, token: int, candidates: Any, version: int) -> None:
        """Append to one of `samples` what `version` has sampled; `candidates` are vLLM's log-probs in its place."""
        sample.add_token(token, candidates[token].logprob, version)
        if top := self.request.sampling.top_logprobs:
            ranked = sorted(((i, c.logprob) for i, c in candidates.items()), key=lambda pair: -pair[1])
            sample.alternatives.append(ranked[:top])

    def so_far(self, version: int) -> GenerationRequest:
        """The request with what was sampled of it; `version` samples now."""
        return replace(self.request, sampled=tuple(sample.completion(version) for sample in self.samples))


def sampling_params(request: GenerationRequest, sample: int, eos_token_ids: Sequence[int]) -> Any:
    """vLLM's parameters of one sample, which has a random stream of its own."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = request.sampling
    eos = () if params.ignore_eos else eos_token_ids
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k if params.top_k > 0 else 0,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=list(dict.fromkeys((*eos, *params.stop_token_ids))),
        ignore_eos=True,  # stop_token_ids has our EOS ids: vLLM has no tokenizer
        seed=derive_seed(params.seed, request.stream_id, sample),
        **{name: getattr(params, name) for name in PENALTIES},
        min_p=params.min_p,
        logit_bias=dict(params.logit_bias) or None,
        logprobs=params.top_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def logprobs_of_prompt(token_ids: Sequence[int], output: Any) -> list[float]:
    tokens = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [0.0, *(candidates[token].logprob for token, candidates in tokens)]
