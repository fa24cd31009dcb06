"""`tool_agent`: sample an answer, run its tool calls, append their results, and repeat."""

import asyncio
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from verl.agent.interactions import Conversation, start_conversation
from verl.agent.loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, new_request_id, register
from verl.agent.tool_parsers import FunctionCall, ToolParser
from verl.agent.tool_schemas import schema_dict
from verl.agent.tools import call_tool, truncate_text
from verl.data.chat import Message, with_answer
from verl.utils.errors import DataError


class AgentState(Enum):
    """The next move of a conversation."""

    PENDING = "pending"  # its prompt has no tokens yet
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


@dataclass
class AgentData:
    """A running conversation; tools get it as `agent_data`."""

    messages: list[Message]
    tools_kwargs: dict[str, Any]
    prompt_ids: list[int] = field(default_factory=list)
    request_id: str = field(default_factory=new_request_id)
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] = field(default_factory=list)
    assistant_turns: int = 0
    user_turns: int = 0
    tool_rewards: list[float] = field(default_factory=list)
    tool_errors: list[tuple[str, str]] = field(default_factory=list)  # (tool, why) of each call whose tool failed
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    stop_reason: str = "stop"
    state: AgentState = AgentState.PENDING
    tool_calls: list[FunctionCall] = field(default_factory=list)
    interaction: Conversation | None = None
    is_over: bool = False  # a limit is reached, or the last answer is not complete


TOOL_AGENT = "tool_agent"


