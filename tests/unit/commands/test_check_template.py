"""Chat templates under random conversations: the real ones pass, broken ones are told apart."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from verl.commands.check_template import check_template, main
from verl.utils.errors import ConfigError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}END\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LATE = "{{ ' again' if m['role'] == 'user' and loop.index > 3 else '' }}"


@pytest.fixture(params=["qwen3", "qwen2.5"])
def folder(request: pytest.FixtureRequest, test_data: Path) -> Path:
    return test_data / "tokenizers" / request.param


def test_the_real_templates_can_be_trained_on_and_rewriting_is_noted(folder: Path):
    report = check_template(AutoTokenizer.from_pretrained(folder), 60)
    assert report.passed, report.problems
    rewrites = "earlier turns are left alone" in report.notes
    assert rewrites == (folder.name == "qwen3")
    if rewrites:
        assert "think" in report.notes["earlier turns are left alone"]


def test_the_mask_of_the_sample_covers_answers_and_their_end_marks(folder: Path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids, mask = check_template(tokenizer, 20).shortest_example
    trained = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert trained.endswith("<|im_end|>") and "<|im_start|>" not in trained


@pytest.mark.parametrize(
    ("template", "check"),
    [
        (CHATML.replace("END", ""), "user turns can be appended"),
        (CHATML.replace("END", "<|im_end|>").replace("m['content'] }}", "m['content'] | upper }}"), "user turns"),
        (
            CHATML.replace("END", "<|im_end|>").replace("{{ m['role'] }}", "{{ m['role'] }}" + LATE),
            "incremental turns equal",
        ),
    ],
)
def test_templates_that_cannot_be_rendered_incrementally_are_found(test_data: Path, template: str, check: str):
    tokenizer = AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen3")
    tokenizer.chat_template = template
    report = check_template(tokenizer, 30)
    assert any(check in problem for problem in report.problems)
    assert "earlier turns are left alone" in report.checks_reached or "user turns can be appended" in report.problems


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (CHATML.replace("END", "<|im_end|>") + "{{ broken", "user turns can be rendered"),
        (CHATML.replace("END", "<|im_end|>") + "{{ raise_exception('nothing') }}", "user turns can be rendered"),
    ],
)
def test_templates_that_raise_are_found(test_data: Path, template: str, says: str, capsys: Any, tmp_path: Path):
    (tmp_path / "t.jinja").write_text(template)
    tokenizer = str(test_data / "tokenizers" / "qwen3")
    assert main([tokenizer, "--chat-template", str(tmp_path / "t.jinja"), "--conversations", "10"]) == 1
    shown = capsys.readouterr().out
    assert "would be wrong" in shown and "not reached" in shown
    with pytest.raises(ConfigError, match="give at least 1"):
        main([tokenizer, "--conversations", "0"])


def test_a_template_without_system_turns_is_noted(test_data: Path):
    tokenizer = AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen3")
    refuse = "{{ raise_exception('no system') if messages[0]['role'] == 'system' else '' }}"
    tokenizer.chat_template = refuse + CHATML.replace("END", "<|im_end|>")
    report = check_template(tokenizer, 30)
    assert report.passed and "no system" in report.notes["system turns can be rendered"]


def test_the_command_shows_a_table_and_says_whether_it_works(test_data: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(test_data / "tokenizers" / "qwen3"), "--conversations", "10"]) == 0
    shown = capsys.readouterr().out
    assert "no, handled" in shown and "multi-turn training on this template works" in shown
