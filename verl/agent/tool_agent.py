"""`tool_agent`: sample an answer, run its tool calls, append their results, and repeat."""

import asyncio
import copy
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from verl.agent.interactions import Conversation, start_conversation
from verl.agent.loop import AGENT_LOOPS, LoopSetting, LoopTimings, Transcript
from verl.agent.policy import Policy
from verl.agent.tool_parsers import FunctionCall, ToolParser
from verl.agent.tool_schemas import schema_dict
from verl.agent.tools import call_tool, truncate_text
from verl.data.chat import Message, with_answer
from verl.data.prompts import PromptRow
from verl.data.trajectory import Trajectory
from verl.utils.errors import DataError
from verl.utils.import_paths import names_from
from verl.workers.rollout.base import Completion, SamplingParams


class AgentState(Enum):
    """The next move of a conversation."""

    PENDING = "pending"  # its prompt has no tokens yet
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


@dataclass
class AgentData(Transcript):
    """A running conversation; tools get it as `agent_data`."""

    messages: list[Message]
    tools_kwargs: dict[str, Any]
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    assistant_turns: int = 0
    user_turns: int = 0
    tool_rewards: list[float] = field(default_factory=list)
    tool_errors: list[tuple[str, str]] = field(default_factory=list)  # (tool, why) of each call whose tool failed
    metrics: LoopTimings = field(default_factory=LoopTimings)
    state: AgentState = AgentState.PENDING
    tool_calls: list[FunctionCall] = field(default_factory=list)
    interaction: Conversation | None = None
    is_over: bool = False  # a limit is reached, or the last answer is not complete

    @property
    def num_turns(self) -> int:
        return 1 + self.assistant_turns + self.user_turns

    @property
    def told(self) -> dict[str, Any]:
        """The facts that reward functions and logs get."""
        return {} if self.interaction is None else {"turn_scores": self.interaction.scores}


TOOL_AGENT = "tool_agent"
__getattr__ = names_from(__name__, ToolAgentLoop="verl.doors.agent_loop")  # which earlier loops import from here
# An answer to token ids, by sampling settings, of at most so many tokens, which also ends at any of these.
Generate = Callable[[list[int], Any, int, tuple[int, ...]], Awaitable[Completion]]


class ToolAgent:
    """Conversations that end when an answer calls no tool and no interaction replies, or at response_length,
    max_assistant_turns or max_user_turns."""

    def __init__(self, setting: LoopSetting, generate: Generate):
        self.generate, self.tokenizer, self.tools = generate, setting.tokenizer, setting.tools
        self.rollout_config = setting.config.actor_rollout_ref.rollout
        self.settings = self.rollout_config.multi_turn
        self.incremental_template = setting.incremental_template()
        self.parser = ToolParser.get_tool_parser(self.settings.format, self.tokenizer)
        self.schemas = [schema_dict(tool.tool_schema) for tool in self.tools.values()]

    async def conversation(
        self, messages: list[Message], extra_info: dict[str, Any], row: Any, sampling: Any
    ) -> AgentData:
        """The whole conversation that begins with `messages`; `sampling` is what `generate` takes."""
        data = AgentData(list(messages), dict(extra_info.get("tools_kwargs") or {}))
        data.interaction = await start_conversation(self.settings.interaction_config_path, extra_info, data.request_id)
        try:
            await self.converse(data, sampling, row)
        finally:
            if data.interaction is not None:
                await data.interaction.close()
        return data

    async def converse(self, data: AgentData, sampling: Any, row: Any) -> None:
        """Take turns until nothing follows."""
        while data.state is not AgentState.TERMINATED:
            if data.state is AgentState.PENDING:
                self.build_prompt(data, row)
                data.state = AgentState.GENERATING
            elif data.state is AgentState.GENERATING:
                data.tool_calls = await self.generate_turn(data, sampling)
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

    async def generate_turn(self, data: AgentData, sampling: Any) -> list[FunctionCall]:
        """Sample one turn of the policy; returns its tool calls, or none when the conversation is over."""
        start_time = time.perf_counter()
        prompt_ids = [*data.prompt_ids, *data.response_ids]
        most, stops = self.remaining_tokens(data), tuple(self.parser.stop_token_ids)
        answer = await self.generate(prompt_ids, sampling, most, stops)
        data.metrics.generate_sequences += time.perf_counter() - start_time
        data.add_answer(answer)
        data.assistant_turns += 1
        max_assistant_turns, max_user_turns = self.settings.max_assistant_turns, self.settings.max_user_turns
        data.is_over = bool(
            answer.stop_reason != "stop"
            or self.remaining_tokens(data) <= 0
            or (max_assistant_turns and data.assistant_turns >= max_assistant_turns)
            or (max_user_turns is not None and data.user_turns >= max_user_turns)
        )
        if data.is_over:
            return []
        answer_ids = [*self.parser.begun_ids(data.messages, prompt_ids), *answer.token_ids]
        if data.interaction is not None:
            text = str(self.tokenizer.decode(answer.token_ids, skip_special_tokens=True))
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
        data.add_turns(new_ids)
        data.user_turns += 1
        return True

    @staticmethod
    def _create_kwargs(data: AgentData, name: str) -> dict[str, Any]:
        return dict((data.tools_kwargs.get(name) or {}).get("create_kwargs") or {})


@AGENT_LOOPS.register(TOOL_AGENT)
async def tool_agent(setting: LoopSetting, policy: Policy, row: PromptRow) -> list[Trajectory]:
    """The trajectory of one conversation with the tools."""

    def generate(ids: list[int], params: SamplingParams, most: int, stops: tuple[int, ...]) -> Awaitable[Completion]:
        limited = replace(params, max_tokens=most, stop_token_ids=(*params.stop_token_ids, *stops))
        return policy.generate(ids, limited)

    messages, extra_info = copy.deepcopy((row.messages, row.extra_info))  # tools of others may change them
    agent = ToolAgent(setting, generate)
    data = await agent.conversation(messages, extra_info, row.index, policy.sampling)
    facts = {"tool_rewards": data.tool_rewards, "tool_errors": data.tool_errors, "loop_fields": data.told}
    return [data.trajectory(policy, row.index, data.metrics, num_turns=data.num_turns, **facts)]
