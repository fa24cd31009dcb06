"""The Hugging Face folder is what is in memory, and a difference is found before anyone is told it was saved."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine_cases import SHAPE, SquaredLogprob, build_engine, random_batch, save_tiny_model, tiny_qwen3
from verl.models import export
from verl.models.export import export_model
from verl.utils.errors import CheckpointError


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
    monkeypatch.setattr(export, "MAX_SHARD_SIZE", "20KB")
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


def sabotage(monkeypatch, model, change) -> None:
    """Change the files behind the model's back right after they were written."""
    write = model.save_pretrained

    def write_then_change(folder, **how):
        write(folder, **how)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(model, "save_pretrained", write_then_change)


def test_a_tensor_that_reads_back_differently_is_found(tmp_path, monkeypatch):
    engine = build_engine(save_tiny_model(tmp_path / "model"))

    def flip(tensors):
        tensors["model.norm.weight"][3] += 1e-9

    sabotage(monkeypatch, engine.model, flip)
    with pytest.raises(CheckpointError, match=r"first model\.norm\.weight"):
        export_model(engine.model, dict(engine.export_weights()), tmp_path / "saved", "digest")


def test_a_tensor_that_is_missing_on_disk_is_found(tmp_path, monkeypatch):
    engine = build_engine(save_tiny_model(tmp_path / "model"))

    def drop(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]

    sabotage(monkeypatch, engine.model, drop)
    with pytest.raises(CheckpointError, match="up_proj"):
        export_model(engine.model, dict(engine.export_weights()), tmp_path / "saved", "digest")


def test_logits_that_differ_from_the_models_are_found(tmp_path):
    engine = build_engine(save_tiny_model(tmp_path / "model"))
    stale = {name: tensor.clone() for name, tensor in engine.export_weights()}
    with torch.no_grad():
        engine.model.model.norm.weight.mul_(1.5)
    with pytest.raises(CheckpointError, match="logits differ"):
        export_model(engine.model, stale, tmp_path / "saved")
