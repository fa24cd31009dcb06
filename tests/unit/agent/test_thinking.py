"""Calls that a model only thinks about: no parser takes them, wherever the thinking begins and ends."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.agent_cases import ScriptedEngine, make_agent_runner, row, run_conversations, tool_call_text
from tests.unit.agent.test_tool_parsers import ONE, SCHEMA
from verl.agent.tool_parsers import TOOL_PARSERS, FunctionCall, ToolParser
from verl.commands.serve.answers import Job
from verl.workers.rollout.base import Completion, GenerationRequest, SamplingParams


class Characters:
    """A tokenizer with one token per character."""

    all_special_ids = ()

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(map(chr, ids))

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}


def names(format_name: str, text: str) -> list[str]:
    parser = TOOL_PARSERS.get(format_name)(Characters())
    return [call.name for call in asyncio.run(parser.extract_tool_calls(list(map(ord, text)), [SCHEMA]))[1]]


def thinking_marks(format_name: str) -> list[tuple[str, str]]:
    own = {
        "seed": [("<seed:think>", "</seed:think>")],
        "gemma4": [("<|channel>thought\n", "<channel|>")],
        "gpt-oss": [("<|channel|>analysis<|message|>", "<|end|>")],
        "hermes": [("[THINK]", "[/THINK]")],
    }
    return [("<think>", "</think>"), *own.get(format_name, [])]


@pytest.mark.parametrize("name", ONE)
def test_a_draft_in_the_thinking_is_no_call(name: str):
    call, draft = ONE[name], ONE[name].replace("add", "draft")
    for start, end in thinking_marks(name):
        assert names(name, f"{start}\nmaybe {draft}, no.{end}\nIt is 3.") == []
        assert names(name, f"{start}\nmaybe {draft}{end}\n\n{call}") == ["add"]
        assert names(name, f"{start}\nfirst {draft}") == []  # cut in the thinking
        assert names(name, f"Sure. {start} {draft} {end} then {start} {draft} {end} {call}") == ["add"]
        if end != "<|end|>":  # opened by the prompt; GPT-OSS ends every message so
            assert names(name, f"maybe {draft}, or {draft}{end}\n{call}") == ["add"]


@pytest.mark.parametrize("name", ONE)
def test_a_mark_of_thinking_in_an_argument_is_text(name: str):
    if name != "gpt-oss":  # its calls have no mark of their own
        assert names(name, f"<think>so</think>{ONE[name].replace('x<y', 'the tag <think>')}") == ["add"]


def test_text_is_kept_with_its_thinking_around_the_calls():
    parser = TOOL_PARSERS.get("hermes")(Characters())
    text = f"<think>\nmaybe {ONE['hermes']}\n</think>\n\nI will add. {ONE['hermes']}"
    outside, [call] = asyncio.run(parser.extract_tool_calls(list(map(ord, text))))
    assert outside == text.removesuffix(ONE["hermes"]).strip() and call.name == "add"


def test_thinking_that_never_ends_takes_time_in_proportion_to_its_length():
    for name in ("hermes", "gpt-oss"):
        assert names(name, "<think>" * 50_000) == names(name, ONE[name].split("add")[0] + "<think>" * 50_000) == []


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture
def thinker(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    return tokenizer


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        ("maybe {}.<|im_end|>", 0),
        ("maybe {} no.\n</think>\n\nIt is 5.<|im_end|>", 0),
        ("maybe {} no.\n</think>\n\n{}<|im_end|>", 1),
        ("yes.</think>{}<|im_end|>", 1),
    ],
)
def test_the_template_may_open_the_thinking(thinker: Any, tool_file: Path, answer: str, calls: int):
    call = tool_call_text("add", a=2, b=3).removesuffix("<|im_end|>")
    engine = ScriptedEngine(thinker, [answer.format(call, call), "done</think>5<|im_end|>"])
    [t] = run_conversations(make_agent_runner(thinker, tool_file), engine)
    assert len(t.tool_rewards) == calls and len(engine.requests) == 1 + calls


def test_a_question_about_the_mark_opens_no_thinking(tokenizer: Any, tool_file: Path):
    engine = ScriptedEngine(tokenizer, [tool_call_text("add", a=2, b=3), "5<|im_end|>"])
    question = replace(row(), messages=[{"role": "user", "content": "Answer 2+3, but first <think>"}])
    runner = make_agent_runner(tokenizer, tool_file)
    [t] = asyncio.run(runner.answer(question, 7, SamplingParams(n=1, max_tokens=300), engine))
    assert t.tool_rewards == [0.5]


def test_agent_loops_continue_it_and_run_a_call_that_the_prompt_begins(tokenizer: Any, tool_file: Path):
    """The prompt holds the first half of a call, the policy writes the other one."""
    engine = ScriptedEngine(tokenizer, ['"arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>', "5<|im_end|>"])
    runner = make_agent_runner(tokenizer, tool_file)
    messages = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": '<tool_call>\n{"name": "add", '}]
    prompt = replace(row(), messages=messages)
    [t] = asyncio.run(runner.answer(prompt, 7, SamplingParams(n=1, max_tokens=300), engine))
    assert tokenizer.decode(engine.requests[0].prompt_ids).endswith(messages[1]["content"])
    assert t.tool_rewards == [0.5] and "<tool_response>\n5\n" in tokenizer.decode(t.response_ids)


def test_a_parser_of_ones_own_gets_no_thinking(tokenizer: Any, tool_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TOOL_PARSERS, "_items", dict(TOOL_PARSERS._items))

    @ToolParser.register("shouting")
    class Shouting(ToolParser):
        async def extract_tool_calls(self, responses_ids, tools=None):
            words = self.tokenizer.decode(responses_ids).split()
            return "", [FunctionCall("add", '{"a": 1, "b": 2}') for word in words if word == "ADD"]

    shouting = "actor_rollout_ref.rollout.multi_turn.format=shouting"
    engine = ScriptedEngine(tokenizer, ["<think>ADD or not</think> no<|im_end|>"])
    assert run_conversations(make_agent_runner(tokenizer, tool_file, shouting), engine)[0].tool_rewards == []
    engine = ScriptedEngine(tokenizer, ["<think>ADD</think> ADD <|im_end|>", "3<|im_end|>"])
    assert run_conversations(make_agent_runner(tokenizer, tool_file, shouting), engine)[0].tool_rewards == [0.5]


def test_a_server_reads_calls_as_training_does(tokenizer: Any):
    call = tool_call_text("add", a=2, b=3)
    opened = tokenizer("<|im_start|>assistant\n<think>\n", add_special_tokens=False)["input_ids"]

    def reply(text: str) -> dict[str, Any]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        parser = ToolParser.get_tool_parser("hermes", tokenizer)
        body = {"messages": [{"role": "user", "content": "2+3?"}]}
        request = GenerationRequest(0, opened, SamplingParams())
        job = Job(tokenizer, "m", True, body, [request], (), [SCHEMA], parser, [])
        return asyncio.run(job.reply([Completion(ids, [0.0] * len(ids), "stop", (0, 0))]))["choices"][0]

    draft = reply(f"maybe {call.removesuffix('<|im_end|>')}</think>It is 5.<|im_end|>")
    assert draft["finish_reason"] == "stop" and "tool_calls" not in draft["message"]
    assert reply(f"maybe {call}")["finish_reason"] == "stop"  # the prompt opened the thinking
    real = reply(f"maybe.</think>I add. {call}")
    assert real["message"]["content"] == "maybe.</think>I add."
    assert json.loads(real["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 2, "b": 3}