@register(TOOL_AGENT)
class ToolAgentLoop(AgentLoopBase):
    """Ends when an answer calls no tool and no interaction replies, or at response_length, max_assistant_turns or
    max_user_turns."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.settings = self.rollout_config.multi_turn
        self.parser = ToolParser.get_tool_parser(self.settings.format, self.tokenizer)
        self.schemas = [schema_dict(tool.tool_schema) for tool in self.tools.values()]

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        data = AgentData(list(kwargs["raw_prompt"]), dict(kwargs.get("tools_kwargs") or {}))
        data.interaction = await start_conversation(self.settings.interaction_config_path, kwargs, data.request_id)
        try:
            await self.converse(data, sampling_params, kwargs.get("index"))
        finally:
            if data.interaction is not None:
                await data.interaction.close()
        scores = {} if data.interaction is None else {"turn_scores": data.interaction.scores}
        return AgentLoopOutput(
            prompt_ids=data.prompt_ids,
            response_ids=data.response_ids,
            response_mask=data.response_mask,
            response_logprobs=data.response_logprobs,
            num_turns=1 + data.assistant_turns + data.user_turns,
            metrics=data.metrics,
            tool_errors=data.tool_errors,
            extra_fields={"tool_rewards": data.tool_rewards, "stop_reason": data.stop_reason, **scores},
        )

    async def converse(self, data: AgentData, sampling_params: dict[str, Any], row: Any) -> None:
        """Take turns until nothing follows."""
        while data.state is not AgentState.TERMINATED:
            if data.state is AgentState.PENDING:
                self.build_prompt(data, row)
                data.state = AgentState.GENERATING
            elif data.state is AgentState.GENERATING:
                data.tool_calls = await self.generate_turn(data, sampling_params)
                waits = data.interaction is not None and not data.is_over
                without_calls = AgentState.INTERACTING if waits else AgentState.TERMINATED
                data.state = AgentState.PROCESSING_TOOLS if data.tool_calls else without_calls
            else:
                of_tools = data.state is AgentState.PROCESSING_TOOLS
                goes_on = await (self.run_tool_calls(data, data.tool_calls) if of_tools else self.interact(data))
                data.state = AgentState.GENERATING if goes_on else AgentState.TERMINATED

    def build_prompt(self, data: AgentData, row: Any) -> None:
        """Tokenise the messages; DataError where they are longer than data.max_prompt_length."""
        data.prompt_ids = self.incremental_template.initial_tokens(data.messages)
        limit = self.rollout_config.prompt_length
        if len(data.prompt_ids) > limit:
            raise DataError(
                f"row {row}: the prompt with the tools' descriptions has {len(data.prompt_ids)} "
                f"tokens, more than data.max_prompt_length={limit}; raise it, or offer fewer tools"
            )

    def remaining_tokens(self, data: AgentData) -> int:
        """Number of tokens that still fit into response_length."""
        return int(self.rollout_config.response_length) - len(data.response_ids)

    async def generate_turn(self, data: AgentData, sampling_params: dict[str, Any]) -> list[FunctionCall]:
        """Sample one turn of the policy; returns its tool calls, or none when the conversation is over."""
        start_time = time.perf_counter()
        prompt_ids = [*data.prompt_ids, *data.response_ids]
        output = await self.server_manager.generate(
            data.request_id,
            prompt_ids=prompt_ids,
            sampling_params={
                **sampling_params,
                "max_tokens": self.remaining_tokens(data),
                "stop_token_ids": self.parser.stop_token_ids,
            },
        )
        data.metrics.generate_sequences += time.perf_counter() - start_time
        data.response_ids += output.token_ids
        data.response_mask += [1] * len(output.token_ids)
        data.response_logprobs += output.log_probs or [0.0] * len(output.token_ids)
        data.assistant_turns += 1
        data.stop_reason = "stop" if output.stop_reason == "completed" else str(output.stop_reason)
        max_assistant_turns, max_user_turns = self.settings.max_assistant_turns, self.settings.max_user_turns
        data.is_over = bool(
            output.stop_reason != "completed"
            or self.remaining_tokens(data) <= 0
            or (max_assistant_turns and data.assistant_turns >= max_assistant_turns)
            or (max_user_turns is not None and data.user_turns >= max_user_turns)
        )
        if data.is_over:
            return []
        answer_ids = [*self.parser.begun_ids(data.messages, prompt_ids), *output.token_ids]
        if data.interaction is not None:
            text = str(self.tokenizer.decode(output.token_ids, skip_special_tokens=True))
            data.messages = with_answer(data.messages, text)
        _, calls = await self.parser.extract_tool_calls(self.parser.spoken_ids(answer_ids), self.schemas)
        return calls[: self.settings.max_parallel_calls]

    async def run_tool_calls(self, data: AgentData, calls: list[FunctionCall]) -> bool:
        """Run the calls concurrently and append their results; False when the results do not fit."""
        start_time = time.perf_counter()
        results = await asyncio.gather(
            *(
                call_tool(self.tools, call.name, call.arguments, self._create_kwargs(data, call.name), data)
                for call in calls
            )
        )
        data.metrics.tool_calls += time.perf_counter() - start_time
        replies: list[Message] = []
        for call, (response, reward, _) in zip(calls, results, strict=True):
            text = truncate_text(
                response.text or "", self.settings.max_tool_response_length, self.settings.tool_response_truncate_side
            )
            reply: Message = {"role": "tool", "name": call.name, "content": text}
            replies.append(reply if call.tool_call_id is None else {**reply, "tool_call_id": call.tool_call_id})
            data.tool_rewards.append(reward)
            data.tool_errors += [(call.name, response.failure)] if response.failure else []
        return self.append_turns(data, replies)

    async def interact(self, data: AgentData) -> bool:
        """Append the user's reply to the last answer; False where it ends the conversation, or does not fit."""
        assert data.interaction is not None, "it is in this state only with one"
        reply = await data.interaction.reply(data.messages)
        return reply is not None and self.append_turns(data, [{"role": "user", "content": reply}])

    def append_turns(self, data: AgentData, replies: list[Message]) -> bool:
        """Append the turns and the generation prompt; False where they do not fit."""
        data.messages += replies
        new_ids = self.incremental_template.appended_tokens(replies, data.response_ids)
        if len(new_ids) >= self.remaining_tokens(data):
            data.stop_reason = "length"
            return False
        data.response_ids += new_ids
        data.response_mask += [0] * len(new_ids)
        data.response_logprobs += [0.0] * len(new_ids)
        data.user_turns += 1
        return True

    @staticmethod
    def _create_kwargs(data: AgentData, name: str) -> dict[str, Any]:
        return dict((data.tools_kwargs.get(name) or {}).get("create_kwargs") or {})
