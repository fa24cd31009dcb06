"""Copies of the weights that the native engine samples from are proved at each publish."""

import asyncio
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tests.weight_layouts import use_layout
from verl.config.rollout import RolloutConfig
from verl.models.decoder.lean_weights import named_tensors
from verl.weight_sync.in_place_sync import InPlaceSync
from verl.workers.rollout.base import StaleWeightsError
from verl.workers.rollout.native.engine import NativeEngine


def make(train: torch.dtype, rollout: str, kind: type = Qwen2ForCausalLM) -> tuple[PreTrainedModel, NativeEngine]:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, eos_token_id=3, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = kind(config).to(train).eval()
    return model, NativeEngine(RolloutConfig(dtype=rollout, prompt_length=8, response_length=8), model)


def train_a_little(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def keep_an_old(path: str, engine: NativeEngine) -> Callable[[], None]:
    """From now on a refresh forgets one tensor: what it held before is put back."""
    weights = engine.decoder.weights
    refresh = weights.refresh

    def faulty(model: nn.Module, version: int) -> None:
        old = held(engine)[path].clone()
        refresh(model, version)
        owner: object = weights
        *parents, last = path.split(".")
        for name in parents:
            owner = owner[int(name)] if name.isdigit() else getattr(owner, name)
        setattr(owner, last, old)

    weights.refresh = faulty
    return refresh


def held(engine: NativeEngine) -> dict[str, torch.Tensor]:
    weights = engine.decoder.weights
    parts = {"head": weights.head, **{f"layers.{i}": layer for i, layer in enumerate(weights.layers)}}
    return {path: t for name, part in parts.items() for path, t in named_tensors(part, name)} | {
        "embedding": weights.embedding
    }


@pytest.fixture(autouse=True, params=["packed", "not packed", "packed, onednn"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_layout(
        monkeypatch, merged="packed" in request.param.split(", "), onednn=request.param.endswith("onednn") or None
    )
    return request.param


DTYPES = [(torch.float32, "float32"), (torch.float32, "bfloat16"), (torch.bfloat16, "bfloat16")]


@pytest.mark.parametrize(("train", "rollout"), DTYPES)
def test_every_publish_says_how_much_was_copied_and_no_publish_raises_a_false_alarm(
    train: torch.dtype, rollout: str, layout: str
):
    model, engine = make(train, rollout)
    sync = InPlaceSync(model, engine)
    for version in range(1, 30):
        train_a_little(model)
        receipt = asyncio.run(sync.publish(version))
        assert receipt.version == engine.version == version
    assert receipt.bytes_moved == engine.copied_bytes
    assert (receipt.bytes_moved == 0) == (rollout == "float32" and layout == "not packed")


@pytest.mark.parametrize(("train", "rollout"), DTYPES)
def test_any_copy_that_stays_behind_is_caught_at_its_publish_and_named(train: torch.dtype, rollout: str, layout: str):
    if rollout == "float32" and layout == "not packed":
        pytest.skip("everything is read in place: there is no copy")
    model, engine = make(train, rollout)
    sync = InPlaceSync(model, engine)
    own = {p.data_ptr() for p in model.parameters()}
    copies = [p for p, t in held(engine).items() if t.dim() and (t.layout != torch.strided or t.data_ptr() not in own)]
    assert any("layers.1" in path for path in copies)
    honest = engine.decoder.weights.refresh
    for version, path in enumerate(copies, 1):
        train_a_little(model)
        keep_an_old(path, engine)
        name = path.replace("embedding", "embed_tokens").replace("head.", "lm_head.", 1)
        with pytest.raises(StaleWeightsError, match=rf"copy of \S*{re.escape(name)} does not hold version {version} "):
            asyncio.run(sync.publish(version))
        engine.decoder.weights.refresh = honest
        asyncio.run(sync.publish(version))


def test_one_wrong_bit_in_a_packed_matrix_is_seen(layout: str):
    if layout != "packed":
        pytest.skip("everything is read in place: there is no copy")
    model, engine = make(torch.float32, "float32")
    assert engine.decoder.find_stale(model) == ""
    packed = engine.decoder.weights.layers[1].down.weight
    packed.view(torch.int32)[3, 4] ^= 1
    assert engine.decoder.find_stale(model) == "layers.1.down.weight"


def test_weights_that_are_not_numbers_are_no_alarm_of_the_receipt():
    model, engine = make(torch.float32, "bfloat16")
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    asyncio.run(engine.update_weights(model, 1))
    assert engine.version == 1


def test_the_copy_of_a_model_without_a_lean_path_is_proved_too():
    class Wrapped(Qwen2ForCausalLM):
        pass

    Wrapped.__name__ = "Wrapped"
    model, engine = make(torch.float32, "bfloat16", Wrapped)
    assert engine.generic_reason
    train_a_little(model)
    asyncio.run(engine.update_weights(model, 1))
    with torch.no_grad():
        engine.decoder._copy.model.layers[1].mlp.down_proj.weight[0, 0] += 1
    assert engine.decoder.find_stale(model) == "model.layers.1.mlp.down_proj.weight"
