"""Agent loops: code of your own that turns one prompt into one conversation with the policy.

A loop sees token ids only through `server_manager.generate` and the helpers here, so what the policy sampled is kept
verbatim and the response mask is exact by construction.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl.agent.incremental_template import IncrementalTemplate
from verl.agent.tools import BaseTool
from verl.data.chat import Message
from verl.data.trajectory import Trajectory
from verl.utils.errors import DataError
from verl.utils.registry import Registry
from verl.utils.seeds import derive_seed
from verl.workers.rollout.base import GenerationRequest, RolloutEngine, SamplingParams


@dataclass
class TokenOutput:
    """One answer of the policy."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None  # "completed", "length" or "aborted"
    num_preempted: int = -1
    extra_fields: dict[str, Any] = field(default_factory=dict)  # min_global_steps, max_global_steps: weights used


@dataclass
class AgentLoopMetrics:
    """Seconds a conversation spent."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


@dataclass
class AgentLoopOutput:
    """One conversation: prompt, then everything after it. `response_mask` is 1 on what the policy sampled."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None  # set it to skip the reward function
    num_turns: int = 0
    metrics: AgentLoopMetrics | dict[str, float] = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)

    def to_trajectory(self, group_id: int, row: int, answers: "Sequence[TokenOutput]") -> Trajectory:
        """As the trainer keeps it, with the versions of `answers` (all it was given) and their log-probs where it
        gives none. DataError where other tokens are marked as sampled, or lengths differ."""
        size = len(self.response_ids)
        if len(self.response_mask) != size or len(self.response_logprobs or self.response_ids) != size:
            raise DataError(
                f"an agent loop returned {size} response tokens, {len(self.response_mask)} mask values and "
                f"{len(self.response_logprobs or [])} log-probs; they must agree"
            )
        logprobs, used = sampled_logprobs(self.response_ids, self.response_mask, answers)
        logprobs = logprobs if self.response_logprobs is None else list(self.response_logprobs)
        mask = torch.tensor([0] * len(self.prompt_ids) + self.response_mask, dtype=torch.bool)
        values = torch.tensor([0.0] * len(self.prompt_ids) + logprobs, dtype=torch.float32)
        versions = [answer.extra_fields[name] for answer in used for name in ("min_global_steps", "max_global_steps")]
        ended = str(used[-1].stop_reason) if used else "stop"
        return Trajectory(
            tokens=torch.tensor([*self.prompt_ids, *self.response_ids], dtype=torch.int64),
            loss_mask=mask,
            rollout_logprobs=values * mask,
            group_id=group_id,
            row=row,
            reward=self.reward_score,
            policy_version=(min(versions, default=0), max(versions, default=0)),
            stop_reason=self.extra_fields.get("stop_reason", "stop" if ended == "completed" else ended),
            extra={
                "num_turns": self.num_turns,
                "agent_loop": self.metrics if isinstance(self.metrics, dict) else asdict(self.metrics),
                **{name: value for name, value in self.extra_fields.items() if name not in _FIELDS_HIDDEN_FROM_REWARDS},
                **self.extra_fields.get("reward_extra_info", {}),
            },
        )


_FIELDS_HIDDEN_FROM_REWARDS = ("reward_extra_info", "stop_reason", "min_global_steps", "max_global_steps")


def sampled_logprobs(
    ids: Sequence[int], mask: Sequence[int], answers: "Sequence[TokenOutput]"
) -> "tuple[list[float], list[TokenOutput]]":
    """Log-probs of the tokens where `mask` is 1, 0 elsewhere; and the answers they come from, in order.

    Tokens marked without a gap must be whole answers; the first may lack its beginning, the last its end.
    """
    logprobs, used, unused, place = [0.0] * len(ids), [], list(answers), 0
    while place < len(ids):
        end = next((i for i in range(place, len(ids)) if not mask[i]), len(ids))
        if end == place:
            place += 1
            continue
        span = list(ids[place:end])
        index, start, size = _match_answer(span, unused, anywhere=place == 0 or not mask[place - 1])
        if not size:
            raise DataError(
                f"an agent loop marks response tokens {place} to {end - 1} as sampled, but the policy did not sample "
                f"them: {span[:8]} …; keep `token_ids` of generate() as they are (text that is tokenised again gives "
                "other ids), and mark everything else with 0 in response_mask"
            )
        answer = unused.pop(index)
        logprobs[place : place + size] = (answer.log_probs or [0.0] * len(answer.token_ids))[start : start + size]
        used.append(answer)
        place += size
    return logprobs, used


