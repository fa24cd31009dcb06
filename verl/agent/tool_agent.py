"""`tool_agent`: answer, carry out the tool calls in it, append their results, and again."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from verl.agent.loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, new_request_id, register
from verl.agent.tool_parsers import FunctionCall, ToolParser
from verl.agent.tools import call_tool, truncate_text
from verl.data.chat import Message
from verl.utils.errors import DataError


@dataclass
class AgentData:
    """A conversation under way; tools get it as `agent_data`."""

    messages: list[Message]
    prompt_ids: list[int]
    tools_kwargs: dict[str, Any]
    request_id: str = field(default_factory=new_request_id)
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] = field(default_factory=list)
    assistant_turns: int = 0
    user_turns: int = 0
    tool_rewards: list[float] = field(default_factory=list)
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    stop_reason: str = "stop"


TOOL_AGENT = "tool_agent"


@register(TOOL_AGENT)
class ToolAgentLoop(AgentLoopBase):
    """Stops when an answer calls no tool, or at response_length, max_assistant_turns or max_user_turns."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.settings = self.rollout_config.multi_turn
        self.parser = ToolParser.get_tool_parser(self.settings.format, self.tokenizer)
        self.schemas = [tool.tool_schema.model_dump() for tool in self.tools.values()]

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        data = AgentData(
            messages, self.incremental_template.initial_tokens(messages), dict(kwargs.get("tools_kwargs") or {})
        )
        limit = self.rollout_config.prompt_length
        if len(data.prompt_ids) > limit:
            raise DataError(
                f"row {kwargs.get('index')}: the prompt with the tools' descriptions has {len(data.prompt_ids)} "
                f"tokens, more than data.max_prompt_length={limit}; raise it, or offer fewer tools"
            )
        while calls := await self.generate_turn(data, sampling_params):
            if not await self.run_tool_calls(data, calls):
                break
        return AgentLoopOutput(
            prompt_ids=data.prompt_ids,
            response_ids=data.response_ids,
            response_mask=data.response_mask,
            response_logprobs=data.response_logprobs,
            num_turns=1 + data.assistant_turns + data.user_turns,
            metrics=data.metrics,
            extra_fields={
                "tool_rewards": data.tool_rewards,
                "stop_reason": data.stop_reason,
            },
        )

    def remaining_tokens(self, data: AgentData) -> int:
        """Tokens the response may still grow by."""
        return int(self.rollout_config.response_length) - len(data.response_ids)

    async def generate_turn(self, data: AgentData, sampling_params: dict[str, Any]) -> list[FunctionCall]:
        """One turn of the policy; the tool calls to carry out, none when the conversation is over."""
        begin = time.perf_counter()
        output = await self.server_manager.generate(
            data.request_id,
            prompt_ids=[*data.prompt_ids, *data.response_ids],
            sampling_params={
                **sampling_params,
                "max_tokens": self.remaining_tokens(data),
                "stop_token_ids": self.parser.stop_token_ids,
            },
        )
        data.metrics.generate_sequences += time.perf_counter() - begin
        data.response_ids += output.token_ids
        data.response_mask += [1] * len(output.token_ids)
        data.response_logprobs += output.log_probs or [0.0] * len(output.token_ids)
        data.assistant_turns += 1
        data.stop_reason = "stop" if output.stop_reason == "completed" else str(output.stop_reason)
        max_assistant_turns = self.settings.max_assistant_turns
        if (
            output.stop_reason != "completed"
            or self.remaining_tokens(data) <= 0
            or (max_assistant_turns and data.assistant_turns >= max_assistant_turns)
        ):
            return []
        if self.settings.max_user_turns is not None and data.user_turns >= self.settings.max_user_turns:
            return []
        _, calls = await self.parser.extract_tool_calls(output.token_ids, self.schemas)
        return calls[: self.settings.max_parallel_calls]

    async def run_tool_calls(self, data: AgentData, calls: list[FunctionCall]) -> bool:
        """Run the calls together and append what they say; False when that does not fit any more."""
        begin = time.perf_counter()
        results = await asyncio.gather(
            *(
                call_tool(self.tools, call.name, call.arguments, self._create_kwargs(data, call.name), data)
                for call in calls
            )
        )
        data.metrics.tool_calls += time.perf_counter() - begin
        replies: list[Message] = []
        for call, (response, reward, _) in zip(calls, results, strict=True):
            text = truncate_text(
                response.text or "", self.settings.max_tool_response_length, self.settings.tool_response_truncate_side
            )
            reply: Message = {"role": "tool", "name": call.name, "content": text}
            replies.append(reply if call.tool_call_id is None else {**reply, "tool_call_id": call.tool_call_id})
            data.tool_rewards.append(reward)
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
