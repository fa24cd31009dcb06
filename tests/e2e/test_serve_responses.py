"""POST /v1/responses as the official client asks it, whole and streamed, with tools and without."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from tests.e2e.serving import serving
from tests.e2e.test_serve_requests import CALL, ScriptedEngine, tool_client
from verl.workers.rollout.base import Completion, GenerationRequest

TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": True}


@pytest.fixture(scope="module")
def tokenizer(test_data: Path) -> Any:
    return AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen3")


def client_of(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def talk(tokenizer: Any) -> Iterator[tuple[openai.OpenAI, ScriptedEngine]]:
    server, engine = tool_client(tokenizer, "Two and two are four.<|im_end|>")
    with serving(server) as address:
        yield client_of(address), engine


def test_the_clients_first_example_is_answered(talk: Any, tokenizer: Any):
    client, engine = talk
    response = client.responses.create(model="tools", instructions="Be brief.", input="What is 2+2?")
    assert response.output_text == "Two and two are four." and response.status == "completed"
    prompt = tokenizer.decode(engine.prompts[-1])
    assert "system\nBe brief.<|im_end|>" in prompt and "user\nWhat is 2+2?<|im_end|>" in prompt
    assert response.usage.input_tokens == len(engine.prompts[-1]) and response.usage.output_tokens == len(engine.ids)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_a_conversation_of_items_is_the_same_prompt_as_its_chat(talk: Any):
    client, engine = talk
    turns: Any = [("developer", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "2+2?")]
    kinds = {"assistant": "output_text"}
    items: Any = [{"role": r, "content": [{"type": kinds.get(r, "input_text"), "text": t}]} for r, t in turns]
    client.responses.create(model="tools", input=items)
    chat: Any = [{"role": r.replace("developer", "system"), "content": t} for r, t in turns]
    client.chat.completions.create(model="tools", messages=chat)
    assert engine.prompts[-1] == engine.prompts[-2]


def test_a_stream_has_the_events_that_the_client_expects(talk: Any):
    client, _ = talk
    with client.responses.stream(model="tools", input="What is 2+2?") as stream:
        events = list(stream)
        response = stream.get_final_response()
    assert response.output_text == "Two and two are four." and response.usage.output_tokens > 3
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        f"response.{kind}"
        for kind in (
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.done",
            "content_part.done", "output_item.done", "completed",
        )
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3 and "".join(deltas) == response.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_comes_as_an_item_and_its_output_goes_back(tokenizer: Any, stream: bool):
    server, engine = tool_client(tokenizer, f"Let me add.\n{CALL}<|im_end|>")
    with serving(server) as address:
        client = client_of(address)
        asked: Any = dict(model="tools", input="1+1?", tools=[TOOL])
        if stream:
            with client.responses.stream(**asked) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(**asked)
        message, call = response.output
        assert message.content[0].text.strip() == "Let me add."
        assert call.name == "add" and json.loads(call.arguments) == {"a": 1}
        back: Any = [
            {"role": "user", "content": "1+1?"},
            {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "2"},
        ]
        client.responses.create(model="tools", input=back, tools=[TOOL])
        text = tokenizer.decode(engine.prompts[-1])
        assert "<tool_response>\n2\n</tool_response>" in text and '"arguments": {"a": 1}' in text


def test_an_answer_that_was_cut_is_incomplete(tokenizer: Any):
    class Cut(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> list[Completion]:
            size = request.sampling.max_tokens
            return [Completion(self.ids[:size], [0.0] * size, "length", (0, 0))]

    server, _ = tool_client(tokenizer, "")
    server.engine = Cut(tokenizer, "one two three four")
    with serving(server) as address:
        response = client_of(address).responses.create(model="tools", input="?", max_output_tokens=2)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens" and response.usage is not None
    assert response.usage.output_tokens == 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input": 3}, "input must be a text, or a list"),
        ({"input": []}, "input must be a text, or a list"),
        ({}, "input is missing"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id is not supported here"),
        ({"input": "x", "reasoning": {"effort": "low"}}, "reasoning is not supported here"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens must be a whole number"),
        ({"input": "x", "tool_choice": "required"}, "needs one of the tools, which are: none"),
        ({"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice must be"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "only functions can be called here"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input: an item is a message"),
        ({"input": [3]}, "input: an item is a message"),
        ({"input": "x", "text": {"format": 3}}, "text.format must be an object"),
        ({"input": "x", "model": "gpt-5"}, "the model 'gpt-5' is not served here"),
    ],
)
def test_what_cannot_be_answered_is_the_clients_mistake(talk: Any, fields: dict[str, Any], says: str):
    client, _ = talk
    with pytest.raises(openai.APIStatusError, match=says) as caught:
        client.post("/responses", body=fields, cast_to=object)
    assert 400 <= caught.value.status_code < 500
