"""Answers end where they were trained to: in the saved generation config, and on every rollout engine."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from tests.unit.data.test_begun_answers import SHAPES
from verl.agent.incremental_template import IncrementalTemplate
from verl.commands.merge import _correct_generation_config
from verl.commands.quickstart.small_model import small_qwen3
from verl.config import HFModelConfig, RolloutConfig
from verl.config.rollout import ServerConfig
from verl.data.chat import end_marks
from verl.models.export import export_config_and_tokenizer
from verl.models.load import describe_ends, load_causal_lm
from verl.trainer.ppo.rollout_setup import copied_inputs
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import eos_ids
from verl.workers.rollout.tgi import TGIEngine

OLD, MARK = 14, 15  # what the model's files name, and what the template writes


def model_in(folder: Path, template: str | None, is_special: bool = True, eos: str = "<old>") -> Path:
    """A model whose files name <old>, with a tokenizer that has <mark> besides."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate("0123456789+=,;")}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="0"))
    raw.decoder = decoders.Fuse()
    raw.add_tokens([AddedToken("<old>", special=True), AddedToken("<mark>", special=is_special)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=eos, pad_token=eos)
    tokenizer.chat_template = template
    model = small_qwen3(tokenizer, 1, hidden=32, layers=1, positions=64)
    model.config.eos_token_id = model.generation_config.eos_token_id = OLD
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


ENDS = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<mark>\n{% endif %}{% endfor %}"
BASES: dict[str, tuple[str | None, bool, str]] = {
    "the tokenizer calls it eos": (ENDS, True, "<mark>"),
    "only the template knows it": (ENDS, True, "<old>"),
    "it is no special token": (ENDS, False, "<old>"),
    "there is no template": (None, True, "<mark>"),
}


@pytest.mark.parametrize("base", BASES)
def test_the_trained_mark_joins_the_ends_of_the_saved_model_and_of_the_engines(base: str, tmp_path: Path):
    folder = model_in(tmp_path / "base", *BASES[base])
    settings, tokenizer = HFModelConfig(path=str(folder)), AutoTokenizer.from_pretrained(folder)
    inputs = copied_inputs(RolloutConfig(), settings, tokenizer)
    assert set(inputs.eos_token_ids) == {OLD, MARK}  # vLLM, SGLang, servers
    model = load_causal_lm(folder)
    assert set(eos_ids(model, tokenizer)) == {OLD, MARK}  # native
    assert describe_ends(settings, tokenizer) == "<old> (14), <mark> (15)"
    before = json.loads((folder / "generation_config.json").read_text())
    export_config_and_tokenizer(model, settings, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved == {**before, "eos_token_id": [OLD, MARK]}
    (tmp_path / "saved" / "generation_config.json").write_text(json.dumps(before))  # of an older checkpoint
    _correct_generation_config(tmp_path / "saved")
    assert GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id == [OLD, MARK]


def test_a_list_of_ends_that_has_the_mark_stays_as_it_is(tmp_path: Path):
    folder = model_in(tmp_path / "base", ENDS)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [MARK, 3, OLD]}))
    before = path.read_text()
    _correct_generation_config(folder)
    assert path.read_text() == before
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = copied_inputs(RolloutConfig(), HFModelConfig(path=str(folder)), tokenizer)
    assert set(inputs.eos_token_ids) == {MARK, 3, OLD}


def test_the_mark_is_the_first_that_a_template_writes_behind_an_answer(tmp_path: Path, test_data: Path):
    for name in ("qwen3", "qwen2.5"):
        tokenizer = AutoTokenizer.from_pretrained(test_data / "tokenizers" / name)
        assert tokenizer.convert_ids_to_tokens(end_marks(tokenizer)) == ["<|im_end|>"]
    tokenizer = AutoTokenizer.from_pretrained(model_in(tmp_path, ENDS.replace("<mark>", "<mark>\n<old>")))
    assert end_marks(tokenizer) == [MARK]
    for plain in (SHAPES["ends with a user"], SHAPES["chatml"]):  # refuses answers; ends them by no token of its own
        tokenizer.chat_template = plain
        assert end_marks(tokenizer) == []


def test_turns_are_appended_behind_a_mark_that_the_tokenizer_does_not_call_eos(tmp_path: Path):
    template = "{% for m in messages %}{{ m.content }}{{ '<mark>' if m.role == 'assistant' else '=' }}{% endfor %}"
    tokenizer = AutoTokenizer.from_pretrained(model_in(tmp_path, template))
    turns = IncrementalTemplate(tokenizer)
    user = [{"role": "user", "content": "7"}]
    for answer, expected in (([1, MARK], "7="), ([1, 2], "<mark>7=")):
        assert tokenizer.decode(turns.appended_tokens(user, answer)).replace(" ", "") == expected


@pytest.mark.parametrize("is_tgi", [True, False])
def test_a_server_of_others_is_told_of_the_mark(tmp_path: Path, is_tgi: bool):
    tokenizer = AutoTokenizer.from_pretrained(model_in(tmp_path, ENDS))
    engine = TGIEngine(RolloutConfig(server=ServerConfig(url="http://localhost:1")), tokenizer)
    sent: dict[str, Any] = {}

    async def call(method: str, path: str, body: Any = None) -> Any:
        sent.update(body or {})
        return {
            "details": {"tokens": [{"id": MARK, "logprob": -0.5}], "finish_reason": "stop_sequence"},
            "choices": [{"token_ids": [MARK], "text": "", "finish_reason": "stop"}],
        }

    engine.client.call, engine.is_tgi, engine.model = call, is_tgi, "m"  # type: ignore[method-assign]
    [completion] = asyncio.run(engine.generate(GenerationRequest(0, [1], SamplingParams(max_tokens=4))))
    assert completion.token_ids == [MARK] and completion.stop_reason == "stop"
    told = sent["parameters"]["stop"] if is_tgi else sent["stop_token_ids"]
    assert told == (["<mark>"] if is_tgi else [MARK])
