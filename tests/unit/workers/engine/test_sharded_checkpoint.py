"""A checkpoint does not depend on how many ranks saved it: what others load is the same, bit for bit."""

import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from tests.engine_cases import (
    SquaredLogprob,
    SquaredValue,
    build_engine,
    naive_logprobs,
    random_batch,
    save_tiny_model,
    tiny_qwen3,
)
from tests.ranks import run_ranks
from verl.config import CheckpointConfig
from verl.data.micro_batches import MicroBatching
from verl.workers.engine import checkpoint, tensor_shards

MICRO = MicroBatching(max_sequences=1)
ROWS = {1: [[0, 1, 2, 3, 4, 5]], 2: [[0, 3, 4], [1, 2, 5]], 4: [[0], [1, 2], [4], [3, 5]]}
COSINE = {"lr_scheduler_type": "cosine", "total_training_steps": 6, "lr_warmup_steps": 1, "zero_indexed_step": False}
PRECISIONS = {"fp32": {"dtype": "fp32"}, "mixed": {"model_dtype": "fp32", "dtype": "bf16"}, "bf16": {"dtype": "bf16"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    odd = tiny_qwen3(intermediate_size=45, tie_word_embeddings=False)  # 45 and 61 rows leave uneven shards
    return save_tiny_model(tmp_path_factory.mktemp("model"), odd)


def engine_of(folder: Path, settings: dict[str, Any], background: bool = False):
    engine = build_engine(folder, optim=COSINE, **settings)
    engine.checkpoint_config = type(engine.checkpoint_config)(async_save=background)
    return engine


def train(engine, size: int, steps: int, first: int = 0) -> None:
    rank = dist.get_rank() if size > 1 else 0
    loss = SquaredValue() if engine.has_value_head else SquaredLogprob()
    for step in range(first, first + steps):
        with engine.train_mode():
            engine.forward_backward(random_batch(seed=step).select(ROWS[size][rank]), loss, MICRO)
            engine.optim_step()
        engine.lr_scheduler_step()


def everything(engine) -> dict[str, np.ndarray]:
    """Every tensor of the engine, whole: parameters as trained, optimiser state; and the schedule."""
    out = {name: tensor for name, tensor in engine.export_weights()}
    for name, parameter in engine.weights.named_parameters:
        for key, value in engine.optimizer.state[parameter].items():
            out[f"{name}|{key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    arrays = {name: tensor.detach().double().numpy().copy() for name, tensor in out.items()}
    arrays["schedule"] = np.array([engine.lr_scheduler.steps_done, engine.optimizer.param_groups[0]["lr"]])
    return arrays


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected) and len(found) > 60
    assert [n for n in expected if not np.array_equal(found[n], expected[n])] == []


def train_and_save(folder: Path, saved: Path, size: int, settings: dict[str, Any], background: bool = False):
    engine = engine_of(folder, settings, background)
    train(engine, size, 2)
    if background:
        return save_while_training(engine, saved, size)
    engine.save(saved)
    return everything(engine)


def save_while_training(engine, saved: Path, size: int) -> dict[str, np.ndarray]:
    """Nothing is written before a training step is over: what is saved must not change with the engine."""
    trained, write = threading.Event(), checkpoint.write_tensors
    checkpoint.write_tensors = lambda *args: write(*args) if trained.wait(60) else ""  # type: ignore[assignment]
    engine.save(saved)
    before = everything(engine)
    train(engine, size, 1, first=2)
    assert not engine.finish_save(wait=False)
    trained.set()
    assert engine.finish_save()
    return before


def load(folder: Path, saved: Path, size: int, settings: dict[str, Any]):
    engine = engine_of(folder, settings)
    train(engine, size, 1, first=9)  # whatever it did before must not matter
    engine.load(saved)
    return everything(engine)


def on(size: int, function, *args) -> list[Any]:
    return run_ranks(size, function, *args) if size > 1 else [function(*args)]


CROSSINGS = [(2, 1, "fp32"), (1, 2, "fp32"), (2, 4, "fp32"), (4, 2, "fp32"), (2, 2, "fp32")]
CROSSINGS += [(2, 1, "mixed"), (1, 2, "mixed"), (2, 1, "bf16"), (1, 2, "bf16")]


@pytest.mark.parametrize(("saving", "loading", "precision"), CROSSINGS)
def test_any_number_of_ranks_loads_what_any_number_saved(folder, tmp_path, saving, loading, precision):
    """Four ranks hold two copies of two shards (HSDP)."""
    settings = PRECISIONS[precision]
    first, second = (settings if size != 4 else {**settings, "fsdp_size": 2} for size in (saving, loading))
    saved = on(saving, train_and_save, folder, tmp_path / "saved", saving, first)[0]
    for found in on(loading, load, folder, tmp_path / "saved", loading, second):
        assert_equal(found, saved)


@pytest.mark.parametrize("settings", [{"offload_policy": True}, {"param_offload": True, "optimizer_offload": True}])
def test_offloaded_shards_are_saved_and_restored(folder, tmp_path, settings):
    settings = {"dtype": "fp32", **settings}
    saved = on(2, train_and_save, folder, tmp_path / "saved", 2, settings)[0]
    assert_equal(on(2, load, folder, tmp_path / "saved", 2, settings)[1], saved)


def test_a_critic_crosses_rank_counts_too(folder, tmp_path):
    settings = {"dtype": "fp32", "value_head": True}
    saved = on(2, train_and_save, folder, tmp_path / "saved", 2, settings)[0]
    assert_equal(on(1, load, folder, tmp_path / "saved", 1, settings)[0], saved)


def test_a_save_in_the_background_holds_what_was_there_when_it_began(folder, tmp_path):
    saved = on(2, train_and_save, folder, tmp_path / "saved", 2, {"dtype": "fp32"}, True)[0]
    assert_equal(load(folder, tmp_path / "saved", 1, {"dtype": "fp32"}), saved)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "huggingface")
    for name, parameter in model.named_parameters():
        assert np.array_equal(parameter.detach().double().numpy(), saved[name])


def test_each_rank_writes_its_shards_and_its_files_of_the_huggingface_folder(folder, tmp_path):
    saved = on(2, train_and_save, folder, tmp_path / "saved", 2, {"dtype": "fp32"})[0]
    whole = 0
    for rank in (0, 1):
        tensors = load_file(tmp_path / "saved" / f"model_world_size_2_rank_{rank}.safetensors")
        whole += sum(t.numel() for t in tensors.values())
    assert whole == sum(saved[name].size for name in saved if "|" not in name and name != "schedule")
    weights = tmp_path / "saved" / "huggingface"
    assert len(list(weights.glob("model-*-of-*.safetensors"))) >= 2
    on_disk = {k: v for path in weights.glob("*.safetensors") for k, v in load_file(path).items()}
    assert all(np.array_equal(on_disk[name].double().numpy(), saved[name]) for name in on_disk)
    index = json.loads((weights / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == on_disk.keys()
    tokens = torch.arange(3, 20)
    model = AutoModelForCausalLM.from_pretrained(weights)
    engine = build_engine(folder, dtype="fp32")
    engine.load(tmp_path / "saved", ("model",))
    torch.testing.assert_close(naive_logprobs(model, tokens), naive_logprobs(engine.model, tokens))


def random_numbers() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def seeded(folder: Path, saved: Path) -> list[float]:
    engine = build_engine(folder)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(10 + dist.get_rank())
    engine.save(saved, ("extra",))
    return random_numbers()


def resumed(folder: Path, saved: Path) -> list[float]:
    engine = build_engine(folder)
    engine.load(saved, ("extra",))
    return random_numbers()


def test_every_rank_goes_on_with_its_own_random_numbers_and_new_ranks_with_streams_that_repeat(folder, tmp_path):
    expected = run_ranks(2, seeded, folder, tmp_path / "saved")
    assert expected[0] != expected[1]
    assert run_ranks(2, resumed, folder, tmp_path / "saved") == expected
    four = run_ranks(4, resumed, folder, tmp_path / "saved")
    assert four == run_ranks(4, resumed, folder, tmp_path / "saved")
    numbers = {number for rank in four for number in rank}
    assert len(numbers) == 12 and not numbers & {number for rank in expected for number in rank}


def refused(folder: Path, saved: Path) -> tuple[str, bool]:
    engine = engine_of(folder, {"dtype": "fp32"})
    train(engine, 2, 1)
    before = everything(engine)
    try:
        engine.load(saved)
    except Exception as error:
        after = everything(engine)
        return str(error), all(np.array_equal(before[n], after[n]) for n in before)
    return "loaded", False


def test_a_damaged_shard_is_refused_on_every_rank_and_changes_none(folder, tmp_path):
    on(2, train_and_save, folder, tmp_path / "saved", 2, {"dtype": "fp32"})
    victim = tmp_path / "saved" / "optim_world_size_2_rank_1.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(bytes(data))
    answers = run_ranks(2, refused, folder, tmp_path / "saved")
    assert all(unchanged for _, unchanged in answers)
    assert all(f"{victim.name} is damaged" in text for text, _ in answers)


def fails_on_rank_1(folder: Path, saved: Path, background: bool, step: str) -> str:
    engine = engine_of(folder, {"dtype": "fp32"}, background)
    if dist.get_rank() == 1:

        def full(*_: object) -> str:
            raise OSError(28, "No space left on device")

        setattr(checkpoint if step == "write_tensors" else checkpoint.export, step, full)
    try:
        engine.save(saved, ("model", "hf_model"))
        engine.finish_save()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize("step", ["write_tensors", "write_layers"])
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_a_disk_that_is_full_for_one_rank_fails_the_save_of_all(folder, tmp_path, background, step):
    """Also where the others wait for its part of the layers that it will not write."""
    first, second = run_ranks(2, fails_on_rank_1, folder, tmp_path / "saved", background, step)
    assert "rank 1" in first and "No space left" in first
    assert "No space left" in second
    assert not (tmp_path / "saved" / "manifest.json").exists()


SHARDS, HF = ("model", "optimizer", "extra"), ("hf_model",)


def peak_bytes(folder: Path, saved: Path, contents: tuple[str, ...]) -> tuple[int, int, int]:
    """(most that the allocator held at once beyond what was there before the save, the largest layer, the model)."""
    engine = engine_of(folder, {"dtype": "fp32"})
    engine.checkpoint_config = CheckpointConfig(verify="digest")
    train(engine, 2, 1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        engine.save(saved, contents)
    events = [e for e in measured.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    layers: dict[str, int] = {}
    for name, parameter in engine.weights.named_parameters:
        layer = ".".join(name.split(".")[:3]) if ".layers." in name else name
        layers[layer] = layers.get(layer, 0) + parameter.numel() * 4
    return most, max(layers.values()), sum(layers.values())


@pytest.mark.parametrize("contents", [SHARDS, HF], ids=["shards", "hf"])
def test_a_save_holds_at_most_one_layer_beyond_the_shards(tmp_path, contents):
    # seven matrices of one size: gloo's two threads may each still hold the last one that they gathered
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6}
    equal = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    wide = tiny_qwen3(**sizes, **equal, tie_word_embeddings=False)
    folder = save_tiny_model(tmp_path / "model", wide)
    for most, layer, model in run_ranks(2, peak_bytes, folder, tmp_path / "saved", contents):
        assert model > 5 * layer
        assert most <= (layer if contents == HF else 8192), (most, layer, model)  # what random number generators take


def boxes(mesh_shape: tuple[int, ...], shape: tuple[int, ...], placements: list[Any]) -> bool:
    """Whether `local_shard` describes what `distribute_tensor` leaves here."""
    mesh = init_device_mesh("cpu", mesh_shape)
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    mine = tensor_shards.local_shard(distribute_tensor(whole, mesh, placements), dist.get_rank())
    everywhere = tensor_shards.Box((0,) * len(shape), shape)
    return torch.equal(mine.local, whole[mine.box.slices_in(everywhere)]) and mine.shape == shape


@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (3, 4), (1, 9)])
@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [((4,), [Shard(0)]), ((4,), [Shard(1)]), ((2, 2), [Replicate(), Shard(0)]), ((2, 2), [Shard(0), Shard(1)])],
    ids=["rows", "columns", "hsdp", "grid"],
)
def test_boxes_are_where_the_library_puts_them(mesh_shape, shape, placements):
    assert run_ranks(4, boxes, mesh_shape, shape, placements) == [True] * 4
