"""The Hugging Face folder is what is in memory, and a difference is found before anyone is told it was saved."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.engine_cases import SHAPE, SquaredLogprob, build_engine, random_batch, save_tiny_model, tiny_qwen3
from tests.rollout_adapters import letters_tokenizer
from verl.models import export
from verl.models.export import export_config_and_tokenizer, plan_export, write_layers
from verl.models.tensor_file import TensorFile
from verl.utils.errors import CheckpointError, ConfigError


def trained(folder, **how):
    engine = build_engine(folder, **how)
    engine.forward_backward(random_batch(), SquaredLogprob())
    engine.optim_step()
    return engine


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_folder_loads_in_transformers_with_the_same_log_probs(tmp_path, tied):
    folder = save_tiny_model(tmp_path / "model", tiny_qwen3(tie_word_embeddings=tied))
    engine = trained(folder)
    engine.save(tmp_path / "saved", ("hf_model",))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "huggingface", attn_implementation="plain_test")
    assert model.dtype == torch.float64
    batch = random_batch()
    start, end = batch.cu_seqlens[2:4].tolist()
    tokens = batch["tokens"][start:end]
    alone = torch.log_softmax(model(input_ids=tokens[None]).logits[0], -1)[:-1].gather(1, tokens[1:, None])[:, 0]
    mask = batch["loss_mask"][start:end]
    logprobs = engine.forward(batch)["logprobs"][start:end]
    torch.testing.assert_close(logprobs[mask], alone[mask[1:]].detach())


def test_trained_values_are_exported_not_their_rounded_copies(tmp_path):
    engine = trained(save_tiny_model(tmp_path / "model"), model_dtype="fp32", dtype="bf16")
    engine.save(tmp_path / "saved", ("hf_model",))
    saved = load_file(tmp_path / "saved" / "huggingface" / "model.safetensors")
    for name, tensor in engine.export_weights():
        assert torch.equal(saved[name], tensor) and tensor.dtype == torch.float32
    assert AutoConfig.from_pretrained(tmp_path / "saved" / "huggingface").dtype == torch.float32


def test_large_models_are_sharded(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 20_000)
    engine = trained(save_tiny_model(tmp_path / "model"))
    engine.save(tmp_path / "saved", ("hf_model",))
    folder = tmp_path / "saved" / "huggingface"
    assert len(list(folder.glob("*.safetensors"))) > 1 and (folder / "model.safetensors.index.json").is_file()


def test_experts_that_are_stored_apart_on_disk_are_compared_after_loading(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = AutoConfig.for_model("qwen3_moe", **{**SHAPE, **experts})
    engine = trained(save_tiny_model(tmp_path / "model", config), dtype="fp32")
    engine.save(tmp_path / "saved", ("hf_model",))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "huggingface")
    found = dict(reloaded.named_parameters())
    assert all(torch.equal(found[name], tensor) for name, tensor in engine.export_weights())


def sabotage(monkeypatch, change) -> None:
    """Change a file behind the writer's back right after it was closed."""
    close = TensorFile.close

    def close_then_change(file):
        close(file)
        tensors = load_file(file.path)
        change(tensors)
        save_file(tensors, file.path, metadata={"format": "pt"})

    monkeypatch.setattr(TensorFile, "close", close_then_change)


def export_alone(engine, folder) -> None:
    plan = plan_export(engine.model, dict(engine.export_weights()))
    export_config_and_tokenizer(engine.model, engine.model_config, folder)
    write_layers(plan, plan.own_layers(engine.export_weights()), folder)


def test_a_tensor_that_reads_back_differently_is_found(tmp_path, monkeypatch):
    engine = build_engine(save_tiny_model(tmp_path / "model"))

    def flip(tensors):
        tensors["model.norm.weight"][3] += 1e-9

    sabotage(monkeypatch, flip)
    with pytest.raises(CheckpointError, match=r"first model\.norm\.weight"):
        export_alone(engine, tmp_path / "saved")


def test_a_tensor_that_is_missing_on_disk_is_found(tmp_path, monkeypatch):
    engine = build_engine(save_tiny_model(tmp_path / "model"))

    def drop(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]

    sabotage(monkeypatch, drop)
    with pytest.raises(CheckpointError, match="up_proj"):
        export_alone(engine, tmp_path / "saved")


