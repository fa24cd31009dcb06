"""Messages and the chat template: what is accepted, what is refused, and that nothing is tokenised twice."""

import logging

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from verl.data import chat
from verl.data.chat import PromptTemplate, read_messages
from verl.utils.errors import ConfigError

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if mood is defined %}{{ mood }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def char_tokenizer(chat_template=None, special=False):
    """One token per character; with `special`, ^ in front and ~ at the end of a text."""
    characters = [chr(i) for i in range(32, 127)] + ["\n"]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    ends = {"^": characters.index("^"), "~": characters.index("~")}
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single="^ $A ~", special_tokens=list(ends.items()))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=chat_template, bos_token="^", eos_token="~", unk_token="?"
    )


def user(content):
    return [{"role": "user", "content": content}]


def test_a_string_is_one_user_message():
    assert read_messages("hello") == user("hello")


def test_null_fields_that_parquet_fills_in_are_left_out():
    assert read_messages([{"role": "user", "content": "hi", "name": None}]) == user("hi")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "no messages"),
        (user("  \n"), "prompt is empty"),
        ("", "prompt is empty"),
        (7, "expected a list of .* found int"),
        (["hi"], "message 0 is str"),
        ([{"role": "robot", "content": "hi"}], "message 0 has role 'robot'; allowed: system, developer, user"),
        ([{"content": "hi"}], "message 0 has role None"),
        ([*user("hi"), {"role": "user", "content": None}], r"message 1 \(user\) has no content"),
        (user(7), "content of type int"),
        (user([{"type": "image"}]), "content part of type 'image'; only text"),
    ],
)
def test_a_broken_conversation_is_refused_with_the_message_named(prompt, message):
    with pytest.raises(ValueError, match=message):
        read_messages(prompt)


def test_the_template_is_applied_with_generation_prompt_and_variables():
    template = PromptTemplate(char_tokenizer(TEMPLATE), {"mood": "!"})
    assert template.render_prompt(user("hi")) == "<user>hi!<assistant>"


def test_ids_are_those_of_the_tokenizers_own_template_call():
    tokenizer = char_tokenizer(TEMPLATE, special=True)
    template = PromptTemplate(tokenizer)
    messages = user("hi"), user("there")
    ids = template.encode([template.render_prompt(m) for m in messages])
    own = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]
    assert ids == own
    assert tokenizer.decode(ids[0]).replace(" ", "") == "<user>hi<assistant>"  # no second ^ from the tokenizer


def test_real_qwen3_prompts_equal_the_tokenizers_own_template_call(test_data):
    tokenizer = AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen3")
    template = PromptTemplate(tokenizer, {"enable_thinking": False})
    messages = [{"role": "system", "content": "Count."}, *user("What is 2+2?")]
    own = tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False, return_dict=False)
    assert template.encode([template.render_prompt(messages)]) == [own]
    assert "</think>" in template.render_prompt(messages)


def test_without_a_template_the_prompt_is_the_plain_text_and_may_be_continued(caplog):
    chat._warn_no_template.cache_clear()
    tokenizer = char_tokenizer(special=True)
    with caplog.at_level(logging.WARNING):
        template = PromptTemplate(tokenizer)
        PromptTemplate(tokenizer)
    assert sum("no chat template" in record.getMessage() for record in caplog.records) == 1
    text = template.render([{"role": "system", "content": "ab"}, *user("c")])
    assert text == "ab\nc"
    characters = tokenizer.convert_ids_to_tokens(template.encode([text])[0])
    assert characters == ["^", "a", "b", "\n", "c"]  # begins as the tokenizer begins a text, but is not ended


@pytest.mark.parametrize("key", ["tokenize", "add_generation_prompt", "return_tensors"])
def test_arguments_that_would_change_the_call_itself_are_refused(key):
    with pytest.raises(ConfigError, match=f"apply_chat_template_kwargs sets {key}"):
        PromptTemplate(char_tokenizer(TEMPLATE), {key: True})
