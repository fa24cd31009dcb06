"""`scripts/write_plain_model.py` writes pickled and quantised weights as safetensors that the loader takes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts import write_plain_model
from tests.engine_cases import save_tiny_model, tiny_qwen3
from tests.rollout_adapters import letters_tokenizer
from verl.models.load import load_causal_lm
from verl.utils.errors import ConfigError

BLOCK = 128


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = save_tiny_model(tmp_path / "model", tiny_qwen3(intermediate_size=256, tie_word_embeddings=False))
    letters_tokenizer().save_pretrained(folder)
    return folder


def written(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, torch.Tensor]:
    """The weights that the script writes, as verl loads them."""
    assert write_plain_model.main([str(folder), str(folder.parent / "plain")]) == 0, capsys.readouterr().err
    assert "quantization_config" not in json.loads((folder.parent / "plain" / "config.json").read_text())
    return load_causal_lm(folder.parent / "plain").state_dict()


def test_pickled_weights_are_written_as_safetensors(model: Path, capsys: pytest.CaptureFixture[str]):
    tensors = load_file(model / "model.safetensors")
    torch.save(tensors, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="pickled weights; convert them"):
        load_causal_lm(model)
    found = written(model, capsys)
    assert all(torch.equal(found[name], tensor.bfloat16().float()) for name, tensor in tensors.items())


def test_weights_with_code_in_the_pickle_are_refused_and_it_does_not_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    class Code:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"model.norm.weight": Code()}, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    assert write_plain_model.main([str(model), str(tmp_path / "plain")]) == 2
    assert "transformers cannot make plain weights of" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists() and not (tmp_path / "plain").exists()


def quantise(model: Path) -> dict[str, torch.Tensor]:
    """Store the matrices of a model as fp8 with a scale for each block; returns the values that they then have."""
    tensors, stored = load_file(model / "model.safetensors"), {}
    for name, weight in tensors.items():
        stored[name] = weight
        if name.endswith("proj.weight"):
            rows = [row.split(BLOCK, 1) for row in weight.split(BLOCK)]
            scales = torch.tensor([[part.abs().max() / 448 for part in row] for row in rows])
            whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: len(weight), : weight.shape[1]]
            stored[name] = (weight / whole).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
            tensors[name] = stored[name].float() * whole
    save_file(stored, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    blocks = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": blocks}))
    return tensors


def test_eight_bit_floats_are_multiplied_by_their_scales(model: Path, capsys: pytest.CaptureFixture[str]):
    tensors = quantise(model)
    found = written(model, capsys)
    for name, expected in tensors.items():
        torch.testing.assert_close(found[name], expected, rtol=2**-7, atol=1e-6)


def test_eight_bit_floats_that_end_within_a_block_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The library takes 160 rows with two scales for two blocks of 80."""
    model = save_tiny_model(tmp_path / "model", tiny_qwen3(intermediate_size=160, tie_word_embeddings=False))
    quantise(model)
    assert write_plain_model.main([str(model), str(tmp_path / "plain")]) == 2
    assert "proj.weight_scale_inv is for [" in capsys.readouterr().err and not (tmp_path / "plain").exists()


def test_a_folder_that_is_in_use_is_not_touched(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert write_plain_model.main([str(tmp_path / "gone"), str(tmp_path / "plain")]) == 2
    assert write_plain_model.main([str(model), str(model)]) == 2
    said = capsys.readouterr().err
    assert "gone is not a folder" in said and "is not empty; name a new folder" in said
