"""Base class of agent loops: user code that turns one prompt into one conversation with the policy.

A loop gets token ids only from `server_manager.generate` and the `ct_*` helpers, so sampled token ids are kept
unchanged and the response mask is exact.
"""

import asyncio
import operator
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from verl.agent.continuous_tokens import Merged, merge_answer, merge_turns
from verl.agent.incremental_template import IncrementalTemplate
from verl.agent.tool_schemas import schema_dict
from verl.agent.tools import BaseTool
from verl.data.chat import Message
from verl.data.trajectory import Trajectory
from verl.utils.errors import DataError
from verl.utils.registry import Registry
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
    extra_fields: dict[str, Any] = field(default_factory=dict)
    routed_experts: Any = None
    mm_processor_kwargs: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, `metrics` as a dictionary."""
        return asdict(self)

    def to_trajectory(self, group_id: int, row: int, answers: "Sequence[TokenOutput]") -> Trajectory:
        """This output as a Trajectory. `answers` (all that the loop got) give the policy versions, and the log-probs
        where `response_logprobs` is None. DataError where other tokens are marked as sampled, or lengths differ."""
        refuse_media(image_or_video=any((self.multi_modal_data or {}).values()), image_options=self.mm_processor_kwargs)
        if self.routed_experts is not None:
            raise DataError("an agent loop gives routed_experts; routing replay is still to come, leave it None")
        size = len(self.response_ids)
        if len(self.response_mask) != size or len(self.response_logprobs or self.response_ids) != size:
            raise DataError(
                f"an agent loop returned {size} response tokens, {len(self.response_mask)} mask values and "
                f"{len(self.response_logprobs or [])} log-probs; they must agree"
            )
        logprobs, used = sampled_logprobs(self.response_ids, self.response_mask, answers)
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
            row=row,
            reward=self.reward_score,
            policy_version=(min(versions, default=0), max(versions, default=0)),
            stop_reason=self.extra_fields.get("stop_reason", "stop" if reason == "completed" else reason),
            num_turns=self.num_turns,
            tool_rewards=self.extra_fields.get("tool_rewards"),
            loop_timings=self.metrics if isinstance(self.metrics, dict) else asdict(self.metrics),
            loop_fields={
                **{name: value for name, value in self.extra_fields.items() if name not in _FIELDS_WITH_A_PLACE},
                **self.extra_fields.get("reward_extra_info", {}),
            },
        )


# of extra_fields: the others become `Trajectory.loop_fields`
_FIELDS_WITH_A_PLACE = ("reward_extra_info", "tool_rewards", "stop_reason", "min_global_steps", "max_global_steps")


def sampled_logprobs(
    ids: Sequence[int], mask: Sequence[int], answers: "Sequence[TokenOutput]"
) -> "tuple[list[float], list[TokenOutput]]":
    """Log-probs of the tokens where `mask` is 1 (0 elsewhere), and the answers these tokens come from, in order.

    A run of marked tokens must consist of whole answers; the first may lack its beginning, the last its end.
    """
    logprobs, used, unused, position = [0.0] * len(ids), [], list(answers), 0
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
                "(docs/own_environment.md)"
            )
        answer = unused.pop(match.answer)
        answer_logprobs = answer.log_probs or [0.0] * len(answer.token_ids)
        logprobs[position : position + match.size] = answer_logprobs[match.start : match.start + match.size]
        used.append(answer)
        position += match.size
    return logprobs, used


class _Match(NamedTuple):
    answer: int  # index of the answer
    start: int  # offset in it where the span begins
    size: int  # equal tokens from there; 0: there is no match


def _match_answer(span: list[int], answers: "Sequence[TokenOutput]", anywhere: bool) -> _Match:
    """Where `span` begins in an answer: at the start of one, or else, with `anywhere`, inside one."""

    def overlap(number: int, start: int = 0) -> int:
        candidate = answers[number].token_ids[start : start + len(span)]
        return len(candidate) if candidate == span[: len(candidate)] else 0

    best = max(range(len(answers)), key=overlap, default=-1)  # ties: the first one
    if best >= 0 and overlap(best):
        return _Match(best, 0, overlap(best))
    places = ((n, i) for n, a in enumerate(answers) for i, token in enumerate(a.token_ids) if token == span[0])
    return next((_Match(n, i, overlap(n, i)) for n, i in places if anywhere and overlap(n, i)), _Match(0, 0, 0))


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
        completion = await self._ask_engine(request)
        answer = TokenOutput(
            completion.token_ids,
            completion.logprobs,
            "completed" if completion.stop_reason == "stop" else completion.stop_reason,
            extra_fields=dict(zip(_VERSION_FIELDS, completion.policy_version, strict=True)),
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


def whole_numbers(values: Any, name: str) -> list[int]:
    """`values` (a list, an array or a one-dimensional tensor) as a list of Python integers."""
    try:
        items = values.tolist() if hasattr(values, "tolist") else list(values)
        if any(isinstance(item, bool) for item in items):
            raise TypeError
        return [operator.index(item) for item in items]
    except TypeError:
        raise DataError(f"{name}={values!r:.80} must be a list of token ids, whole numbers") from None


AGENT_LOOPS: Registry[Callable[..., AgentLoopBase]] = Registry("agent loop")
register = AGENT_LOOPS.register


def make_incremental_template(
    config: Any, tokenizer: PreTrainedTokenizerBase, tools: Sequence[BaseTool]
) -> IncrementalTemplate:
    """The incremental template for `tools`, with the template variables of `data.apply_chat_template_kwargs`."""
    schemas = [schema_dict(tool.tool_schema) for tool in tools]
    return IncrementalTemplate(tokenizer, schemas, template_kwargs=config.data.apply_chat_template_kwargs)


def refuse_media(**media: Any) -> None:
    """DataError where an agent loop passes images, videos or audio."""
    for name, value in media.items():
        if value and name.startswith(("image", "video", "audio")):
            raise DataError(f"an agent loop gives {name}={value!r:.80}; only text is supported so far")


def new_request_id() -> str:
    """A unique id for a conversation."""
    return uuid.uuid4().hex