def test_logits_that_differ_from_the_models_are_found(tmp_path):
    engine = build_engine(save_tiny_model(tmp_path / "model"))
    engine.model.model.norm.register_forward_hook(lambda *call: call[-1] * 1.5)  # what no file can hold
    with pytest.raises(CheckpointError, match="logits differ"):
        engine.save(tmp_path / "saved", ("hf_model",))
    assert not (tmp_path / "saved" / "manifest.json").exists()


def test_a_tensor_that_loads_under_another_name_is_found(tmp_path, monkeypatch):
    engine = build_engine(save_tiny_model(tmp_path / "model"))
    up, gate = (f"model.layers.0.mlp.{kind}_proj.weight" for kind in ("up", "gate"))
    swapped = {up: gate, gate: up}
    revert = export.revert_weight_conversion
    rename = lambda model, layer: {swapped.get(n, n): t for n, t in revert(model, layer).items()}  # noqa: E731
    monkeypatch.setattr(export, "revert_weight_conversion", rename)
    with pytest.raises(CheckpointError, match="2 tensors are not those in memory"):
        engine.save(tmp_path / "saved", ("hf_model",))


REFUSED_BY_TRANSFORMERS = [
    ({"temperature": 0.9, "top_p": 0.6, "eos_token_id": [2, 7]}, {"eos_token_id": [2, 7]}),
    ({"early_stopping": True, "length_penalty": 0.5, "pad_token_id": 0}, {"pad_token_id": 0}),
    ({"pad_token_id": -1, "output_scores": True, "max_new_tokens": 9}, {"max_new_tokens": 9}),
    ({"num_return_sequences": 4, "num_beams": 2, "length_penalty": 0.5}, {"num_beams": 2, "length_penalty": 0.5}),
    ({"streamer": 1, "max_new_tokens": 0, "temperature": "hot", "min_new_tokens": 2}, {"min_new_tokens": 2}),
    ({"watermarking_config": {"greenlist_ratio": 5.0}, "mine": {"a": 1}}, {"mine": {"a": 1}}),
    ({"temperature": 0.9, "do_sample": True}, {"temperature": 0.9, "do_sample": True}),
]  # fmt: skip


@pytest.mark.parametrize(("values", "kept"), REFUSED_BY_TRANSFORMERS, ids=lambda v: "-".join(v))
def test_generation_values_that_do_not_fit_are_left_out_and_named_and_the_others_stay(values, kept, caplog):
    assert export.fitting_generation_values(values) == kept
    GenerationConfig(**kept).validate(strict=True)
    assert all((f"{name}={values[name]!r}" in caplog.text) == (name not in kept) for name in values)


@pytest.mark.parametrize("value_head", [False, True], ids=["policy", "critic"])
def test_what_a_save_needs_is_kept_from_the_start_though_the_models_folder_is_gone(tmp_path, caplog, value_head):
    folder = save_tiny_model(tmp_path / "model")
    letters_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "eos_token_id": [2, 7]}))
    engine = build_engine(folder, "fp32", value_head)
    shutil.rmtree(folder)
    engine.save(tmp_path / "saved")
    saved = tmp_path / "saved" / "huggingface"
    assert AutoTokenizer.from_pretrained(saved).get_vocab() == letters_tokenizer().get_vocab()
    if not value_head:
        assert "leaves out temperature=0.9" in caplog.text
        assert GenerationConfig.from_pretrained(saved).eos_token_id == [2, 7, letters_tokenizer().eos_token_id]


@pytest.mark.parametrize("value_head", [False, True], ids=["policy", "critic"])
def test_a_tokenizer_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path, value_head):
    folder = save_tiny_model(tmp_path / "model")
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = {"default": "x", "a/b": "y"}  # a name that is no name of a file
    path = folder / "tokenizer_config.json"
    letters_tokenizer().save_pretrained(folder)
    named = [{"name": name, "template": text} for name, text in tokenizer.chat_template.items()]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": named}))
    with pytest.raises(ConfigError, match=r"tokenizer of .* cannot be saved \(ValueError: Invalid chat template name"):
        build_engine(folder, "fp32", value_head)


def test_a_folder_for_temporary_files_that_takes_none_is_named(tmp_path, monkeypatch):
    folder = save_tiny_model(tmp_path / "model")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="let TMPDIR name a folder"):
        build_engine(folder, "fp32")
