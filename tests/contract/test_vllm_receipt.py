"""Faults of the real vLLM after its weights arrived: each is caught at its publish, and the error names the tensor."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.conftest import skip_without_vllm
from tests.contract.test_rollout import CONFIG, EOS, own_logprobs
from verl.weight_sync.copy_sync import CopySync
from verl.weight_sync.logprob_probe import LogprobProbe, probe_sequences
from verl.workers.rollout.base import StaleWeightsError
from verl.workers.rollout.router import Router
from verl.workers.rollout.vllm_engine import VLLMEngine

pytestmark = pytest.mark.vllm
SMALL = replace(CONFIG, enforce_eager=True, kv_cache_bytes=1 << 24, prompt_length=1000)
Fault = Callable[[str, Tensor, dict[str, Tensor]], Tensor]  # name, what arrived, what the last version had


@pytest.fixture(autouse=True)
def vllm_is_here() -> None:
    skip_without_vllm()


def small_model(tied: bool, layers: int = 2) -> PreTrainedModel:
    """Queries and keys have the same shape, so that they can be exchanged."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=EOS + 2, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=tied, eos_token_id=EOS, bos_token_id=None,
        pad_token_id=EOS + 1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def step(model: PreTrainedModel, size: float = 2e-3) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * size)


def named(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: p.detach().to(dtype, copy=True) for name, p in model.named_parameters()}


def inject(worker: Any, fault: Fault | None, target: str, old: dict[str, Tensor]) -> None:
    """Make vLLM load something else than what arrived, for one tensor."""
    model = worker.model_runner.get_model()
    load = type(model).load_weights

    def load_wrongly(weights: Any) -> Any:
        return load(model, ((n, fault(n, t, old) if n == target else t) for n, t in list(weights)))

    model.load_weights = (lambda weights: load(model, weights)) if fault is None else load_wrongly


def stale(name: str, arrived: Tensor, old: dict[str, Tensor]) -> Tensor:
    return old[name].to(arrived)


def through_float16(name: str, arrived: Tensor, old: dict[str, Tensor]) -> Tensor:
    return arrived.half().to(arrived)


def scaled(name: str, arrived: Tensor, old: dict[str, Tensor]) -> Tensor:
    return arrived * 1.001


def transposed_keys_for_queries(name: str, arrived: Tensor, old: dict[str, Tensor]) -> Tensor:
    return old[name.replace("q_proj", "k_proj")].to(arrived)


FAULTS: list[Fault] = [stale, through_float16, scaled]


@pytest.fixture
def opened() -> Iterator[list[VLLMEngine]]:
    engines: list[VLLMEngine] = []
    yield engines
    for engine in engines:
        engine.close()


def check_every_fault(model: PreTrainedModel, engine: VLLMEngine, whose: str, faults: list[Fault]) -> int:
    """Publishes with each fault of each tensor; all are named. Returns how many changed a tensor at all."""
    dtype, caught = engine.dtype, 0
    sync = CopySync(lambda: model.named_parameters(), engine)
    receipt = asyncio.run(sync.publish(0))
    assert receipt.num_read_back == receipt.num_tensors and not receipt.unread
    for version, fault in enumerate(faults, 1):
        old = named(model, dtype)
        step(model)
        for name, tensor in named(model, dtype).items():
            engine.llm.collective_rpc(inject, args=(fault, name, old))
            if torch.equal(fault(name, tensor, old), tensor):  # rounds to the same value
                asyncio.run(sync.publish(version))
                continue
            with pytest.raises(StaleWeightsError, match=f"{whose}.* another {name} than version {version} has"):
                asyncio.run(sync.publish(version))
            caught += 1
        engine.llm.collective_rpc(inject, args=(None, "", {}))
        asyncio.run(sync.publish(version))
    return caught


@pytest.mark.parametrize(("dtype", "tied"), [("float32", True), ("bfloat16", False)])
def test_every_fault_of_every_tensor_is_caught_at_its_publish_and_named(
    dtype: str, tied: bool, tmp_path: Path, opened: list[VLLMEngine]
):
    model = small_model(tied)
    model.save_pretrained(tmp_path)
    opened.append(engine := VLLMEngine(replace(SMALL, dtype=dtype), tmp_path))
    caught, tensors = check_every_fault(model, engine, "replica 0", FAULTS), len(list(model.parameters()))
    assert caught == 3 * tensors if dtype == "float32" else caught > tensors  # norms of bfloat16 fit into float16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exchanged_queries_and_keys_are_caught_at_the_first_publish(
    dtype: str, tmp_path: Path, opened: list[VLLMEngine]
):
    model = small_model(tied=False)
    model.save_pretrained(tmp_path)
    opened.append(engine := VLLMEngine(replace(SMALL, dtype=dtype), tmp_path))
    name = "model.layers.1.self_attn.q_proj.weight"
    engine.llm.collective_rpc(inject, args=(transposed_keys_for_queries, name, named(model, engine.dtype)))
    with pytest.raises(StaleWeightsError, match=f"qkv_proj computes with another {name} than version 0"):
        asyncio.run(CopySync(lambda: model.named_parameters(), engine).publish(0))


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_ranks_of_tensor_parallelism_show_their_shards(
    dtype: str, tmp_path: Path, opened: list[VLLMEngine], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    model = small_model(tied=True, layers=1)
    model.save_pretrained(tmp_path)
    opened.append(engine := VLLMEngine(replace(SMALL, dtype=dtype, tensor_model_parallel_size=2), tmp_path))
    assert check_every_fault(model, engine, "replica 0, rank 0", [stale]) == len(list(model.parameters()))


def test_the_replica_that_is_wrong_is_named(tmp_path: Path, opened: list[VLLMEngine]):
    model = small_model(tied=True)
    model.save_pretrained(tmp_path)
    opened.append(engine := VLLMEngine(SMALL, tmp_path, replica=1))
    sync = CopySync(lambda: model.named_parameters(), Router([engine]))
    old = named(model, torch.float32)
    step(model)
    engine.llm.collective_rpc(inject, args=(stale, "model.norm.weight", old))
    with pytest.raises(StaleWeightsError, match=r"replica 1, rank 0: model.norm computes with another"):
        asyncio.run(sync.publish(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_good_publishes_raise_no_alarm_also_with_zeros_and_the_smallest_numbers(
    dtype: str, tmp_path: Path, opened: list[VLLMEngine]
):
    model = small_model(tied=True)
    model.save_pretrained(tmp_path)
    opened.append(engine := VLLMEngine(replace(SMALL, dtype=dtype), tmp_path))

    async def logprobs(sequences: Any, kind: torch.dtype = torch.float32) -> list[list[float]]:
        cast = small_model(tied=True).to(kind)
        cast.load_state_dict(model.state_dict())
        return [[0.0, *own_logprobs(cast, list(ids[1:]), list(ids[:1])).tolist()] for ids in sequences]

    other = torch.float64 if dtype == "float32" else torch.bfloat16
    probe = LogprobProbe(probe_sequences(EOS + 2), logprobs, lambda s: logprobs(s, other), engine.dtype)
    sync = CopySync(lambda: model.named_parameters(), engine, probe, 1)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, :6] = torch.tensor([-0.0, 0.0, 1e-40, -1e-39, 1e-30, -1e-30])
    for version in range(8):
        receipt = asyncio.run(sync.publish(version))
        step(model, 1e-3)
        assert receipt.probes[0].difference < receipt.probes[0].bound / 2
