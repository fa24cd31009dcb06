"""Conversations with tools: ids kept verbatim, exact masks, limits, errors as replies."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.agent_cases import TOOLS, ScriptedEngine, make_agent_runner, run_conversations, tool_call_text
from verl.agent.agent_runner import AgentRunner
from verl.agent.incremental_template import IncrementalTemplate
from verl.agent.loop import AGENT_LOOPS
from verl.agent.tools import call_tool, load_tools, truncate_text
from verl.config import load_config
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.trainer.ppo.batch_metrics import turn_metrics
from verl.utils.errors import ConfigError


def test_a_conversation_keeps_sampled_ids_and_masks_only_them(tokenizer: Any, tool_file: Path):
    turns = ["<think>\nadd\n</think>\n\n" + tool_call_text("add", a=2, b=3), "It is 5.<|im_end|>"]
    engine = ScriptedEngine(tokenizer, turns)
    [t] = run_conversations(make_agent_runner(tokenizer, tool_file), engine)
    prompt = tokenizer.decode(t.tokens[: t.prompt_length])
    assert prompt.endswith("<|im_start|>assistant\n") and '"name": "add"' in prompt and "What is 2+3?" in prompt
    sampled = tokenizer.decode(t.tokens[t.loss_mask])
    assert sampled == "".join(turns)
    between = tokenizer.decode(
        [i for i, m in zip(t.response_ids, t.loss_mask[t.prompt_length :], strict=True) if not m]
    )
    assert between == ("\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert (t.rollout_logprobs[t.loss_mask] == -0.5).all() and (t.rollout_logprobs[~t.loss_mask] == 0).all()
    assert t.num_turns == 4 and t.policy_version == (0, 1)
    metrics = turn_metrics([t])
    assert metrics["tool_call_counts/mean"] == 1 and metrics["num_turns/max"] == 4
    assert 0 < metrics["timing_s/agent_loop/generate_sequences/max"] < 60
    first, second = engine.requests
    assert second.prompt_ids == t.tokens[: len(second.prompt_ids)].tolist()
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert first.request_id != second.request_id and first.conversation == second.conversation


def test_the_real_qwen3_template_drops_thinking_when_rendered_again_and_incremental_rendering_does_not(tokenizer: Any):
    messages = [{"role": "user", "content": "hi"}]
    template = IncrementalTemplate(tokenizer)
    answer = "<think>\nsecret\n</think>\n\nhello<|im_end|>"
    ids = template.initial_tokens(messages) + tokenizer(answer, add_special_tokens=False)["input_ids"]
    follow = {"role": "user", "content": "again"}
    text = tokenizer.decode(ids + template.appended_tokens([follow], ids))
    again = tokenizer.apply_chat_template(
        [*messages, {"role": "assistant", "content": answer.removesuffix("<|im_end|>")}, follow],
        tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    assert "secret" in text and "secret" not in again
    assert text.replace("<think>\nsecret\n</think>\n\n", "") == again


def test_an_answer_cut_before_its_end_mark_gets_one(tokenizer: Any):
    template = IncrementalTemplate(tokenizer)
    text = tokenizer.decode(template.appended_tokens([{"role": "user", "content": "go on"}], [1, 2, 3]))
    assert text == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("setting", "turns", "reason"),
    [
        ("max_assistant_turns=2", 2, "stop"),
        ("max_user_turns=1", 2, "stop"),
        ("max_assistant_turns=null", 5, "stop"),
    ],
)
def test_limits_end_a_conversation(tokenizer: Any, tool_file: Path, setting: str, turns: int, reason: str):
    engine = ScriptedEngine(tokenizer, [tool_call_text("add", a=1, b=1)] * 4 + ["<|im_end|>"])
    loop = make_agent_runner(tokenizer, tool_file, f"actor_rollout_ref.rollout.multi_turn.{setting}")
    [t] = run_conversations(loop, engine)
    assert len(engine.requests) == turns and t.stop_reason == reason


def test_the_response_never_grows_beyond_its_length(tokenizer: Any, tool_file: Path):
    engine = ScriptedEngine(tokenizer, [tool_call_text("add", a=1, b=1)] * 9)
    [t] = run_conversations(make_agent_runner(tokenizer, tool_file, "data.max_response_length=70"), engine)
    assert len(t.response_ids) <= 70 and t.stop_reason == "length" and bool(t.loss_mask[-1])


def test_failures_of_tools_are_replies(tokenizer: Any, tool_file: Path):
    tools = load_tools(None, str(tool_file))

    def says(name: str, arguments: str) -> str:
        return str(asyncio.run(call_tool(tools, name, arguments, {}))[0].text)

    assert says("add", '{"a": 1, "b": 2}') == "3"
    assert "there is no tool 'ad'; did you mean 'add'?" in says("ad", "{}")
    assert "not valid JSON" in says("add", "{a: 1}") and "expected an object" in says("add", "[1]")
    assert says("fail", '{"x": 1}') == "Error when executing fail: ValueError: no such row"
    assert "Error when executing add" in says("add", '{"c": 1}')
    assert says("slow", '{"x": 1}') == "Error: slow took longer than 0.05 seconds"


def test_half_a_surrogate_pair_in_a_tools_text_has_tokens(tokenizer: Any):
    ids = IncrementalTemplate(tokenizer).appended_tokens([{"role": "tool", "name": "add", "content": "a \ud800 b"}])
    assert "a ? b" in tokenizer.decode(ids)


def test_long_tool_texts_are_cut_where_the_setting_says():
    assert truncate_text("abcdef", 6, "left") == "abcdef"
    assert truncate_text("abcdefgh", 4, "left").endswith("efgh") and truncate_text("abcdefgh", 4, "right").startswith(
        "abcd"
    )
    middle = truncate_text("abcdefgh", 4, "middle")
    assert middle.startswith("ab...") and middle.endswith("...gh")
    assert {truncate_text("abc", 0, side) for side in ("left", "middle", "right")} == {"...(truncated)..."}


def test_tools_come_from_yaml_classes_with_create_kwargs(tmp_path: Path, monkeypatch: Any, tokenizer: Any):
    (tmp_path / "yaml_tools.py").write_text(
        "from verl.tools.base_tool import BaseTool\nfrom verl.tools.schemas import ToolResponse\n"
        "class Shop(BaseTool):\n"
        "    async def create(self, instance_id=None, **kw):\n"
        "        self.price = kw['create_kwargs']['price']; self.live = True; return 'i', ToolResponse()\n"
        "    async def execute(self, instance_id, parameters, **kw):\n"
        "        return ToolResponse(text=str(self.price * parameters['n'])), 1.0, {}\n"
        "    async def release(self, instance_id, **kw):\n        self.live = False\n"
    )
    (tmp_path / "tools.yaml").write_text(
        "tools:\n- class_name: yaml_tools.Shop\n  config: {type: native}\n  tool_schema:\n    type: function\n"
        "    function: {name: buy, description: d, parameters: {type: object, properties: {n: {type: integer}}}}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path / 'tools.yaml'}"
    turn = "actor_rollout_ref.rollout.multi_turn"
    made = AgentRunner(load_config(["actor_rollout_ref.model.path=x", f"{turn}.enable=True", path]), tokenizer)
    engine = ScriptedEngine(tokenizer, [tool_call_text("buy", n=3), "ok<|im_end|>"])
    [t] = run_conversations(made, engine, extra_info={"tools_kwargs": {"buy": {"create_kwargs": {"price": 7}}}})
    assert "<tool_response>\n21\n</tool_response>" in tokenizer.decode(t.tokens)
    assert made.tools["buy"].live is False


def test_rows_choose_their_loop_and_loops_may_score_themselves(tokenizer: Any, tool_file: Path):
    if "echo_agent" not in AGENT_LOOPS:

        @register("echo_agent")
        class Echo(AgentLoopBase):
            async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
                prompt = await self.ct_build_initial_tokens(kwargs["raw_prompt"])
                out = await self.server_manager.generate("r", prompt_ids=prompt, sampling_params=sampling_params)
                mask = [1] * len(out.token_ids)
                return AgentLoopOutput(prompt, out.token_ids, mask, out.log_probs, reward_score=2.5, num_turns=2)

    engine = ScriptedEngine(tokenizer, ["hello<|im_end|>"])
    ts = run_conversations(make_agent_runner(tokenizer, tool_file), engine, n=3, agent_name="echo_agent")
    assert [t.reward for t in ts] == [2.5] * 3 and len({r.request_id for r in engine.requests}) == 3
    with pytest.raises(ConfigError, match=r"unknown agent loop 'tool_agnt'.*tool_agent"):
        run_conversations(make_agent_runner(tokenizer, tool_file), engine, agent_name="tool_agnt")


def test_sixty_four_conversations_run_at_once(tokenizer: Any, tool_file: Path):
    engine = ScriptedEngine(tokenizer, [tool_call_text("add", a=2, b=3), "5<|im_end|>"], min_concurrent=64)
    ts = run_conversations(make_agent_runner(tokenizer, tool_file), engine, n=64)
    assert len(ts) == 64 and engine.max_running == 64


def test_misspelt_files_and_doubled_names_are_refused(tmp_path: Path, tool_file: Path):
    with pytest.raises(ConfigError, match="No such file"):
        load_tools(str(tmp_path / "x.yaml"), None)
    (tmp_path / "none.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="no function there is marked @function_tool"):
        load_tools(None, str(tmp_path / "none.py"))
    (tmp_path / "twice.py").write_text(TOOLS + TOOLS.split("@function_tool(")[0].replace("two numbers", "again"))
    with pytest.raises(ConfigError, match="two function tools are called 'add'"):
        load_tools(None, str(tmp_path / "twice.py"))
