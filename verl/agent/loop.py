"""Base class of agent loops: user code that turns one prompt into one conversation with the policy.

A loop gets token ids only from `server_manager.generate` and the `ct_*` helpers, so sampled token ids are kept
unchanged and the response mask is exact.
"""

import asyncio
import functools
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from verl.agent.continuous_tokens import Merged, merge_answer, merge_turns
from verl.agent.incremental_template import IncrementalTemplate
from verl.agent.llm_server import LLMServerClient, TokenOutput, refuse_media
from verl.agent.tool_schemas import schema_dict
from verl.agent.tools import BaseTool
from verl.data.chat import Message
from verl.data.trajectory import Trajectory
from verl.utils.errors import DataError
from verl.utils.registry import Registry


@dataclass
class AgentLoopMetrics:
    """Seconds that a conversation spent per activity."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


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

    def to_trajectory(self, group_id: int, row: int, answers: Sequence[TokenOutput], sample: int = -1) -> Trajectory:
        """This output of conversation `sample`. `answers` (all that the loop got) give the policy versions, and the
        log-probs where `response_logprobs` is None. DataError where other tokens are marked as sampled, or lengths
        differ."""
        refuse_media(image_or_video=any((self.multi_modal_data or {}).values()), image_options=self.mm_processor_kwargs)
        if self.routed_experts is not None:
            raise DataError("an agent loop gives routed_experts; routing replay is still to come, leave it None")
        size = len(self.response_ids)
        if len(self.response_mask) != size or len(self.response_logprobs or self.response_ids) != size:
            raise DataError(
                f"an agent loop returned {size} response tokens, {len(self.response_mask)} mask values and "
                f"{len(self.response_logprobs or [])} log-probs; they must agree"
            )
        logprobs, used, by_version = sampled_logprobs(self.response_ids, self.response_mask, answers)
        logprobs = list(self.response_logprobs) if self.response_logprobs else logprobs
        mask = torch.tensor([0] * len(self.prompt_ids) + self.response_mask, dtype=torch.bool)
        values = torch.tensor([0.0] * len(self.prompt_ids) + logprobs, dtype=torch.float32)
        versions = [answer.extra_fields[name] for answer in used for name in ("min_global_steps", "max_global_steps")]
        reason = str(used[-1].stop_reason) if used else "stop"
        return Trajectory(
            tokens=torch.tensor([*self.prompt_ids, *self.response_ids], dtype=torch.int64),
            loss_mask=mask,
            rollout_logprobs=values * mask,
            group_id=group_id,
            conversation=sample,
            row=row,
            reward=self.reward_score,
            policy_version=(min(versions, default=0), max(versions, default=0)),
            segments=tuple(by_version) if len(by_version) > 1 else (),
            stop_reason=self.extra_fields.get("stop_reason", "stop" if reason == "completed" else reason),
            num_turns=self.num_turns,
            tool_rewards=self.extra_fields.get("tool_rewards"),
            tool_errors=self.tool_errors,
            loop_timings=self.metrics if isinstance(self.metrics, dict) else asdict(self.metrics),
            loop_fields={
                **{name: value for name, value in self.extra_fields.items() if name not in _FIELDS_WITH_A_PLACE},
                **self.extra_fields.get("reward_extra_info", {}),
            },
        )


# of extra_fields: the others become `Trajectory.loop_fields`
_FIELDS_WITH_A_PLACE = ("reward_extra_info", "tool_rewards", "stop_reason", "min_global_steps", "max_global_steps")


def sampled_logprobs(
    ids: Sequence[int], mask: Sequence[int], answers: Sequence[TokenOutput]
) -> tuple[list[float], list[TokenOutput], list[tuple[int, int]]]:
    """Log-probs of the tokens where `mask` is 1 (0 elsewhere), the answers these tokens come from, in order, and their
    number by version of the weights that sampled them.

    A run of marked tokens must consist of whole answers; the first may lack its beginning, the last its end.
    """
    logprobs, used, unused, position = [0.0] * len(ids), [], list(answers), 0
    versions: list[int] = []  # of each sampled token
    while position < len(ids):
        end = next((i for i in range(position, len(ids)) if not mask[i]), len(ids))
        if end == position:
            position += 1
            continue
        span = list(ids[position:end])
        match = _match_answer(span, unused, anywhere=position == 0 or not mask[position - 1])
        if not match.size:
            raise DataError(
                f"an agent loop marks response tokens {position} to {end - 1} as sampled, but the policy did not "
                f"sample them: {span[:8]} …; keep `token_ids` of generate() as they are (text that is tokenised again "
                "gives other ids), and mark everything else with 0 in response_mask "
                "(docs/extend/own_environment.md)"
            )
        answer = unused.pop(match.answer)
        answer_logprobs = answer.log_probs or [0.0] * len(answer.token_ids)
        logprobs[position : position + match.size] = answer_logprobs[match.start : match.start + match.size]
        versions += versions_of(answer)[match.start : match.start + match.size]
        used.append(answer)
        position += match.size
    return logprobs, used, [(version, len(list(same))) for version, same in groupby(versions)]


def versions_of(answer: TokenOutput) -> list[int]:
    """The version that sampled each of its tokens."""
    segments = answer.segments or ((answer.extra_fields["max_global_steps"], len(answer.token_ids)),)
    return [version for version, count in segments for _ in range(count)]


class _Match(NamedTuple):
    answer: int  # index of the answer
    start: int  # offset in it where the span begins
    size: int  # equal tokens from there; 0: there is no match


def _match_answer(span: list[int], answers: Sequence[TokenOutput], anywhere: bool) -> _Match:
    """Where `span` begins in an answer: at the start of one, or else, with `anywhere`, inside one."""

    def overlap(number: int, start: int = 0) -> int:
        candidate = answers[number].token_ids[start : start + len(span)]
        return len(candidate) if candidate == span[: len(candidate)] else 0

    best = max(range(len(answers)), key=overlap, default=-1)  # ties: the first one
    if best >= 0 and overlap(best):
        return _Match(best, 0, overlap(best))
    places = ((n, i) for n, a in enumerate(answers) for i, token in enumerate(a.token_ids) if token == span[0])
    return next((_Match(n, i, overlap(n, i)) for n, i in places if anywhere and overlap(n, i)), _Match(0, 0, 0))


@dataclass(frozen=True)
class ConfigWrap:
    """The configuration that a loop gets, as `.config`."""

    config: Any


@dataclass(frozen=True)
class ToolListWrap:
    """The tools of the run, as `.tools`."""

    tools: list[BaseTool]


class AgentLoopBase(ABC):
    """Base class of agent loops. Every sample gets a new instance; `run` gets the row's columns by name."""

    def __init__(
        self,
        trainer_config: ConfigWrap,
        server_manager: LLMServerClient,
        tokenizer: PreTrainedTokenizerBase,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: ConfigWrap | None = None,
        hf_model_type: str | None = None,
        tools: ToolListWrap | None = None,
        **kwargs: Any,
    ):
        self.config, self.data_config = trainer_config.config, data_config.config if data_config else None
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor
        self.tools = {tool.name: tool for tool in (tools.tools if tools else [])}
        self.incremental_template = make_incremental_template(self.config, tokenizer, list(self.tools.values()))

    @functools.cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop, whose `run_in_executor` takes what blocks."""
        return asyncio.get_running_loop()

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> "AgentLoopOutput | list[AgentLoopOutput]":
        """The conversation. kwargs: raw_prompt, index, tools_kwargs, extra_info and every other column of the row."""

    async def process_multi_modal_info(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Images, videos and audio of the messages by kind: none so far. DataError where a message has some."""
        for message in messages:
            parts = message.get("content")
            for part in parts if isinstance(parts, list) else []:
                kind = str(part.get("type", "text")) if isinstance(part, Mapping) else "text"
                refuse_media(**{kind: part})
        return {}

    async def ct_build_initial_tokens(
        self, messages: Sequence[Message], tools: Any = None, images: Any = None, videos: Any = None, audios: Any = None
    ) -> list[int]:
        """Token ids of the initial messages, then the generation prompt. `tools`: schemas instead of the run's."""
        refuse_media(images=images, videos=videos, audios=audios)
        self._replace_tools(tools)
        return self.incremental_template.initial_tokens(messages)

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: Sequence[int],
        assistant_token_ids: Sequence[int],
        response_mask: Sequence[int],
        response_logprobs: Sequence[float] | None = None,
        assistant_logprobs: Sequence[float] | None = None,
    ) -> Merged:
        """(merge result, mask, log-probs) of the conversation with an answer appended, unchanged."""
        return merge_answer(
            runtime_token_ids, assistant_token_ids, response_mask, response_logprobs, assistant_logprobs
        )

    async def ct_merge_non_assistant_msg(
        self,
        previous_messages: Sequence[Message],
        updated_messages: Sequence[Message],
        runtime_token_ids: Sequence[int],
        response_mask: Sequence[int],
        response_logprobs: Sequence[float] | None = None,
        tools: Any = None,
        **media: Any,
    ) -> Merged:
        """(merge result, mask, log-probs) of the conversation with the turns that `updated_messages` has more than
        `previous_messages`, then the generation prompt."""
        refuse_media(**media)
        self._replace_tools(tools)
        template = self.incremental_template
        return merge_turns(
            template, previous_messages, updated_messages, runtime_token_ids, response_mask, response_logprobs
        )

    def _replace_tools(self, tools: Any) -> None:
        if tools is not None:
            kwargs = self.incremental_template.template_kwargs
            schemas = [schema_dict(tool) for tool in tools]
            self.incremental_template = IncrementalTemplate(self.tokenizer, schemas, template_kwargs=kwargs)


AGENT_LOOPS: Registry[Callable[..., AgentLoopBase]] = Registry("agent loop")
register = AGENT_LOOPS.register


def make_incremental_template(
    config: Any, tokenizer: PreTrainedTokenizerBase, tools: Sequence[BaseTool]
) -> IncrementalTemplate:
    """The incremental template for `tools`, with the template variables of `data.apply_chat_template_kwargs`."""
    schemas = [schema_dict(tool.tool_schema) for tool in tools]
    return IncrementalTemplate(tokenizer, schemas, template_kwargs=config.data.apply_chat_template_kwargs)


def new_request_id() -> str:
    """A unique id for a conversation."""
    return uuid.uuid4().hex
