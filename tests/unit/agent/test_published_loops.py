"""Agent loops and tools as published code writes them: the published import paths, helpers and schema objects."""

import asyncio
import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from transformers.utils import get_json_schema

from tests.agent_cases import ScriptedEngine, make_agent_runner, run_conversations, tool_call_text
from verl.agent.incremental_template import IncrementalTemplate
from verl.agent.policy import Policy
from verl.agent.tools import call_tool, load_tools
from verl.config import load_config
from verl.doors.continuous_tokens import merge_answer, merge_turns
from verl.doors.llm_server import LLMServerClient
from verl.doors.loop_outputs import read_outputs
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import AgentState, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import (
    OpenAIFunctionCallSchema,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolCall,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
from verl.utils.errors import ConfigError, DataError
from verl.utils.rollout_trace import rollout_trace_attr, rollout_trace_op
from verl.workers.rollout.base import SamplingParams


@register("published_loop")
class PublishedLoop(AgentLoopBase):
    """All three helpers, tools by schema, log-probs carried along, traces."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.response_length = self.rollout_config.response_length
        self.parser = ToolParser.get_tool_parser(self.rollout_config.multi_turn.format, self.tokenizer)
        self.schemas = [t.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for t in self.tools.values()]

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = await self.loop.run_in_executor(None, list, kwargs["raw_prompt"])
        assert (
            self.loop is asyncio.get_running_loop() and self.processor is None and self.config and self.server_manager
        )
        await self.process_multi_modal_info(messages)
        ids = await self.ct_build_initial_tokens(messages, tools=self.schemas)
        mask: list[int] = []
        logprobs: list[float] | None = []
        with rollout_trace_attr(sample_index=kwargs["index"], step=1, rollout_n=0, name="published"):
            for _ in range(3):
                answer = await self.server_manager.generate(
                    request_id=uuid4().hex, prompt_ids=ids, sampling_params=sampling_params
                )
                merged, mask, logprobs = await self.ct_merge_assistant_token(
                    ids, answer.token_ids, mask, logprobs, answer.log_probs
                )
                ids = merged.token_ids
                assert merged.kind == "assistant" and merged.appended_token_count == len(answer.token_ids)
                _, calls = await self.parser.extract_tool_calls(answer.token_ids)
                if not calls:
                    break
                before = list(messages)
                for call in calls:
                    response, _, _ = await self.tools[call.name].execute("0", json.loads(call.arguments))
                    messages.append({"role": "tool", "content": response.text})
                merged, mask, logprobs = await self.ct_merge_non_assistant_msg(
                    before, messages, ids, mask, logprobs, tools=self.schemas
                )
                ids = merged.token_ids
        output = AgentLoopOutput(
            prompt_ids=ids[: -len(mask)],
            response_ids=ids[-len(mask) :][: self.response_length],
            response_mask=mask[: self.response_length],
            response_logprobs=logprobs[: self.response_length] if logprobs else None,
            num_turns=len(messages) + 1,
            metrics={"generate_sequences": 0.1},
            routed_experts=answer.routed_experts,
            mm_processor_kwargs=None,
        )
        assert output.as_dict()["response_mask"] == output.response_mask
        return output


def test_a_published_loop_with_all_three_helpers_trains_what_was_sampled(tokenizer: Any, tool_file: Path):
    turns = [tool_call_text("add", a=2, b=3), "The sum is 5.<|im_end|>"]
    made = make_agent_runner(tokenizer, tool_file)
    [t] = run_conversations(made, ScriptedEngine(tokenizer, turns), agent_name="published_loop")
    sampled = tokenizer(turns[0])["input_ids"] + tokenizer(turns[1])["input_ids"]
    assert t.tokens[t.loss_mask].tolist() == sampled
    assert (t.rollout_logprobs[t.loss_mask] == -0.5).all() and (t.rollout_logprobs[~t.loss_mask] == 0).all()
    text = tokenizer.decode(t.tokens)
    assert '"name": "add"' in text and "<tool_response>\n5\n</tool_response>" in text
    [ours] = run_conversations(made, ScriptedEngine(tokenizer, turns), agent_name="tool_agent")
    assert t.tokens.tolist() == ours.tokens.tolist()


def test_an_answer_without_its_end_token_gets_one_that_is_not_trained(tokenizer: Any):
    template, asked = IncrementalTemplate(tokenizer), [{"role": "user", "content": "hi"}]
    prompt = template.initial_tokens(asked)
    merged, mask, logprobs = merge_answer(prompt, [1, 2], [], None, None)
    assert (merged.token_ids, mask, logprobs) == ([*prompt, 1, 2], [1, 1], None)
    after = [*asked, {"role": "assistant", "content": "x"}, {"role": "user", "content": "more"}]
    merged, mask, _ = merge_turns(template, asked, after, merged.token_ids, mask, None)
    assert merged.inserted_token_ids == [tokenizer.eos_token_id] == [merged.token_ids[len(prompt) + 2]]
    assert merged.kind == "non_assistant" and merged.removed_prefix_token_count == 0
    assert mask == [1, 1] + [0] * merged.appended_token_count
    assert len(merged.token_ids) == len(prompt) + len(mask)


@pytest.mark.parametrize(
    ("merge", "says"),
    [
        (lambda t: merge_answer([1], [2, 3], [], [], [-1.0]), "2 tokens comes with 1 log-probs"),
        (lambda t: merge_answer([1, 2], [3], [1], [-1.0], None), "give those of generate"),
        (lambda t: merge_answer([1, 2], [3], [1], [-1.0, -1.0], [-1.0]), "1 mask values and 2 log-probs"),
        (lambda t: merge_turns(t, [{"role": "user", "content": "a"}], [], [1], [], []), "begin with previous_messages"),
        (lambda t: merge_turns(t, [], [{"role": "assistant", "content": "a"}], [1], [], []), "roles are: none"),
    ],
)
def test_a_merge_that_cannot_be_aligned_is_refused(tokenizer: Any, merge: Any, says: str):
    with pytest.raises(DataError, match=says):
        merge(IncrementalTemplate(tokenizer))


def test_pictures_and_routes_of_a_loop_are_refused_rather_than_dropped():
    server = LLMServerClient(Policy(None, SamplingParams(), 99, 0, 0))
    for field, says in (({"multi_modal_data": {"images": [b"x"]}}, "only text"), ({"routed_experts": [1]}, "routing")):
        with pytest.raises(DataError, match=says):
            read_outputs(AgentLoopOutput([1], [2], [0], **field), server, 0)
    [t] = read_outputs(AgentLoopOutput([1], [2], [0], multi_modal_data={"images": None}), server, 0)
    assert t.num_sampled == 0


class Counted(ToolAgentLoop):
    """A tool agent that counts its turns and shouts."""

    async def generate_turn(self, data: Any, sampling_params: Any) -> Any:
        assert data.state is AgentState.GENERATING
        calls = await super().generate_turn(data, {**sampling_params, "temperature": 0.5})
        data.metrics.num_preempted = data.assistant_turns
        return calls


def test_a_published_tool_agent_may_be_derived_from(tokenizer: Any, tool_file: Path, tmp_path: Path):
    (tmp_path / "loops.yaml").write_text(
        f"- name: counted\n  _target_: {__name__}.Counted\n- name: one\n  _target_: "
        "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop\n"
    )
    made = make_agent_runner(
        tokenizer, tool_file, f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}"
    )
    turns = [tool_call_text("add", a=2, b=3), "5<|im_end|>"]
    [t] = run_conversations(made, ScriptedEngine(tokenizer, turns), agent_name="counted")
    assert t.loop_timings["num_preempted"] == 2
    [t] = run_conversations(made, ScriptedEngine(tokenizer, ["five<|im_end|>"]), agent_name="one")
    assert tokenizer.decode(t.tokens[t.loss_mask]) == "five<|im_end|>"


def test_a_tool_agent_of_earlier_import_paths_asks_any_server(tokenizer: Any):
    from verl.agent.llm_server import TokenOutput
    from verl.agent.loop import ConfigWrap, ToolListWrap
    from verl.agent.tool_agent import ToolAgentLoop as Earlier

    class Server:
        async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **media: Any) -> Any:
            assert sampling_params["temperature"] == 0.5 and sampling_params["max_tokens"] == 60
            ids = tokenizer("5<|im_end|>", add_special_tokens=False)["input_ids"]
            return TokenOutput(ids, [-0.5] * len(ids), "completed", extra_fields={"min_global_steps": 3})

    config = load_config(["actor_rollout_ref.model.path=x", "data.max_response_length=60"])
    loop = Earlier(ConfigWrap(config), Server(), tokenizer, tools=ToolListWrap([]))
    output = asyncio.run(loop.run({"temperature": 0.5}, raw_prompt=[{"role": "user", "content": "?"}], index=0))
    assert tokenizer.decode(output.response_ids) == "5<|im_end|>" and set(output.response_logprobs) == {-0.5}
    assert output.response_mask == [1] * len(output.response_ids) and output.extra_fields["stop_reason"] == "stop"


def weather(city: str, days: list[int], unit: str = "C") -> str:
    """The weather.

    Args:
        city: where
        days: which days
        unit: the unit (choices: ["C", "F"])
    """
    return f"{city} {unit}"


def test_a_schema_is_built_from_get_json_schema_and_dumped_whole():
    raw = get_json_schema(weather)
    schema = OpenAIFunctionToolSchema(**raw)
    assert schema == OpenAIFunctionToolSchema.model_validate(raw)
    assert (
        schema.model_dump(exclude_unset=True, exclude_none=True)["function"]["parameters"]
        == raw["function"]["parameters"]
    )
    parameters = schema.function.parameters
    assert parameters.properties["unit"].enum == ["C", "F"] and parameters.properties["city"].type == "string"
    assert parameters.required == ["city", "days"] and schema.function.strict is False
    assert json.loads(schema.model_dump_json())["function"]["strict"] is False
    days = schema.model_dump(exclude_none=True)["function"]["parameters"]["properties"]["days"]
    assert days == {"type": "array", "items": {"type": "integer"}, "description": "which days"}


def test_a_schema_is_built_from_objects():
    city = OpenAIFunctionPropertySchema(type="string", description="where")
    parameters = OpenAIFunctionParametersSchema(type="object", properties={"city": city}, required=["city"])
    function = OpenAIFunctionSchema(name="weather", description="The weather.", parameters=parameters)
    schema = OpenAIFunctionToolSchema(type="function", function=function)
    assert schema.model_dump(exclude_unset=True)["function"]["parameters"]["properties"]["city"]["type"] == "string"
    assert city.model_dump()["enum"] is None and parameters.required == ["city"]
    with pytest.raises(ConfigError, match="OpenAIFunctionParsedSchema needs arguments"):
        OpenAIFunctionParsedSchema(name="x")


@pytest.mark.parametrize(
    ("text", "arguments", "failed"), [('{"a": 1}', {"a": 1}, False), ("{a", {}, True), ("[1]", {}, True)]
)
def test_a_call_says_whether_its_arguments_could_be_read(text: str, arguments: dict[str, Any], failed: bool):
    parsed = OpenAIFunctionToolCall(id="1", function={"name": "f", "arguments": text}).function
    schema, wrong = OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)
    assert (schema.name, schema.arguments, wrong) == ("f", arguments, failed)


def test_a_response_says_what_it_holds():
    assert ToolResponse().is_empty() and not ToolResponse(text="a").is_empty()
    assert ToolResponse(text="a").is_text_only() and not ToolResponse(text="a", image=["x"]).is_text_only()


PUBLISHED_TOOL = """
from typing import Any, Optional
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import function_tool
from verl.tools.schemas import (OpenAIFunctionParametersSchema, OpenAIFunctionPropertySchema, OpenAIFunctionSchema,
                                OpenAIFunctionToolSchema, ToolResponse)

class Search(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.field = list(tool_schema.function.parameters.properties)[0]

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        return ToolResponse(text="found " + parameters[self.field]), 0.0, {}

properties = {"q": OpenAIFunctionPropertySchema(type="string", description="what")}
parameters = OpenAIFunctionParametersSchema(type="object", properties=properties, required=["q"])
schema = OpenAIFunctionToolSchema(type="function",
    function=OpenAIFunctionSchema(name="lookup", description="Look up.", parameters=parameters))

@function_tool(schema=schema)
def anything(q):
    return "looked up " + q
"""


def test_published_tools_read_their_schema_and_functions_take_one(tmp_path: Path, monkeypatch):
    (tmp_path / "published_tools.py").write_text(PUBLISHED_TOOL)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tools.yaml").write_text(
        "tools:\n- class_name: published_tools.Search\n  config: {type: native}\n  tool_schema: {type: function, "
        "function: {name: search, description: d, parameters: {type: object, properties: {query: {type: string}}}}}\n"
    )
    tools = load_tools(str(tmp_path / "tools.yaml"), "pkg://published_tools")
    assert set(tools) == {"search", "lookup"} and all(isinstance(tool, BaseTool) for tool in tools.values())
    replies = [
        asyncio.run(call_tool(tools, name, json.dumps(arguments), {}))[0].text
        for name, arguments in (("search", {"query": "x"}), ("lookup", {"q": "y"}))
    ]
    assert replies == ["found x", "looked up y"]