def _match_answer(span: list[int], answers: "Sequence[TokenOutput]", anywhere: bool) -> tuple[int, int, int]:
    """Number of an answer, where in it `span` begins, and how many of their tokens agree until one of them ends."""

    def overlap(number: int, start: int = 0) -> int:
        candidate = answers[number].token_ids[start : start + len(span)]
        return len(candidate) if candidate == span[: len(candidate)] else 0

    best = max(range(len(answers)), key=overlap, default=-1)  # the first of equals
    if best >= 0 and overlap(best):
        return best, 0, overlap(best)
    places = ((n, i) for n, a in enumerate(answers) for i, token in enumerate(a.token_ids) if token == span[0])
    return next(((n, i, overlap(n, i)) for n, i in places if anywhere and overlap(n, i)), (0, 0, 0))


class LLMServerClient:
    """The policy, as a loop of one sample sees it; later turns of a conversation go to the same replica."""

    def __init__(
        self,
        engine: RolloutEngine,
        sampling: SamplingParams,
        max_sequence_length: int,
        group_id: int,
        sample_index: int,
    ):
        self.engine, self.sampling, self.max_sequence_length = engine, sampling, max_sequence_length
        self.group_id, self.sample_index = group_id, sample_index
        self.answers: list[TokenOutput] = []
        self.turn = 0

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: Mapping[str, Any] | None = None, **media: Any
    ) -> TokenOutput:
        """Continue `prompt_ids`. Every turn of every sample has a random stream of its own.

        At most `max_tokens`, and what a sequence has room for; no room gives no tokens and stop_reason "length".
        """
        refuse_media(**media)
        number = derive_seed(self.group_id, self.sample_index, self.turn)
        self.turn += 1
        params = {
            n: v for n, v in (sampling_params or {}).items() if v is not None and v != _NEUTRAL_SAMPLING_VALUES.get(n)
        }
        params.pop("logprobs", None)  # they always come
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
            return TokenOutput([], [], "length", extra_fields=dict.fromkeys(_VERSION_FIELDS, self.engine.version))
        sampling = replace(self.sampling, **{**params, "n": 1, "max_tokens": token_budget})
        request = GenerationRequest(
            number, prompt_ids, sampling, conversation=derive_seed(self.group_id, self.sample_index)
        )
        [completion] = await self.engine.generate(request)
        answer = TokenOutput(
            completion.token_ids,
            completion.logprobs,
            "completed" if completion.stop_reason == "stop" else completion.stop_reason,
            extra_fields=dict(zip(_VERSION_FIELDS, completion.policy_version, strict=True)),
        )
        self.answers.append(replace(answer, token_ids=list(answer.token_ids)))  # a loop may append to what it is given
        return answer


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
    """A configuration handed to a loop, as `.config`."""

    config: Any


@dataclass(frozen=True)
class ToolListWrap:
    """The tools of the run."""

    tools: list[BaseTool]


class AgentLoopBase(ABC):
    """One conversation. A new instance is made for every sample; `run` gets the row's columns by name."""

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

    def ct_build_initial_tokens(
        self, messages: Sequence[Message], tools: Any = None, images: Any = None, videos: Any = None, audios: Any = None
    ) -> list[int]:
        """Token ids of the opening messages, ready to be answered. `tools`: schemas to show instead of the run's."""
        refuse_media(images=images, videos=videos, audios=audios)
        if tools is not None:
            schemas = [tool if isinstance(tool, dict) else tool.model_dump() for tool in tools]
            self.incremental_template = IncrementalTemplate(
                self.tokenizer, schemas, template_kwargs=self.incremental_template.template_kwargs
            )
        return self.incremental_template.initial_tokens(messages)

    def ct_merge_assistant_token(self, token_ids: list[int], new_ids: list[int]) -> list[int]:
        """The conversation and an answer, verbatim."""
        return [*token_ids, *new_ids]

    def ct_merge_non_assistant_msg(self, token_ids: list[int], messages: Sequence[Message], **media: Any) -> list[int]:
        """The conversation and appended tool or user turns, with the start of the next answer."""
        refuse_media(**media)
        return [*token_ids, *self.incremental_template.appended_tokens(messages, token_ids)]


AGENT_LOOPS: Registry[Callable[..., AgentLoopBase]] = Registry("agent loop")
register = AGENT_LOOPS.register


def make_incremental_template(
    config: Any, tokenizer: PreTrainedTokenizerBase, tools: Sequence[BaseTool]
) -> IncrementalTemplate:
    """The incremental template of a run: the tools of the run, the template variables of the data."""
    schemas = [tool.tool_schema.model_dump() for tool in tools]
    return IncrementalTemplate(tokenizer, schemas, template_kwargs=config.data.apply_chat_template_kwargs)


def refuse_media(**media: Any) -> None:
    """DataError where an agent loop gives something beside text."""
    for name, value in media.items():
        if value and name.startswith(("image", "video", "audio")):
            raise DataError(f"an agent loop gives {name}={value!r:.80}; only text is supported so far")


def new_request_id() -> str:
    """A name for a conversation."""
    return uuid.uuid4().hex
