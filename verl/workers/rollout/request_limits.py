"""The limits of a generation request."""

import math
from collections.abc import Collection

from verl.utils.errors import DataError
from verl.workers.rollout.base import GenerationRequest

MAX_TOP_LOGPROBS, MAX_LOGIT_BIAS = 20, 100
TEMPERATURE_RANGE = (1e-6, 1e6)  # outside it, logits / temperature is not finite


def check_request(
    request: GenerationRequest,
    max_model_len: int,
    in_flight: Collection[int],
    has_tokenizer: bool,
    vocab_size: float = math.inf,
) -> None:
    """Raise DataError for a request that cannot be answered, before it can make the running requests fail.

    `max_model_len`: maximum tokens of one sequence; `vocab_size`: number of token ids, if known.
    """
    params, prompt = request.sampling, len(request.prompt_ids)
    if request.request_id in in_flight:
        raise DataError(f"request_id {request.request_id} is already in flight; give each request its own")
    if not prompt:
        raise DataError(f"request {request.request_id} has an empty prompt; give at least one token (a BOS token)")
    if prompt + params.max_tokens > max_model_len:
        raise DataError(
            f"request {request.request_id}: {prompt} prompt tokens + max_tokens={params.max_tokens} exceed the "
            f"{max_model_len} tokens one sequence may hold; shorten the prompt (data.max_prompt_length), lower "
            f"max_tokens (at most {max(max_model_len - prompt, 0)} here) or "
            f"raise actor_rollout_ref.rollout.max_model_len"
        )
    lowest, highest = TEMPERATURE_RANGE
    temperature_is_valid = params.temperature == 0 or lowest <= params.temperature <= highest
    if params.n < 1 or params.max_tokens < 1 or not 0 < params.top_p <= 1 or not temperature_is_valid:
        raise DataError(
            f"request {request.request_id}: n={params.n} and max_tokens={params.max_tokens} must be at least 1, "
            f"top_p={params.top_p} in (0, 1], temperature={params.temperature} 0 or in [{lowest:g}, {highest:g}]"
        )
    sampled = request.sampled
    if len(sampled) not in (0, params.n) or (sampled and not any(sample.is_unfinished for sample in sampled)):
        raise DataError(
            f"request {request.request_id} comes with {len(sampled)} samples, n={params.n}; give none or all of them, "
            "one of which is unfinished"
        )
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
        wrong = next(token for token in request.prompt_ids if not 0 <= token < vocab_size)
        raise DataError(f"request {request.request_id}: token id {wrong} of the prompt is not in 0 to {vocab_size - 1}")
    penalties = (params.frequency_penalty, params.presence_penalty)
    if not all(-2 <= value <= 2 for value in penalties) or not 0.01 <= params.repetition_penalty <= 100:
        raise DataError(
            f"request {request.request_id}: frequency_penalty={penalties[0]} and presence_penalty={penalties[1]} must "
            f"be in [-2, 2], repetition_penalty={params.repetition_penalty} in [0.01, 100]"
        )
    if not 0 <= params.min_p <= 1:
        raise DataError(f"request {request.request_id}: min_p={params.min_p} must be in [0, 1]")
    for token, bias in params.logit_bias:
        if not 0 <= token < vocab_size or not abs(bias) <= MAX_LOGIT_BIAS:
            raise DataError(
                f"request {request.request_id}: logit_bias {{{token}: {bias}}} must give token ids in 0 to "
                f"{vocab_size - 1} a number in [{-MAX_LOGIT_BIAS}, {MAX_LOGIT_BIAS}]"
            )
    if not 0 <= params.top_logprobs <= MAX_TOP_LOGPROBS:
        raise DataError(f"top_logprobs={params.top_logprobs} must be in 0 to {MAX_TOP_LOGPROBS}")
    if params.stop_token_ids and not (min(params.stop_token_ids) >= 0 and max(params.stop_token_ids) < vocab_size):
        raise DataError(f"stop_token_ids={list(params.stop_token_ids)} must be in 0 to {vocab_size - 1}")
    if params.stop and not has_tokenizer:
        raise DataError("stop strings need a tokenizer; give the engine one, or use stop_token_ids")
