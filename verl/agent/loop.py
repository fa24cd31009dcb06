"""Agent loops: code of your own that turns one prompt into one conversation with the policy.

A loop sees token ids only through `server_manager.generate` and the helpers here, so what the policy sampled is kept
verbatim and the response mask is exact by construction.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl.agent.stitch import Stitcher
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

    def trajectory(self, group_id: int, row: int) -> Trajectory:
        """As the trainer keeps it; DataError where lengths disagree or an observation is marked as sampled."""
        size = len(self.response_ids)
        logprobs = self.response_logprobs if self.response_logprobs is not None else [0.0] * size
        if len(self.response_mask) != size or len(logprobs) != size:
            raise DataError(
                f"an agent loop returned {size} response tokens, {len(self.response_mask)} mask values and "
                f"{len(logprobs)} log-probs; they must agree"
            )
        mask = torch.tensor([0] * len(self.prompt_ids) + self.response_mask, dtype=torch.bool)
        values = torch.tensor([0.0] * len(self.prompt_ids) + list(logprobs), dtype=torch.float32)
        versions = (self.extra_fields.get("min_global_steps", 0), self.extra_fields.get("max_global_steps", 0))
        return Trajectory(
            tokens=torch.tensor([*self.prompt_ids, *self.response_ids], dtype=torch.int64),
            loss_mask=mask,
            rollout_logprobs=values * mask,
            group_id=group_id,
            row=row,
            policy_version=versions,
            stop_reason=self.extra_fields.get("stop_reason", "stop"),
            extra={"num_turns": self.num_turns, **self.extra_fields.get("reward_extra_info", {})},
        )


class LLMServerClient:
    """The policy, as a loop of one sample sees it; later turns of a conversation go to the same replica."""

    def __init__(self, engine: RolloutEngine, sampling: SamplingParams, group: int, sample: int):
        self.engine, self.sampling = engine, sampling
        self.group, self.sample, self.turn = group, sample, 0

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: Mapping[str, Any] | None = None, **_: Any
    ) -> TokenOutput:
        """Continue `prompt_ids`. Every turn of every sample has a random stream of its own."""
        number = derive_seed(self.group, self.sample, self.turn)
        self.turn += 1
        known = {name: value for name, value in (sampling_params or {}).items() if name in _SAMPLING}
        if "stop_token_ids" in known:
            known["stop_token_ids"] = (*self.sampling.stop_token_ids, *known["stop_token_ids"])
        request = GenerationRequest(
            number, prompt_ids, replace(self.sampling, n=1, **known), conversation=derive_seed(self.group, self.sample)
        )
        [completion] = await self.engine.generate(request)
        oldest, newest = completion.policy_version
        return TokenOutput(
            completion.token_ids,
            completion.logprobs,
            "completed" if completion.stop_reason == "stop" else completion.stop_reason,
            extra_fields={"min_global_steps": oldest, "max_global_steps": newest},
        )


_SAMPLING = {"temperature", "top_p", "top_k", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos"}


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
        self.stitcher = make_stitcher(self.config, tokenizer, list(self.tools.values()))

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> "AgentLoopOutput | list[AgentLoopOutput]":
        """The conversation. kwargs: raw_prompt, index, tools_kwargs, extra_info and every other column of the row."""

    def ct_build_initial_tokens(
        self, messages: Sequence[Message], tools: Any = None, images: Any = None, videos: Any = None, audios: Any = None
    ) -> list[int]:
        """Token ids of the opening messages, ready to be answered."""
        return self.stitcher.opening(messages)

    def ct_merge_assistant_token(self, token_ids: list[int], new_ids: list[int]) -> list[int]:
        """The conversation and an answer, verbatim."""
        return [*token_ids, *new_ids]

    def ct_merge_non_assistant_msg(self, token_ids: list[int], messages: Sequence[Message], **_: Any) -> list[int]:
        """The conversation and appended tool or user turns, with the start of the next answer."""
        return [*token_ids, *self.stitcher.appended(messages, token_ids)]


AGENT_LOOPS: Registry[Callable[..., AgentLoopBase]] = Registry("agent loop")
register = AGENT_LOOPS.register


def make_stitcher(config: Any, tokenizer: PreTrainedTokenizerBase, tools: Sequence[BaseTool]) -> Stitcher:
    """The stitcher of a run: the tools of the run, the template variables of the data."""
    schemas = [tool.tool_schema.model_dump() for tool in tools]
    return Stitcher(tokenizer, schemas, template_kwargs=config.data.apply_chat_template_kwargs)


def new_request_id() -> str:
    """A name for a conversation."""
    return uuid.uuid4().hex
