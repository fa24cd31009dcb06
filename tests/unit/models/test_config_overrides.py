"""Overrides of a model's configuration: what `transformers` reads from a config.json with the same keys in it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    Gemma3Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3ForCausalLM,
)

from tests.rollout_adapters import small_model
from verl.config import HFModelConfig
from verl.models.load import build_config, changed_config, load_causal_lm
from verl.utils.errors import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FULL = {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}
LLAMA, GEMMA = LlamaConfig(**SIZES), Gemma3TextConfig(**SIZES)
LINEAR = {"type": "linear", "factor": 2.0}


def written(folder: Path, config: PreTrainedConfig, *without: str, **values: Any) -> str:
    folder.mkdir()
    kept = {name: value for name, value in config.to_dict().items() if name not in without}
    (folder / "config.json").write_text(json.dumps(kept | values))
    return str(folder)


def rope(path: str, **override: Any) -> dict[str, Any]:
    return build_config(HFModelConfig(path=path, override_config=override))[0].rope_parameters


OLD = {"llama": {"rope_theta": 5000.0}, "gemma3_text": {"rope_theta": 5000.0, "rope_local_base_freq": 77.0}}
NEW = {
    "llama": {"rope_type": "default", "rope_theta": 5000.0},
    "gemma3_text": {
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
    },
}


@pytest.mark.parametrize(
    ("config", "override", "same"),
    [
        (LLAMA, {"rope_scaling": YARN}, {"rope_scaling": YARN}),
        (LLAMA, {"rope_parameters": YARN}, {"rope_scaling": YARN}),
        (LLAMA, {"rope_scaling": LINEAR}, {"rope_scaling": LINEAR}),
        (LLAMA, {"rope_theta": 7.0}, {"rope_theta": 7.0}),
        (LLAMA, {"rope_scaling": YARN, "rope_theta": 7.0}, {"rope_scaling": YARN, "rope_theta": 7.0}),
        (LLAMA, {"model_config": {"rope_scaling": YARN}}, {"rope_scaling": YARN}),
        (GEMMA, {"rope_scaling": YARN}, {"rope_scaling": YARN}),
        (GEMMA, {"rope_parameters": FULL}, {"rope_scaling": YARN}),
        (GEMMA, {"rope_theta": 7.0, "rope_local_base_freq": 8.0}, {"rope_theta": 7.0, "rope_local_base_freq": 8.0}),
    ],
)  # fmt: skip
def test_rotary_embeddings_are_those_of_an_old_config_json_with_these_keys(
    config: PreTrainedConfig, override: dict[str, Any], same: dict[str, Any], tmp_path: Path
):
    old, new = OLD[config.model_type], NEW[config.model_type]
    oracle = AutoConfig.from_pretrained(written(tmp_path / "oracle", config, "rope_parameters", **{**old, **same}))
    assert rope(written(tmp_path / "old", config, "rope_parameters", **old), **override) == oracle.rope_parameters
    assert rope(written(tmp_path / "new", config, rope_parameters=new), **override) == oracle.rope_parameters


def test_an_override_replaces_what_the_model_has_and_null_takes_it_away(tmp_path: Path):
    linear = {"rope_type": "linear", "factor": 8.0}
    old = written(tmp_path / "old", LLAMA, "rope_parameters", rope_theta=5000.0, rope_scaling=linear)
    for name in ("rope_scaling", "rope_parameters"):
        assert rope(old, **{name: YARN}) == {**YARN, "rope_theta": 5000.0}
        assert rope(old, **{name: None}) == {"rope_type": "default", "rope_theta": 5000.0}
    neox = GPTNeoXConfig(vocab_size=32, rope_parameters={"rope_theta": 99.0, "partial_rotary_factor": 0.5})
    path = written(tmp_path / "neox", neox)
    assert rope(path, rope_scaling=linear) == {**linear, "rope_theta": 99.0, "partial_rotary_factor": 0.5}
    assert rope(path, rotary_emb_base=5.0)["rope_theta"] == 5.0


def test_values_that_others_follow_from_are_followed(tmp_path: Path):
    path = written(tmp_path / "qwen2", Qwen2Config(**SIZES), "layer_types")
    override = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    config, _ = build_config(HFModelConfig(path=path, override_config=override))
    assert config.layer_types == ["full_attention", "sliding_attention"] and config.sliding_window == 8


@pytest.mark.parametrize("override", [{"rms_norm_eps": 0.5}, {"text_config": {"rms_norm_eps": 0.5}}])
def test_values_of_the_language_model_in_a_larger_one_are_found_with_and_without_its_name(
    override: dict[str, Any], tmp_path: Path
):
    path = written(tmp_path / "gemma", Gemma3Config(text_config=GEMMA.to_dict()))
    model = HFModelConfig(path=path, override_config={**override})
    config, _ = build_config(model)
    assert isinstance(config, Gemma3TextConfig) and config.rms_norm_eps == 0.5 and config.hidden_size == 64
    assert changed_config(model) == {"text_config": {"rms_norm_eps": 0.5}}
    with pytest.raises(
        ConfigError, match=r"override_config.text_config.rms_norm_epz=1: .* did you mean 'rms_norm_eps'"
    ):
        build_config(HFModelConfig(path=path, override_config={"text_config": {"rms_norm_epz": 1}}))


def test_the_difference_is_what_an_engine_needs_to_read_the_same_configuration(tmp_path: Path):
    path = written(tmp_path / "llama", LLAMA)
    model = HFModelConfig(path=path, override_config={"rope_scaling": YARN, "rms_norm_eps": 0.5, "init_random": True})
    changed = changed_config(model)
    assert changed == {"rms_norm_eps": 0.5, "rope_parameters": {**YARN, "rope_theta": 10000.0}}
    told = AutoConfig.from_pretrained(path)
    told.update(changed)  # what vLLM and SGLang do
    assert (
        changed_config(HFModelConfig(path=path)) == {}
        and told.rope_parameters == build_config(model)[0].rope_parameters
    )
    other = written(tmp_path / "other", LLAMA, rms_norm_eps=0.25)
    assert changed_config(HFModelConfig(path=path, hf_config_path=other)) == {"rms_norm_eps": 0.25}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"rope_scaling": "yarn"}, r"rope_parameters='yarn' must be a dictionary"),
        ({"rope_scaling": {"rope_type": "yarnn", "factor": 2.0}}, "yarnn"),
        ({"hidden_size": "wide"}, "override_config.hidden_size='wide'"),
        ({"num_hiden_layers": 3}, r"LlamaConfig has no such value; did you mean 'num_hidden_layers'"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(override: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        rope(written(tmp_path / "llama", LLAMA), **override)


def test_logits_and_the_saved_configuration_are_those_of_a_folder_with_the_keys(tmp_path: Path):
    model = small_model()
    model.save_pretrained(tmp_path / "model")
    settings = HFModelConfig(path=str(tmp_path / "model"), override_config={"rope_scaling": YARN})
    ours = load_causal_lm(settings.path or "", config=build_config(settings)[0])
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    values["rope_parameters"] |= YARN
    (tmp_path / "model" / "config.json").write_text(json.dumps(values))
    oracle = Qwen3ForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.arange(24)[None] % 26
    with torch.no_grad():
        torch.testing.assert_close(ours(ids, use_cache=False).logits, oracle(ids).logits)
        assert not torch.allclose(oracle(ids).logits, model(ids).logits, atol=1e-4)
    ours.config.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["rope_parameters"] == values["rope_parameters"]
