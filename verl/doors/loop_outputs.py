"""The results of published agent loops: what may be in one, and the trajectory that it is."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from verl.agent.loop import LoopTimings as AgentLoopMetrics
from verl.agent.loop import Transcript
from verl.data.trajectory import Trajectory
from verl.doors.llm_server import VERSION_FIELDS, LLMServerClient, refuse_media
from verl.utils.errors import DataError
from verl.workers.rollout.base import Completion

MAX_LOGPROB = 0.01  # a log-prob is at most 0, and rounding moves it a little
# of extra_fields: the others become `Trajectory.loop_fields`
_FIELDS_WITH_A_PLACE = ("reward_extra_info", "tool_rewards", "stop_reason", *VERSION_FIELDS)


@dataclass
class AgentLoopOutput:
    """One conversation: the prompt, and everything after it. `response_mask` is 1 on sampled tokens."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None  # set it to skip the reward function
    num_turns: int = 0
    metrics: AgentLoopMetrics | dict[str, float] = field(default_factory=AgentLoopMetrics)
    tool_errors: list[tuple[str, str]] = field(default_factory=list)  # (tool, why) of each call whose tool failed
    extra_fields: dict[str, Any] = field(default_factory=dict)
    routed_experts: Any = None
    mm_processor_kwargs: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, `metrics` as a dictionary."""
        return asdict(self)


def read_outputs(result: Any, server: LLMServerClient, row: int) -> list[Trajectory]:
    """The trajectories that a loop returned; DataError names what cannot be trained on."""
    outputs = result if isinstance(result, list) else [result]
    if not outputs or not all(isinstance(output, AgentLoopOutput) for output in outputs):
        raise DataError(f"it returned {result!r:.200}, not AgentLoopOutput")
    return [read_output(output, server, row) for output in outputs]


def read_output(output: AgentLoopOutput, server: LLMServerClient, row: int) -> Trajectory:
    """The trajectory of one output.

    The answers that `server` gave say the versions, and the log-probs where the output has none. Its columns may be
    arrays or tensors.
    """
    _check_facts(output)
    prompt_ids = server.check_tokens(output.prompt_ids, "prompt_ids")
    if not prompt_ids:
        raise DataError("prompt_ids is empty; a conversation starts with at least one token that was not sampled")
    ids = server.check_tokens(output.response_ids, "response_ids")
    mask = [int(v) for v in _response_values(output.response_mask, "response_mask", len(ids), (0, 1))]
    transcript = sampled_transcript(prompt_ids, ids, mask, server.answers)
    if output.response_logprobs is not None and len(output.response_logprobs):
        values = _response_values(output.response_logprobs, "response_logprobs", len(ids))
        transcript.response_logprobs = [_logprob(v, i) for i, v in enumerate(values)]
    extra = output.extra_fields
    given = {"stop_reason": extra["stop_reason"]} if "stop_reason" in extra else {}
    return transcript.trajectory(
        server.policy,
        row,
        output.metrics,
        reward=output.reward_score,
        num_turns=output.num_turns,
        tool_rewards=extra.get("tool_rewards"),
        tool_errors=output.tool_errors,
        loop_fields={
            **{name: value for name, value in extra.items() if name not in _FIELDS_WITH_A_PLACE},
            **extra.get("reward_extra_info", {}),
        },
        **given,
    )


def sampled_transcript(
    prompt_ids: list[int], ids: Sequence[int], mask: Sequence[int], answers: Sequence[Completion]
) -> Transcript:
    """The conversation of these tokens, in which those with mask 1 come from `answers`, in any order.

    A run of marked tokens must consist of whole answers; the first may lack its beginning, the last its end.
    """
    found, unused = Transcript(prompt_ids=prompt_ids), list(answers)
    while (position := len(found.response_ids)) < len(ids):
        marked = mask[position]
        end = next((i for i in range(position, len(ids)) if mask[i] != marked), len(ids))
        span = list(ids[position:end])
        if not marked:
            found.add_turns(span)
            continue
        match = _match_answer(span, unused, anywhere=position == 0 or not mask[position - 1])
        if not match.size:
            raise DataError(
                f"an agent loop marks response tokens {position} to {end - 1} as sampled, but the policy did not "
                f"sample them: {span[:8]} …; keep `token_ids` of generate() as they are (text that is tokenised again "
                "gives other ids), and mark everything else with 0 in response_mask "
                "(docs/extend/own_environment.md)"
            )
        found.add_answer(unused.pop(match.answer), match.start, match.size)
    return found


class _Match(NamedTuple):
    answer: int  # index of the answer
    start: int  # offset in it where the span begins
    size: int  # equal tokens from there; 0: there is no match


def _match_answer(span: list[int], answers: Sequence[Completion], anywhere: bool) -> _Match:
    """Where `span` begins in an answer: at the start of one, or else, with `anywhere`, inside one."""

    def overlap(number: int, start: int = 0) -> int:
        candidate = answers[number].token_ids[start : start + len(span)]
        return len(candidate) if candidate == span[: len(candidate)] else 0

    best = max(range(len(answers)), key=overlap, default=-1)  # ties: the first one
    if best >= 0 and overlap(best):
        return _Match(best, 0, overlap(best))
    places = ((n, i) for n, a in enumerate(answers) for i, token in enumerate(a.token_ids) if token == span[0])
    return next((_Match(n, i, overlap(n, i)) for n, i in places if anywhere and overlap(n, i)), _Match(0, 0, 0))


def _check_facts(output: AgentLoopOutput) -> None:
    """DataError for what cannot be recorded, besides tokens."""
    refuse_media(image_or_video=any((output.multi_modal_data or {}).values()), image_options=output.mm_processor_kwargs)
    if output.routed_experts is not None:
        raise DataError("an agent loop gives routed_experts; routing replay is still to come, leave it None")
    if output.reward_score is not None and not _is_finite(output.reward_score):
        raise DataError(f"reward_score={output.reward_score!r:.80} must be a finite number, or None for the reward")
    for name in ("extra_fields", "metrics"):
        value = getattr(output, name)
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            continue
        if name == "extra_fields" or isinstance(value, dict) or not hasattr(value, "__dataclass_fields__"):
            raise DataError(f"{name}={value!r:.80} must be a dictionary with names as keys")
    if not isinstance(output.extra_fields.get("reward_extra_info", {}), Mapping):
        raise DataError("extra_fields['reward_extra_info'] must be a dictionary of columns for the reward's log")
    rewards = output.extra_fields.get("tool_rewards")
    if isinstance(rewards, str) or not hasattr([] if rewards is None else rewards, "__len__"):
        raise DataError(f"extra_fields['tool_rewards']={rewards!r:.80} must be a list with one number per tool call")
    if isinstance(output.num_turns, bool) or not isinstance(output.num_turns, int) or output.num_turns < 0:
        raise DataError(f"num_turns={output.num_turns!r:.80} must be a whole number from 0")


def _response_values(values: Any, name: str, size: int, allowed: Collection[Any] = ()) -> list[Any]:
    """`values` as a list of `size` items, each among `allowed` unless that is empty."""
    try:
        items = values.tolist() if hasattr(values, "tolist") else list(values)
    except TypeError:
        raise DataError(f"{name} is {type(values).__name__}, not a list") from None
    if len(items) != size:
        raise DataError(f"there are {size} response_ids, but {len(items)} values in {name}; they must agree")
    for position, item in enumerate(items):
        if allowed and (isinstance(item, list | str | None) or item not in allowed):
            raise DataError(
                f"{name}[{position}]={item!r:.80}; allowed: 1 for tokens that the policy sampled, 0 for all others"
            )
    return items


def _logprob(value: Any, position: int) -> float:
    if not _is_finite(value) or value > MAX_LOGPROB:
        raise DataError(
            f"response_logprobs[{position}]={value!r:.80}; a log-prob is a finite number of at most 0: give those of "
            "generate(), 0 for tokens that were not sampled, or None for all"
        )
    return float(value)


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, str) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False
