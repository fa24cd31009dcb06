"""Agent loops as classes: published ones derive from `AgentLoopBase`.

A loop gets token ids only from `server_manager.generate` and the `ct_*` helpers, so sampled token ids are kept
unchanged and the response mask is exact. `register` puts `LoopOfClass` into the registry of `verl.agent.loop`.
"""

import asyncio
import copy
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from verl.agent.incremental_template import IncrementalTemplate
from verl.agent.loop import AGENT_LOOPS, CLASS, LOOPS_OF_CLASSES, LoopSetting
from verl.agent.policy import Policy
from verl.agent.tool_agent import ToolAgent
from verl.agent.tool_schemas import schema_dict
from verl.agent.tools import BaseTool
from verl.data.chat import Message
from verl.data.prompts import PromptRow
from verl.data.trajectory import Trajectory
from verl.doors.continuous_tokens import Merged, merge_answer, merge_turns
from verl.doors.llm_server import VERSION_FIELDS, LLMServerClient, refuse_media
from verl.doors.loop_outputs import AgentLoopMetrics, AgentLoopOutput, read_outputs
from verl.workers.rollout.base import Completion

C = TypeVar("C", bound=Callable[..., Any])


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
        self.incremental_template = LoopSetting(self.config, tokenizer, self.tools).incremental_template()

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


@LOOPS_OF_CLASSES.register(CLASS)
@dataclass(frozen=True)
class LoopOfClass:
    """The agent loop of a class, with arguments of its own for the constructor; every sample gets a new instance."""

    make: Callable[..., Any]
    extra: dict[str, Any] = field(default_factory=dict)

    async def __call__(self, setting: LoopSetting, policy: Policy, row: PromptRow) -> list[Trajectory]:
        """The trajectories of what `run` returns; DataError where it cannot be trained on."""
        columns = {**row.columns, "raw_prompt": row.messages, "index": row.index, "extra_info": row.extra_info}
        columns["tools_kwargs"] = row.extra_info.get("tools_kwargs") or {}
        server = LLMServerClient(policy, len(setting.tokenizer))
        loop = self.make(
            trainer_config=ConfigWrap(setting.config),
            server_manager=server,
            tokenizer=setting.tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=ConfigWrap(setting.config.data),
            hf_model_type=None,
            tools=ToolListWrap(list(setting.tools.values())),
            **self.extra,
        )
        sampling = {name: getattr(policy.sampling, name) for name in ("temperature", "top_p", "top_k")}
        return read_outputs(await loop.run(sampling, **copy.deepcopy(columns)), server, row.index)


def register(name: str) -> Callable[[C], C]:
    """Decorator: `name` selects this class as `agent_name` of a row, or as rollout.agent.default_agent_loop."""

    def add(cls: C) -> C:
        AGENT_LOOPS.register(name)(LoopOfClass(cls))
        return cls

    return add


class SingleTurnAgentLoop(AgentLoopBase):
    """One prompt, one answer, as a class to derive from. Every sample is a request of its own."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        start_time = time.perf_counter()
        answer = await self.server_manager.generate("any", prompt_ids=prompt_ids, sampling_params=sampling_params)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=answer.token_ids,
            response_mask=[1] * len(answer.token_ids),
            response_logprobs=answer.log_probs,
            num_turns=2,
            metrics=AgentLoopMetrics(generate_sequences=time.perf_counter() - start_time),
        )


class ToolAgentLoop(ToolAgent, AgentLoopBase):
    """The built-in tool agent as a class to derive from."""

    def __init__(self, *args: Any, **kwargs: Any):
        AgentLoopBase.__init__(self, *args, **kwargs)
        ToolAgent.__init__(self, LoopSetting(self.config, self.tokenizer, self.tools), self._ask)

    async def _ask(self, ids: list[int], sampling_params: Any, most: int, stops: tuple[int, ...]) -> Completion:
        stop_ids = (*sampling_params.get("stop_token_ids", ()), *stops)
        limited = {**sampling_params, "max_tokens": most, "stop_token_ids": stop_ids}
        answer = await self.server_manager.generate("any", prompt_ids=ids, sampling_params=limited)
        versions = tuple(answer.extra_fields.get(name, 0) for name in VERSION_FIELDS)
        reason = "stop" if answer.stop_reason == "completed" else str(answer.stop_reason)
        logprobs = answer.log_probs or [0.0] * len(answer.token_ids)
        return Completion(list(answer.token_ids), list(logprobs), reason, versions)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        extra_info = {**(kwargs.get("extra_info") or {}), "tools_kwargs": kwargs.get("tools_kwargs")}
        data = await self.conversation(kwargs["raw_prompt"], extra_info, kwargs.get("index"), sampling_params)
        return AgentLoopOutput(
            prompt_ids=data.prompt_ids,
            response_ids=data.response_ids,
            response_mask=data.response_mask,
            response_logprobs=data.response_logprobs,
            num_turns=data.num_turns,
            metrics=data.metrics,
            tool_errors=data.tool_errors,
            extra_fields={"tool_rewards": data.tool_rewards, "stop_reason": data.stop_reason, **data.told},
        )
