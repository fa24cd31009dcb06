"""Faults of the real vLLM after its weights arrived: each is caught at its publish, and the error names the tensor."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests import vllm_server
from tests.conftest import skip_without_vllm
from tests.contract.test_transports import Rank
from tests.rollout_adapters import CONFIG, EOS, own_logprobs
from tests.rollout_server import python_wrapper
from verl.checkpoint_engine.endpoint import TransportSettings
from verl.config.rollout import ServerConfig
from verl.runtime.inline import InlineGroup
from verl.weight_sync.copy_sync import CopySync
from verl.weight_sync.logprob_probe import LogprobProbe, probe_sequences
from verl.weight_sync.weight_transfer import WeightTransfer
from verl.workers.rollout.base import GenerationRequest, SamplingParams, StaleWeightsError
from verl.workers.rollout.remote.engine import RemoteEngine
from verl.workers.rollout.router import Router
from verl.workers.rollout.vllm.engine import VLLMEngine

pytestmark = pytest.mark.vllm
SMALL = replace(CONFIG, name="vllm", enforce_eager=True, kv_cache_bytes=1 << 24, prompt_length=1000)
SHARES = 64  # publishes in which all columns of a packed matrix are read
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


def model_with_experts(layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=EOS + 2, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
        tie_word_embeddings=False, eos_token_id=EOS, bos_token_id=None, pad_token_id=EOS + 1,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


def by_expert(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The weights in a checkpoint's names: one tensor an expert and projection."""
    for name, weight in model.named_parameters():
        if ".experts." not in name:
            yield name, weight
            continue
        parent, _, leaf = name.rpartition(".")
        for number, one in enumerate(weight):
            parts = zip(("gate_proj", "up_proj"), one.chunk(2), strict=True) if leaf == "gate_up_proj" else []
            yield from ((f"{parent}.{number}.{n}.weight", p) for n, p in parts or [("down_proj", one)])


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


def one_weight_off(name: str, arrived: Tensor, old: dict[str, Tensor]) -> Tensor:
    """In column 20, which the eleventh share of two of 96 columns has."""
    wrong = arrived.clone()
    wrong[3, 20] += 1e-6
    return wrong


FAULTS: list[Fault] = [stale, through_float16, scaled]


@pytest.fixture
def opened() -> Iterator[list[VLLMEngine]]:
    engines: list[VLLMEngine] = []
    yield engines
    for engine in engines:
        engine.close()


def check_every_fault(model: PreTrainedModel, engine: VLLMEngine, whose: str, faults: list[Fault]) -> int:
    """Publishes with each fault of each tensor; all are named. Returns how many changed a tensor at all.

    A fault in every column is named at its publish, another one once its column is read.
    """
    dtype, caught = engine.dtype, 0
    sync = CopySync(lambda: model.named_parameters(), engine)
    receipt = asyncio.run(sync.publish(0))
    assert receipt.num_read_back == receipt.num_tensors and not receipt.unread
    for version, fault in enumerate(faults, 1):
        old = named(model, dtype)
        step(model)
        for name, tensor in named(model, dtype).items():
            engine.llm.collective_rpc(inject, args=(fault, name, old))
            wrong = fault(name, tensor, old) != tensor
            if not wrong.any():  # rounds to the same value
                asyncio.run(sync.publish(version))
                continue
            publishes = 1 if wrong.dim() == 1 or wrong.flatten(0, -2).any(0).all() else SHARES
            with pytest.raises(StaleWeightsError, match=f"{whose}.* another {name} than version {version} has"):
                for _ in range(publishes):
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


