"""A model folder that contradicts itself is refused, or warned of, before the first step."""

import json
import shutil
import signal

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.e2e import jobs
from tests.engine_cases import SHAPE, save_tiny_model, tiny_qwen3
from tests.rollout_adapters import letters_tokenizer
from verl.config import HFModelConfig, load_config
from verl.data import chat
from verl.models.folder_checks import check_config, check_model_for_run, check_not_quantised, check_weight_files
from verl.models.load import build_config, load_causal_lm, load_tokenizer
from verl.models.registry import FAMILIES
from verl.plugin.versions import at_least
from verl.trainer.ppo.run_setup import build_run
from verl.trainer.sft.trainer import build_sft
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
    if case == "odd heads" and not at_least(transformers.__version__, "5.18"):
        pytest.skip("transformers checks it from 5.18 on; before, the weights do not fit")
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


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"pad_token_id": 9_999}, r"pad_token_id=9999, but it is the id of a token \(vocab_size="),
        ("config.json", {"eos_token_id": "x"}, "eos_token_id"),
        ("config.json", {"eos_token_id": [1, "x"]}, "eos_token_id"),
        ("config.json", {"bos_token_id": 1.5}, "bos_token_id"),
        ("generation_config.json", {"eos_token_id": "x"}, r"generation_config.json: eos_token_id='x'"),
        ("config.json", {"intermediate_size": 10**12}, "no model can be made of"),
        ("config.json", {"intermediate_size": 1e12}, "intermediate_size"),
    ],
)
def test_values_that_no_model_has_are_one_line(file, changes, message, folder):
    letters_tokenizer().save_pretrained(folder)
    edit(folder / file, **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        config, _ = build_config(model := HFModelConfig(path=str(folder)))
        check_model_for_run(config, folder, load_tokenizer(model), 16, "lengths")
        load_causal_lm(folder, config=config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"[]", b"7"])
def test_a_generation_config_that_is_none_is_one_line(content, folder):
    letters_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_bytes(content)
    config, _ = build_config(model := HFModelConfig(path=str(folder)))
    with pytest.raises(ConfigError, match=r"generation_config.json cannot be used"):
        check_model_for_run(config, folder, load_tokenizer(model), 16, "lengths")


@pytest.mark.parametrize("scale", [None, "weight_scale_inv", "weight_scale"])
def test_eight_bit_floats_without_a_scale_are_refused(scale, folder):
    name = "model.layers.0.mlp.up_proj"
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
    if scale:
        tensors[f"{name}.{scale}"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config, _ = build_config(HFModelConfig(path=str(folder)))
    if scale:
        check_weight_files(folder, config)
        return
    with pytest.raises(CheckpointError, match=rf"{name}.weight is stored as F8_E4M3 without a scale beside it"):
        load_causal_lm(folder, config=config)


def test_two_tokens_with_one_id_are_said(folder):
    letters_tokenizer().save_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[second] = vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config, _ = build_config(model := HFModelConfig(path=str(folder)))
    said = check_model_for_run(config, folder, load_tokenizer(model), 16, "lengths")
    assert "several tokens with one id" in said[0] and repr(first) in said[0] and repr(second) in said[0]


def test_a_template_without_an_end_is_refused(folder, monkeypatch):
    letters_tokenizer().save_pretrained(folder)
    monkeypatch.setattr(chat, "TEMPLATE_S", 0.3)
    loops = "".join(f"{{% for i{n} in range(90000) %}}" for n in range(6)) + "x" + "{% endfor %}" * 6
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(ConfigError, match=r"chat template of .* takes longer than 0.3 s .* loop without an end"):
        load_tokenizer(HFModelConfig(path=str(folder), custom_chat_template=loops))
    load_tokenizer(HFModelConfig(path=str(folder), custom_chat_template="{{ raise_exception('no') }}"))
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


CONVERT = "python scripts/write_plain_model.py DIR NEW_FOLDER"
OTHER_FILES = {  # files beside config.json, and what a message says
    "nothing": ([], "no whole model; complete the download (hf download ORG/NAME; for a gated model first accept"),
    "gguf": (["m.Q4_0.gguf"], f"a model as GGUF; take the original, or convert it: {CONVERT} --gguf m.Q4_0.gguf"),
    "bin": (["pytorch_model.bin", "training_args.bin"], f"pickled weights; convert them: {CONVERT}"),
    "parts as bin": (["pytorch_model-00001-of-00002.bin"], f"pickled weights; convert them: {CONVERT}"),
    "makers' own": (["consolidated.00.pth"], "take the repository of this model that is made for transformers"),
    "own name": (["consolidated.safetensors"], "weights under a name that transformers does not read"),
    "no index": (["model-00001-of-00002.safetensors"], "parts of the weights without model.safetensors.index.json"),
    "adapters": (
        ["adapter_config.json", "adapter_model.safetensors"],
        "adapters, without their model; give the folder",
    ),
}


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_a_folder_without_weights_to_read_says_in_one_line_what_it_holds_and_what_to_do(folder, kind):
    files, says = OTHER_FILES[kind]
    (folder / "model.safetensors").unlink()
    for name in files:
        (folder / name).write_bytes(b"x")
    with pytest.raises(ConfigError, match="holds no") as caught:
        load_causal_lm(folder)
    said = str(caught.value)
    assert says.replace("DIR", str(folder)) in said and "\n" not in said and "init_random=true" in said


@pytest.mark.parametrize(("file", "says"), [("m.gguf", "--gguf m.gguf"), ("adapter_config.json", "lora_adapter_path")])
def test_a_folder_without_a_configuration_says_what_it_holds(tmp_path, file, says):
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"has no config\.json; found: ") as caught:
        load_causal_lm(tmp_path)
    assert says in str(caught.value)


QUANTISED = {  # kind: quantization_config, as the tools that make such models write it
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "mxfp4": {"quant_method": "mxfp4"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    "a method of tomorrow": {"quant_method": "a method of tomorrow"},
}


@pytest.mark.parametrize("place", ["top", "text part"])
@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_are_refused_in_one_line_before_they_are_read(folder, kind, place):
    settings = {"quantization_config": QUANTISED[kind]}
    edit(folder / "config.json", **(settings if place == "top" else {"text_config": settings}))
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError, match=rf"weights are quantised \({kind}, says config.json\)") as caught:
        check_not_quantised(folder)
    said = str(caught.value)
    assert CONVERT.replace("DIR", str(folder)) in said and "\n" not in said
    if place == "top":
        with pytest.raises(ConfigError, match=f"quantised .{kind},"):
            load_causal_lm(folder)
