"""The token stream of a conversation: answers as sampled, other turns as the template writes them.

The stream starts with the prompt; `response_mask` and `response_logprobs` describe what follows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from verl.agent.incremental_template import IncrementalTemplate
from verl.data.chat import Message
from verl.utils.errors import DataError


@dataclass(frozen=True)
class MergeResult:
    """The stream after a turn was appended."""

    token_ids: list[int]  # the whole stream
    appended_token_count: int  # all tokens by which it grew
    kind: str  # "assistant" or "non_assistant"
    inserted_token_ids: list[int] = field(default_factory=list)  # boundary tokens among them: never trained
    removed_prefix_token_count: int = 0  # always 0: no token is ever taken back


Merged = tuple[MergeResult, list[int], list[float] | None]


def merge_answer(
    stream: Sequence[int],
    answer: Sequence[int],
    response_mask: Sequence[int],
    response_logprobs: Sequence[float] | None,
    answer_logprobs: Sequence[float] | None,
) -> Merged:
    """The stream with a sampled answer, whose mask is 1. DataError where log-probs and tokens do not agree."""
    _check_stream(stream, response_mask, response_logprobs)
    result = MergeResult([*stream, *answer], len(answer), "assistant")
    mask = [*response_mask, *[1] * len(answer)]
    if answer_logprobs is not None and len(answer_logprobs) != len(answer):
        raise DataError(f"an answer of {len(answer)} tokens comes with {len(answer_logprobs)} log-probs")
    if not response_logprobs and any(response_mask):  # the loop keeps none: they are taken from generate() at the end
        return result, mask, None if response_logprobs is None else []
    if answer_logprobs is None:
        if response_logprobs:
            raise DataError("assistant_logprobs is None, but the turns before have log-probs; give those of generate()")
        return result, mask, None if response_logprobs is None else []
    before = list(response_logprobs) if response_logprobs else [0.0] * len(response_mask)
    return result, mask, [*before, *answer_logprobs]


def merge_turns(
    template: IncrementalTemplate,
    previous: Sequence[Message],
    updated: Sequence[Message],
    stream: Sequence[int],
    response_mask: Sequence[int],
    response_logprobs: Sequence[float] | None,
) -> Merged:
    """The stream with the messages of `updated` that `previous` lacks, and the generation prompt; their mask is 0.

    Answers among the first new messages are in the stream already. DataError where `updated` does not begin with
    `previous`, has no new turn, or has an answer after one.
    """
    _check_stream(stream, response_mask, response_logprobs)
    if list(updated[: len(previous)]) != list(previous):
        raise DataError("updated_messages must begin with previous_messages; an agent loop may only append turns")
    new = list(updated[len(previous) :])
    while new and new[0].get("role") == "assistant":
        new.pop(0)
    if not new or any(message.get("role") == "assistant" for message in new):
        roles = ", ".join(str(message.get("role")) for message in new) or "none"
        raise DataError(
            f"ct_merge_non_assistant_msg appends tool, user and system turns, and the new roles are: {roles}; append "
            "an answer with ct_merge_assistant_token, then the turns that follow it"
        )
    inserted = template.missing_end_token(stream)
    appended = template.appended_tokens(new, stream)
    result = MergeResult([*stream, *appended], len(appended), "non_assistant", inserted)
    zeros = [0.0] * len(appended)
    return result, [*response_mask, *[0] * len(appended)], _extend(response_logprobs, response_mask, zeros)


def _extend(
    logprobs: Sequence[float] | None, response_mask: Sequence[int], zeros: Sequence[float]
) -> list[float] | None:
    if logprobs is None:
        return None
    return [] if not logprobs and response_mask else [*logprobs, *zeros]


def _check_stream(stream: Sequence[int], mask: Sequence[int], logprobs: Sequence[float] | None) -> None:
    if len(mask) > len(stream) or (logprobs and len(logprobs) != len(mask)):
        raise DataError(
            f"a stream of {len(stream)} tokens comes with {len(mask)} mask values and {len(logprobs or [])} log-probs "
            "of its response; mask and log-probs must be as long as the response"
        )
