"""A prompt whose last message is the assistant's begins the answer: it is continued as `transformers` continues it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.unit.data.test_chat import char_tokenizer
from verl.agent.incremental_template import IncrementalTemplate
from verl.commands.check_data.rows import read_split
from verl.commands.serve.prompt_reader import PromptReader
from verl.config import DataConfig
from verl.config.data import SFTDataConfig
from verl.data.assistant_turns import TurnTokenizer
from verl.data.chat import PromptTemplate, with_answer
from verl.data.conversations import conversation_of
from verl.data.prompts import load_prompts
from verl.utils.errors import DataError

TURNS = "{% for m in messages %}"
SHAPES = {  # how models of different makers write a conversation
    "chatml": TURNS + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "trimming": TURNS + "<|header|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|end|>\n\n{% endif %}",
    "inst": TURNS + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}"
    "{% endfor %}",
    "own role": TURNS + "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}</turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}",
    "thinking dropped": TURNS + "{% if m.role == 'user' %}<U>{{ m.content }}{% else %}<A>"
    "{{ m.content.split('</think>')[-1] }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<A><think>\n{% endif %}",
    "thinking closed": TURNS + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "ends with a user": "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
    + TURNS + "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
}  # fmt: skip


def conversation(begun: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "What is 2+3?"}, {"role": "assistant", "content": begun}]


def rendered(template: str, begun: str) -> str:
    return PromptTemplate(char_tokenizer(template)).render_prompt(conversation(begun))


@pytest.mark.parametrize("begun", ["Let me think", " 3", "Result:\n"])
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "ends with a user"])
def test_a_begun_answer_is_continued_as_transformers_does_it(shape: str, begun: str):
    own = char_tokenizer(SHAPES[shape]).apply_chat_template(
        conversation(begun), tokenize=False, continue_final_message=True
    )
    assert rendered(SHAPES[shape], begun) == own


@pytest.fixture(scope="module")
def qwen25(test_data: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen2.5")


@pytest.mark.parametrize("name", ["qwen25", "tokenizer"])  # Qwen2.5's and Qwen3's
def test_real_templates_continue_a_begun_answer(request: pytest.FixtureRequest, name: str):
    tokenizer = request.getfixturevalue(name)
    messages = conversation("Let me think step by step.")
    own = tokenizer.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    template = PromptTemplate(tokenizer)
    assert template.encode([template.render_prompt(messages)]) == [own]
    assert IncrementalTemplate(tokenizer).initial_tokens(messages) == own
    assert PromptReader(tokenizer, 1000).read_chat({"messages": messages}, []) == own


def test_a_thinking_that_the_answer_begins_is_neither_closed_nor_doubled_nor_dropped(tokenizer: Any):
    assert (
        PromptTemplate(tokenizer).render_prompt(conversation("Let me think. <think>"))
        == "<|im_start|>user\nWhat is 2+3?<|im_end|>\n<|im_start|>assistant\nLet me think. <think>"
    )
    for shape, start in (("thinking dropped", "<U>What is 2+3?<A>"), ("thinking closed", "assistant\n")):
        for begun in ("<think>\nFirst,", "<think>\nFive.\n</think>\n\nIt is"):
            assert rendered(SHAPES[shape], begun).endswith(start + begun), (shape, begun)


def test_a_template_that_refuses_a_last_answer_gets_it_behind_its_generation_prompt():
    assert rendered(SHAPES["ends with a user"], "Let me") == "<user>What is 2+3?<assistant>Let me"


def test_blank_beginnings_open_an_answer_and_those_that_hold_more_than_text_are_refused():
    assert rendered(SHAPES["chatml"], "").endswith("<|im_end|>\n<|im_start|>assistant\n")
    template = PromptTemplate(char_tokenizer(SHAPES["chatml"]))
    for more in ({"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, {"reasoning_content": "so"}):
        begun = {"role": "assistant", "content": "Let me" if "tool_calls" in more else "", **more}
        with pytest.raises(ValueError, match=rf"the last message is the assistant's and has {next(iter(more))}"):
            template.render_prompt([*conversation("")[:1], begun])


def test_a_run_check_data_and_agents_sample_from_the_same_tokens(tmp_path: Path, qwen25: Any):
    tokenizer = qwen25
    file = tmp_path / "rows.jsonl"
    begun = {"data_source": "x", "prompt": conversation("Let me"), "reward_model": {"ground_truth": "5"}}
    calls = [*conversation("")[:1], {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
    file.write_text(json.dumps(begun) + "\n")
    own = tokenizer.apply_chat_template(conversation("Let me"), continue_final_message=True, return_dict=False)
    [prompt] = load_prompts(str(file), DataConfig(), tokenizer)
    assert prompt.prompt_ids == own and prompt.text.endswith("<|im_start|>assistant\nLet me")
    [checked] = read_split("training", str(file), -1, DataConfig(), tokenizer, print).rows
    assert checked.rendered == prompt.text
    file.write_text(json.dumps(begun | {"prompt": calls}) + "\n")
    with pytest.raises(DataError, match=r"rows.jsonl line 1: .*the last message is the assistant's and has tool_calls"):
        load_prompts(str(file), DataConfig(), tokenizer)


def test_a_reward_model_and_fine_tuning_read_the_beginning_and_the_answer_as_one_message():
    whole = [*conversation("")[:1], {"role": "assistant", "content": "Let me see: 5"}]
    assert with_answer(conversation("Let me"), " see: 5") == whole
    assert conversation_of({"prompt": conversation("Let me"), "response": " see: 5"}, SFTDataConfig()) == whole
    assert with_answer(whole[:1], "5") == conversation("5")


def test_fine_tuning_on_two_answers_in_a_row_trains_both_after_their_own_start():
    template = PromptTemplate(char_tokenizer(SHAPES["chatml"]))
    messages = [*conversation("first"), {"role": "assistant", "content": "second"}]
    [segments] = TurnTokenizer(char_tokenizer(SHAPES["chatml"])).segment_conversation(messages, template)
    assert [text for text, trained in segments if trained] == ["first<|im_end|>\n", "second<|im_end|>\n"]
