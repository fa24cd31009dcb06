"""A model folder that contradicts itself is refused, or warned of, before the first step."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.e2e import jobs
from tests.engine_cases import SHAPE, save_tiny_model, tiny_qwen3
from verl.config import HFModelConfig, load_config
from verl.models.folder_checks import check_config, check_model_for_run
from verl.models.load import build_config, load_causal_lm, load_tokenizer
from verl.models.registry import FAMILIES
from verl.trainer.ppo.run_setup import build_run
from verl.trainer.sft import build_sft
from verl.utils.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "sound", tiny_qwen3(tie_word_embeddings=False))


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "model")


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder, **changes):
    tensors = load_file(folder / "model.safetensors")
    changed = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({**tensors, **changed}, folder / "model.safetensors", {"format": "pt"})


CONFIGS = {
    "layer types": ({"layer_types": ["full_attention"]}, r"num_hidden_layers.*layer_types"),
    "heads": ({"num_attention_heads": 0}, "num_attention_heads=0"),
    "key heads": ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
    "vocabulary": ({"vocab_size": 0}, "vocab_size=0"),
    "type of a size": ({"vocab_size": "many"}, "vocab_size"),
    "activation": ({"hidden_act": "gleu"}, "hidden_act='gleu' is no activation; did you mean 'gelu'"),
    "dtype": ({"dtype": "float31"}, "float31"),
    "rope theta": ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta=0, but"),
    "eps": ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0, but it is a small number above 0"),
    "window": (
        {"sliding_window": 0, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2},
        "sliding_window=0",
    ),
    "positions": ({"max_position_embeddings": 0}, "max_position_embeddings=0"),
    "initialisation": ({"initializer_range": -0.02}, "initializer_range=-0.02"),
    "odd heads": ({"head_dim": 7}, "config.json cannot be used: .* even rotary dimension, but got `head_dim`=7"),
    "rope factor": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}},
        "factor=0.0 of rope_parameters",
    ),
    "rope share": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.5}},
        "partial_rotary_factor=1.5, but it is at most 1",
    ),
    "rope kind": ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type='spiral' is unknown"),
}


EXPERTS = {"num_experts": 4, "moe_intermediate_size": 24}


@pytest.mark.parametrize("changes", [{"num_experts_per_tok": 0}, {"num_experts_per_tok": 5}], ids=["none", "too many"])
def test_a_token_goes_to_at_least_one_expert_and_at_most_all(changes):
    config = AutoConfig.for_model("qwen3_moe", **{**SHAPE, **EXPERTS, **changes})
    with pytest.raises(ConfigError, match=f"experts=4 with num_experts_per_tok={changes['num_experts_per_tok']}"):
        check_config(config, "config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_configuration_of_every_family_passes(family):
    check_config(AutoConfig.for_model(family), "config.json")


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_that_contradicts_itself_is_refused_in_one_line(folder, case):
    changes, message = CONFIGS[case]
    edit(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        load_causal_lm(folder, config=build_config(HFModelConfig(path=str(folder)))[0])
    assert "\n" not in str(caught.value) and "config.json" in str(caught.value)


def test_a_configuration_that_keeps_the_tokenizer_from_loading_is_said_as_such(folder):
    edit(folder / "config.json", layer_types=["full_attention"])
    with pytest.raises(ConfigError, match=r"config\.json.*num_hidden_layers.*layer_types"):
        load_tokenizer(HFModelConfig(path=str(folder)))


def test_a_configuration_mended_by_override_config_is_taken(folder):
    edit(folder / "config.json", hidden_act="gleu")
    build_config(HFModelConfig(path=str(folder), override_config={"hidden_act": "silu"}))
    with pytest.raises(ConfigError, match=r"config\.json with model\.override_config: num_attention_heads=0"):
        build_config(HFModelConfig(path=str(folder), override_config={"num_attention_heads": 0, "hidden_act": "silu"}))


def shard(folder):
    """The weights in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    mapped = {name: f"model-0000{1 + (i > 3)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(mapped.values()):
        save_file({n: tensors[n] for n in names if mapped[n] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapped}))
    return mapped


