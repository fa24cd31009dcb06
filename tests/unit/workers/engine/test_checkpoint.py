"""A restored engine goes on bit for bit; a damaged or foreign checkpoint changes nothing and says why."""

import json
import random

import numpy as np
import pytest
import torch

from tests.engine_cases import SquaredLogprob, SquaredValue, build_engine, random_batch, save_tiny_model, tiny_qwen3
from verl.data.micro_batches import MicroBatching
from verl.utils.errors import CheckpointError, ConfigError

ALONE = "world_size_1_rank_0"
MICRO = MicroBatching(max_tokens=20)
COSINE = {"lr_scheduler_type": "cosine", "total_training_steps": 6, "lr_warmup_steps": 1, "zero_indexed_step": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train(engine, steps: int, first: int = 0) -> list[dict]:
    loss = SquaredValue() if engine.has_value_head else SquaredLogprob()
    metrics = []
    for step in range(first, first + steps):
        metrics.append(engine.forward_backward(random_batch(seed=step), loss, MICRO).metrics.values())
        metrics.append(engine.optim_step().values())
        engine.lr_scheduler_step()
    return metrics


def everything(engine) -> dict[str, torch.Tensor]:
    tensors = {f"weight {name}": tensor for name, tensor in engine.export_weights()}
    tensors.update({f"model {name}": tensor for name, tensor in engine.model.state_dict().items()})
    for name, parameter in engine.weights.named_parameters:
        tensors.update({f"{key} {name}": value for key, value in engine.optimizer.state[parameter].items()})
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("precision", [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")])
@pytest.mark.parametrize("value_head", [False, True], ids=["policy", "critic"])
def test_training_goes_on_bit_for_bit_after_a_restore(folder, tmp_path, precision, value_head):
    how = {"model_dtype": precision[0], "dtype": precision[1], "value_head": value_head, "optim": COSINE}
    engine = build_engine(folder, **how)
    train(engine, 2)
    engine.save(tmp_path / "saved")
    whole = train(engine, 2, first=2)

    other = build_engine(folder, **how)
    train(other, 1, first=9)  # whatever it did before must not matter
    other.load(tmp_path / "saved")
    assert train(other, 2, first=2) == whole
    expected, found = everything(engine), everything(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert other.lr_scheduler.steps_done == 4


def test_random_numbers_go_on_where_they_were(folder, tmp_path):
    engine = build_engine(folder)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1), np.random.normal()
    engine.save(tmp_path / "saved", ("extra",))
    expected = random.gauss(0, 1), np.random.normal(), torch.rand(3)
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    engine.load(tmp_path / "saved", ("extra",))
    found = random.gauss(0, 1), np.random.normal(), torch.rand(3)
    assert found[:2] == expected[:2] and torch.equal(found[2], expected[2])


def test_only_what_was_asked_for_is_saved_and_the_tokenizerless_config_always(folder, tmp_path):
    engine = build_engine(folder)
    engine.save(tmp_path / "saved", ("model",))
    names = {p.relative_to(tmp_path / "saved").as_posix() for p in (tmp_path / "saved").rglob("*") if p.is_file()}
    config = {"huggingface/config.json", "huggingface/generation_config.json"}
    assert names == {f"model_{ALONE}.safetensors", "manifest.json", *config}
    with pytest.raises(CheckpointError, match=r"holds model, not optimizer; .*load_contents=\[model\]$"):
        engine.load(tmp_path / "saved", ("model", "optimizer"))
    engine.save(tmp_path / "merged", ("hf_model",))
    with pytest.raises(CheckpointError, match=r"holds hf_model, not model; .*model\.path=.*merged/huggingface$"):
        engine.load(tmp_path / "merged", ("model",))


def test_a_shared_module_keeps_its_tensors_when_weights_are_restored(folder, tmp_path):
    engine = build_engine(folder)
    engine.save(tmp_path / "saved", ("model",))
    addresses = [p.data_ptr() for p in engine.model.parameters()]
    engine.load(tmp_path / "saved", ("model",))
    assert [p.data_ptr() for p in engine.model.parameters()] == addresses


def damaged(folder, name: str) -> None:
    path = folder / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optim.safetensors", "extra_state.json", "extra_state.safetensors"]
)
def test_one_flipped_bit_is_refused_and_the_engine_keeps_its_state(folder, tmp_path, name):
    engine = build_engine(folder)
    train(engine, 1)
    engine.save(tmp_path / "saved", ("model", "optimizer", "extra"))
    stem, kind = name.split(".")
    name = f"{stem}_{ALONE}.{kind}"
    damaged(tmp_path / "saved", name)
    train(engine, 1, first=1)
    before = everything(engine)
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        engine.load(tmp_path / "saved", ("model", "optimizer", "extra"))
    assert all(torch.equal(before[n], t) for n, t in everything(engine).items())


def test_a_missing_file_and_an_unfinished_save_are_refused(folder, tmp_path):
    engine = build_engine(folder)
    engine.save(tmp_path / "saved", ("model",))
    (tmp_path / "saved" / f"model_{ALONE}.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        engine.load(tmp_path / "saved", ("model",))
    (tmp_path / "saved" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="never finished"):
        engine.load(tmp_path / "saved", ("model",))


def test_a_checkpoint_of_another_model_or_type_says_what_differs(folder, tmp_path):
    engine = build_engine(folder)
    engine.save(tmp_path / "saved", ("model",))
    with pytest.raises(CheckpointError, match="float64"):
        build_engine(folder, dtype="fp32").load(tmp_path / "saved", ("model",))
    wider = save_tiny_model(tmp_path / "wider", tiny_qwen3(intermediate_size=64))
    with pytest.raises(CheckpointError, match=r"mlp\.down_proj\.weight is .*\(32, 48\), .*\(32, 64\)"):
        build_engine(wider).load(tmp_path / "saved", ("model",))


def test_the_state_of_another_optimizer_is_refused_and_can_be_left_out(folder, tmp_path):
    build_engine(folder).save(tmp_path / "saved")
    other = build_engine(folder, optim={"optimizer": "SGD"})
    with pytest.raises(CheckpointError, match=r"state of AdamW, not of optim.optimizer=SGD; .*=\[model,extra\]"):
        other.load(tmp_path / "saved", ("model", "optimizer", "extra"))
    other.load(tmp_path / "saved", ("model", "extra"))


def test_an_unknown_content_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="allowed: model, optimizer"):
        build_engine(folder).save(tmp_path / "saved", ("weights",))


def test_nothing_on_disk_is_pickled(folder, tmp_path):
    engine = build_engine(folder)
    train(engine, 1)
    engine.save(tmp_path / "saved")
    kinds = {p.suffix for p in (tmp_path / "saved").rglob("*") if p.is_file()}
    assert kinds == {".safetensors", ".json"}
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())
    assert set(manifest["files"]) >= {f"model_{ALONE}.safetensors", "huggingface/model.safetensors"}
