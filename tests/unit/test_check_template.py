"""Chat templates under random conversations: the real ones pass, broken ones are told apart."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from verl.agent.check_template import check_template, main

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
    assert report.good, report.problems
    rewrites = "earlier turns are left alone" in report.notes
    assert rewrites == (folder.name == "qwen3")
    if rewrites:
        assert "think" in report.notes["earlier turns are left alone"]


def test_the_mask_of_the_sample_covers_answers_and_their_end_marks(folder: Path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids, mask = check_template(tokenizer, 20).sample
    trained = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert trained.endswith("<|im_end|>") and "<|im_start|>" not in trained


@pytest.mark.parametrize(
    ("template", "check"),
    [
        (CHATML.replace("END", ""), "user turns can be appended"),
        (CHATML.replace("END", "<|im_end|>").replace("m['content'] }}", "m['content'] | upper }}"), "user turns"),
        (
            CHATML.replace("END", "<|im_end|>").replace("{{ m['role'] }}", "{{ m['role'] }}" + LATE),
            "stitched turns equal",
        ),
    ],
)
def test_templates_that_cannot_be_stitched_are_found(test_data: Path, template: str, check: str):
    tokenizer = AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen3")
    tokenizer.chat_template = template
    assert any(check in problem for problem in check_template(tokenizer, 30).problems)


def test_the_command_shows_a_table_and_says_whether_it_works(test_data: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(test_data / "tokenizers" / "qwen3"), "--conversations", "10"]) == 0
    shown = capsys.readouterr().out
    assert "no, handled" in shown and "multi-turn training on this template works" in shown
