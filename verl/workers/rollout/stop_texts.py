"""Stop strings over sampled tokens."""

from collections.abc import Callable

from verl.workers.rollout.base import SamplingParams


def max_stop_tokens(params: SamplingParams) -> int:
    """How many of the last tokens can contain a stop string: a character is at most four byte-level tokens."""
    return 4 * max(map(len, params.stop), default=0) + 8


def completes_stop_text(
    params: SamplingParams, num_tokens: int, tail: list[int], decode: Callable[[list[int]], str] | None
) -> bool:
    """Whether the newest of `num_tokens` tokens completed a stop string. `tail`: the last tokens."""
    if not params.stop or num_tokens < params.min_tokens or decode is None:
        return False
    text = decode(tail)
    return any(stop in text for stop in params.stop)
