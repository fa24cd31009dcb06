"""Models and tokenizers whose folder brings code of its own."""

import json
from pathlib import Path

import pytest

from verl.config import HFModelConfig
from verl.models.load import load_config, load_tokenizer
from verl.utils.errors import ConfigError

PROGRAM = "raise SystemExit('code of the model folder ran')"


def test_a_model_that_needs_code_of_its_folder_is_refused_and_asks_nobody(tmp_path: Path, monkeypatch):
    auto_map = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": auto_map}))
    (tmp_path / "mine.py").write_text(PROGRAM)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError, match=r"config.json .* never run.*external_lib"):
        load_config(tmp_path)


def test_a_tokenizer_that_needs_code_of_its_folder_is_refused_and_asks_nobody(tmp_path: Path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine"}))
    auto_map = {"AutoTokenizer": ["mine.MineTokenizer", None]}
    settings = {"tokenizer_class": "MineTokenizer", "auto_map": auto_map}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "mine.py").write_text(PROGRAM)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError, match=r"tokenizer_config.json needs code of its own folder .* never run"):
        load_tokenizer(HFModelConfig(path=str(tmp_path)))


def test_code_beside_a_model_that_transformers_has_is_passed_over(tmp_path: Path):
    auto_map = {"AutoConfig": "mine.MineConfig"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "auto_map": auto_map}))
    (tmp_path / "mine.py").write_text(PROGRAM)
    assert load_config(tmp_path).model_type == "qwen3"