def test_a_missing_shard_and_an_index_that_names_other_tensors_are_refused(folder):
    mapped, index = shard(folder), folder / "model.safetensors.index.json"
    load_causal_lm(folder)
    name = min(mapped)
    index.write_text(
        json.dumps(
            {"metadata": {}, "weight_map": {n: f for n, f in mapped.items() if n != name} | {"other": mapped[name]}}
        )
    )
    with pytest.raises(CheckpointError, match=f"disagree about 2 tensors, first {name}"):
        load_causal_lm(folder)
    index.write_text("[1]")
    with pytest.raises(CheckpointError, match=r"index\.json is no index of weights"):
        load_causal_lm(folder)
    index.write_text(json.dumps({"metadata": {}, "weight_map": mapped}))
    (folder / mapped[name]).unlink()
    with pytest.raises(CheckpointError, match=f"has no {mapped[name]}, which"):
        load_causal_lm(folder)


def test_a_head_of_its_own_is_not_dropped_because_the_configuration_ties_it(folder):
    edit(folder / "config.json", tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings=true, but lm_head\.weight differs"):
        load_causal_lm(folder)
    edit_weights(folder, lm_head__weight=load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone())
    load_causal_lm(folder)


def test_weights_of_integers_or_zeros_are_refused_and_one_matrix_of_zeros_is_named(folder, caplog):
    name = "model__layers__0__mlp__up_proj__weight"
    tensors = load_file(folder / "model.safetensors")
    zeros = torch.zeros_like(tensors[name.replace("__", ".")])
    edit_weights(folder, **{name: zeros.to(torch.int8)})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is stored as I8, integers"):
        load_causal_lm(folder)
    edit_weights(folder, **{name: zeros})
    load_causal_lm(folder)
    assert "1 matrices are all zero, first model.layers.0.mlp.up_proj.weight" in caplog.text
    save_file({n: torch.zeros_like(t) for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="every weight is zero"):
        load_causal_lm(folder)


@pytest.fixture
def job(tmp_path):
    jobs.prepare(tmp_path)
    return tmp_path


def warnings_of(job, longest=16):
    model = HFModelConfig(path=str(job / "model"))
    return check_model_for_run(build_config(model)[0], job / "model", load_tokenizer(model), longest, "data.max_length")


def test_a_run_with_a_vocabulary_smaller_than_the_tokenizers_is_refused(job):
    assert warnings_of(job) == []
    edit(job / "model" / "config.json", vocab_size=5)
    with pytest.raises(ConfigError, match=r"the 5 that the model has embeddings for"):
        build_run(load_config(jobs.overrides(job, "run")))
    sft = [f"model.path={job / 'model'}", f"data.train_files={job / 'data' / 'train.jsonl'}", "data.max_length=16"]
    with pytest.raises(ConfigError, match="the model has embeddings for"):
        build_sft(load_config(sft, config_name="sft_trainer"))


def test_tokens_that_were_added_to_the_tokenizer_alone_are_warned_of(job):
    tokenizer = load_tokenizer(HFModelConfig(path=str(job / "model")))
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(job / "model")
    assert "'<extra>'" in warnings_of(job)[0] and "added alone" in warnings_of(job)[0]


def test_an_end_token_outside_the_vocabulary_is_refused_and_none_at_all_warned_of(job):
    for name in ("config.json", "generation_config.json"):
        edit(job / "model" / name, eos_token_id=999)
        with pytest.raises(ConfigError, match="the end token 999 is outside the model's vocabulary"):
            warnings_of(job)
        edit(job / "model" / name, eos_token_id=None)
    assert warnings_of(job) == []  # the tokenizer names one
    edit(job / "model" / "tokenizer_config.json", eos_token=None)
    assert "names no end token" in warnings_of(job)[0]


def test_sequences_beyond_the_models_positions_are_warned_of_and_refused_where_it_has_none(job):
    edit(job / "model" / "config.json", max_position_embeddings=12)
    assert "16 tokens (data.max_length), but max_position_embeddings=12" in warnings_of(job)[0]
    assert warnings_of(job, longest=12) == []
    tokenizer = load_tokenizer(HFModelConfig(path=str(job / "model")))
    gpt2 = AutoConfig.for_model("gpt2", **{**SHAPE, "max_position_embeddings": 12, "vocab_size": len(tokenizer)})
    with pytest.raises(ConfigError, match="no embedding for more; lower the lengths to 12"):
        check_model_for_run(gpt2, job / "model", tokenizer, 16, "data.max_length")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'])
def test_an_empty_tokenizer_is_refused_in_words(job, text):
    (job / "model" / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"holds no tokenizer"):
        load_tokenizer(HFModelConfig(path=str(job / "model")))
