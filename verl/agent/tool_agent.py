"""`tool_agent`: sample an answer, run its tool calls, append their results, and repeat."""

import asyncio
import copy
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
from verl.config.rollout import MultiTurnConfig
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

    def set_next_state(self, calls: list[FunctionCall]) -> None:
        """The last answer calls these tools; the interaction replies where it calls none and is not the last one."""
        waits = self.interaction is not None and not self.is_over
        without_calls = AgentState.INTERACTING if waits else AgentState.TERMINATED
        self.tool_calls, self.state = calls, AgentState.PROCESSING_TOOLS if calls else without_calls

    def goes_on(self, goes_on: bool = True) -> None:
        """The policy answers next, or nobody does."""
        self.state = AgentState.GENERATING if goes_on else AgentState.TERMINATED

    def note_answer(self, answer: Completion, settings: MultiTurnConfig, most: int) -> None:
        """Append an answer of at most `most` tokens; it is the last one where it or the conversation is at a limit."""
        self.add_answer(answer)
        self.assistant_turns += 1
        self.is_over = bool(
            answer.stop_reason != "stop"
            or len(answer.token_ids) >= most
            or (settings.max_assistant_turns and self.assistant_turns >= settings.max_assistant_turns)
            or (settings.max_user_turns is not None and self.user_turns >= settings.max_user_turns)
        )

    def note_replies(self, replies: list[Message], ids: list[int], most: int) -> bool:
        """Append turns of others; False where their `ids` leave none of `most` tokens for an answer."""
        self.messages += replies
        if len(ids) >= most:
            self.stop_reason = "length"
            return False
        self.add_turns(ids)
        self.user_turns += 1
        return True

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
        request_id, kwargs = uuid.uuid4().hex, dict(extra_info.get("tools_kwargs") or {})
        interaction = await start_conversation(self.settings.interaction_config_path, extra_info, request_id)
        data = AgentData(list(messages), kwargs, request_id=request_id, interaction=interaction)
        try:
            await self.converse(data, sampling, row)
        finally:
            if interaction is not None:
                await interaction.close()
        return data

    async def converse(self, data: AgentData, sampling: Any, row: Any) -> None:
        """Take turns until nothing follows."""
        while data.state is not AgentState.TERMINATED:
            if data.state is AgentState.PENDING:
                data.prompt_ids.extend(self.prompt_tokens(data.messages, row))
                data.goes_on()
            elif data.state is AgentState.GENERATING:
                data.set_next_state(await self.generate_turn(data, sampling))
            else:
                of_tools = data.state is AgentState.PROCESSING_TOOLS
                data.goes_on(await (self.run_tool_calls(data, data.tool_calls) if of_tools else self.interact(data)))

    def prompt_tokens(self, messages: list[Message], row: Any) -> list[int]:
        """Token ids of the messages; DataError where they are more than data.max_prompt_length."""
        ids, limit = self.incremental_template.initial_tokens(messages), self.rollout_config.prompt_length
        if len(ids) > limit:
            raise DataError(
                f"row {row}: the prompt with the tools' descriptions has {len(ids)} "
                f"tokens, more than data.max_prompt_length={limit}; raise it, or offer fewer tools"
            )
        return ids

    def remaining_tokens(self, data: AgentData) -> int:
        """Number of tokens that still fit into response_length."""
        return int(self.rollout_config.response_length) - len(data.response_ids)

    async def generate_turn(self, data: AgentData, sampling: Any) -> list[FunctionCall]:
        """Sample one turn of the policy; returns its tool calls, or none when the conversation is over."""
        prompt_ids = [*data.prompt_ids, *data.response_ids]
        most, stops = self.remaining_tokens(data), tuple(self.parser.stop_token_ids)
        with data.metrics.timed("generate_sequences"):
            answer = await self.generate(prompt_ids, sampling, most, stops)
        data.note_answer(answer, self.settings, most)
        if data.is_over:
            return []
        answer_ids = [*self.parser.begun_ids(data.messages, prompt_ids), *answer.token_ids]
        if data.interaction is not None:
            text = str(self.tokenizer.decode(answer.token_ids, skip_special_tokens=True))
            data.messages[:] = with_answer(data.messages, text)
        _, calls = await self.parser.extract_tool_calls(self.parser.spoken_ids(answer_ids), self.schemas)
        return calls[: self.settings.max_parallel_calls]

    async def run_tool_calls(self, data: AgentData, calls: list[FunctionCall]) -> bool:
        """Run the calls concurrently and append their results; False when the results do not fit."""
        with data.metrics.timed("tool_calls"):
            results = await asyncio.gather(
                *(
                    call_tool(self.tools, call.name, call.arguments, self._create_kwargs(data, call.name), data)
                    for call in calls
                )
            )
        replies: list[Message] = []
        for call, (response, reward, _) in zip(calls, results, strict=True):
            text = truncate_text(
                response.text or "", self.settings.max_tool_response_length, self.settings.tool_response_truncate_side
            )
            reply: Message = {"role": "tool", "name": call.name, "content": text}
            replies.append(reply if call.tool_call_id is None else {**reply, "tool_call_id": call.tool_call_id})
            data.tool_rewards.append(reward)
            data.tool_errors.extend([(call.name, response.failure)] if response.failure else [])
        return self.append_turns(data, replies)

    async def interact(self, data: AgentData) -> bool:
        """Append the user's reply to the last answer; False where it ends the conversation, or does not fit."""
        assert data.interaction is not None, "it is in this state only with one"
        reply = await data.interaction.reply(data.messages)
        return reply is not None and self.append_turns(data, [{"role": "user", "content": reply}])

    def append_turns(self, data: AgentData, replies: list[Message]) -> bool:
        """Append the turns and the generation prompt; False where they do not fit."""
        new_ids = self.incremental_template.appended_tokens(replies, data.response_ids)
        return data.note_replies(replies, new_ids, self.remaining_tokens(data))

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