def test_one_wrong_weight_is_caught_as_soon_as_its_share_of_the_columns_is_read(
    tmp_path: Path, opened: list[VLLMEngine]
):
    model = small_model(tied=False)
    model.save_pretrained(tmp_path)
    opened.append(engine := VLLMEngine(SMALL, tmp_path))
    sync, name = CopySync(lambda: model.named_parameters(), engine), "model.layers.1.mlp.down_proj.weight"
    asyncio.run(sync.publish(0))  # all of its 96 columns; then 2 at each publish
    engine.llm.collective_rpc(inject, args=(one_weight_off, name, {}))
    for version in range(1, 11):
        asyncio.run(sync.publish(version))
    with pytest.raises(StaleWeightsError, match=f"another {name} than version 11 has"):
        asyncio.run(sync.publish(11))
    opened.append(restarted := VLLMEngine(SMALL, tmp_path))
    restarted.llm.collective_rpc(inject, args=(one_weight_off, name, {}))
    with pytest.raises(StaleWeightsError, match=f"another {name} than version 0 has"):
        asyncio.run(CopySync(lambda: model.named_parameters(), restarted).publish(0))


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 100])
def test_every_column_of_a_packed_matrix_is_read_within_one_round_of_shares(columns: int):
    from verl.workers.rollout.vllm.weight_readback import WeightReader

    reader, layer = WeightReader(torch.nn.Module()), SimpleNamespace(embedding_dim=columns)
    assert reader.columns_to_read(layer) == slice(0, columns)
    read: set[int] = set()
    for reader.num_updates in range(5, 5 + SHARES):
        share = reader.columns_to_read(layer)
        assert 0 < share.stop - share.start <= -(-columns // SHARES)
        read.update(range(columns)[share])
    assert read == set(range(columns))


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_fault_of_joined_experts_is_caught_at_its_publish_and_named(
    dtype: str, tmp_path: Path, opened: list[VLLMEngine]
):
    model = model_with_experts(layers=1)
    model.save_pretrained(tmp_path)
    opened.append(engine := VLLMEngine(replace(SMALL, dtype=dtype), tmp_path))
    caught, tensors = check_every_fault(model, engine, "replica 0", [stale, scaled]), len(list(model.parameters()))
    assert caught == 2 * tensors if dtype == "float32" else caught >= tensors  # bfloat16 rounds 1.001 to 1


def test_experts_are_read_back_one_by_one_and_compute_what_was_sent(
    tmp_path: Path, opened: list[VLLMEngine], monkeypatch: pytest.MonkeyPatch
):
    model, ids = model_with_experts(), list(range(12))
    model.save_pretrained(tmp_path)
    opened.append(engine := VLLMEngine(SMALL, tmp_path))
    sync, last = CopySync(lambda: by_expert(model), engine), "model.layers.1.mlp.experts.3.up_proj.weight"
    receipt = asyncio.run(sync.publish(0))
    assert receipt.num_read_back == receipt.num_tensors == len(list(by_expert(model))) and not receipt.unread
    logprobs = torch.tensor(asyncio.run(engine.compute_logprobs([ids]))[0][1:])
    torch.testing.assert_close(logprobs, own_logprobs(model, ids[1:], ids[:1]), atol=1e-5, rtol=0)
    engine.llm.collective_rpc(inject, args=(scaled, last, {}))
    with pytest.raises(StaleWeightsError, match=f"routed_experts computes with another {last} than version 1"):
        asyncio.run(sync.publish(1))
    engine.llm.collective_rpc(inject, args=(None, "", {}))
    kept = [(n, p) for n, p in by_expert(model) if n != last]
    with pytest.raises(StaleWeightsError, match=r"64 of 512 rows of model.layers.1.mlp.experts.routed_experts.w13"):
        asyncio.run(CopySync(lambda: kept, engine).publish(2))
    # as vLLM itself leaves them
    monkeypatch.setattr("verl.workers.rollout.vllm.worker.repack_experts", lambda model: None)
    with pytest.raises(StaleWeightsError, match="routed_experts computes with another"):
        asyncio.run(sync.publish(3))


@pytest.mark.parametrize(
    ("dtype", "make"), [("bfloat16", partial(small_model, True, layers=1)), ("float32", partial(model_with_experts, 1))]
)
def test_ranks_of_tensor_parallelism_show_their_shards(
    dtype: str,
    make: Callable[[], PreTrainedModel],
    tmp_path: Path,
    opened: list[VLLMEngine],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    model = make()
    model.save_pretrained(tmp_path)
    opened.append(engine := VLLMEngine(replace(SMALL, dtype=dtype, tensor_model_parallel_size=2), tmp_path))
    assert check_every_fault(model, engine, "replica 0, rank 0", [stale]) == len(list(model.parameters()))


def test_of_two_live_replicas_the_one_that_is_wrong_is_named_with_its_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two vLLM processes behind the router, and a transport between them and the trainer."""
    model, fault = small_model(tied=True, layers=1), tmp_path / "fault"
    model.save_pretrained(tmp_path)
    fault.write_text("none")
    monkeypatch.setenv(vllm_server.FAULT_FILE, str(fault))
    python = ServerConfig(python=python_wrapper(tmp_path, "tests.vllm_server"))
    engines = [RemoteEngine(replace(SMALL, server=python), tmp_path, (), number) for number in range(2)]
    router = Router(engines)
    try:
        for engine in engines:
            engine.wait_until_ready()
        trainer = InlineGroup(Rank(lambda: list(model.named_parameters())))
        transfer = WeightTransfer(TransportSettings("naive", 60_000, {"timeout": 60.0}), trainer, router)
        sync = CopySync(lambda: [], router, weight_transfer=transfer)
        receipt = asyncio.run(sync.publish(0))
        assert receipt.num_replicas == 2 and receipt.num_read_back == receipt.num_tensors and not receipt.unread
        for version, (name, _) in enumerate(model.named_parameters(), 1):
            for replica in (0, 1):
                step(model)
                fault.write_text(f"{replica} {name}")
                whose = f"replica {replica}, rank 0: .* computes with another {name} than version {version}"
                with pytest.raises(StaleWeightsError, match=whose):
                    asyncio.run(sync.publish(version))
        fault.write_text("none")
        asyncio.run(sync.publish(version + 1))
        request = GenerationRequest(0, [3, 1, 4], SamplingParams(max_tokens=4))
        assert asyncio.run(router.generate(request))[0].policy_version == (version + 1, version + 1)
    finally:
        router.close()


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
