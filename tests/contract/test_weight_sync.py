"""Publishing by copy: what arrives is what was sent, what was sent is used, and faults are caught at their publish."""

import asyncio
import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl.checkpoint_engine.buckets import buckets
from verl.config import HFModelConfig
from verl.models import lora
from verl.models.fingerprint import fingerprint
from verl.weight_sync.copy_sync import CopySync
from verl.weight_sync.logprob_probe import LogprobProbe, probe_sequences
from verl.workers.engine.precision import MasterWeights, other_dtype
from verl.workers.rollout.base import Completion, CopyingEngine, GenerationRequest, ReadBack, StaleWeightsError

VOCAB = 64


def small_model(tied: bool = False) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=tied, eos_token_id=0, bos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def scores(model: nn.Module, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    ids = torch.tensor(sequences)
    with torch.no_grad():
        logprobs = model(ids, use_cache=False).logits.float().log_softmax(-1)
    taken = logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return [[0.0, *row] for row in taken.tolist()]


class ModuleEngine(CopyingEngine):
    """An engine whose copy is a transformers module; `fault` may tamper with what it is told to do."""

    bucket_bytes = 20_000

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32):
        self.model, self.dtype, self.held = copy.deepcopy(model).to(dtype), dtype, -1
        self.params = dict(self.model.named_parameters())
        self.pack_head()
        self.cache: dict[str, list[list[float]]] = {}
        self.rename = self.change = lambda name, tensor: (name, tensor)
        self.applies: Callable[[str], bool] = lambda name: True
        self.loses: Callable[[str], bool] = lambda name: False
        self.flushes = self.packs = self.finishes = True

    def pack_head(self) -> None:
        """A second copy of the tied head, as engines keep one that is laid out for their kernels."""
        self.head = self.model.lm_head.weight.detach().clone()

    @property
    def version(self) -> int:
        return self.held

    async def begin_update(self) -> None:
        pass

    async def load_bucket(self, bucket: list[tuple[str, Tensor]]) -> list[dict[str, str]]:
        arrived = {}
        for name, tensor in bucket:
            if self.loses(name):
                continue
            name, tensor = self.change(name, tensor)
            arrived[name] = fingerprint(tensor)
            target, value = self.rename(name, tensor)
            if self.applies(target):
                with torch.no_grad():
                    self.params[target].copy_(value)
        return [arrived]

    async def finish_update(self, version: int) -> None:
        if self.packs:
            self.pack_head()
        if self.flushes:
            self.cache.clear()
        self.held = version

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        key = str(sequences)
        if key not in self.cache:
            weight = self.model.lm_head.weight
            kept, weight.data = weight.data, self.head
            hidden = self.model.model(torch.tensor(sequences), use_cache=False).last_hidden_state
            logprobs = (hidden @ self.head.T).float().log_softmax(-1).detach()
            weight.data = kept
            taken = logprobs[:, :-1].gather(-1, torch.tensor(sequences)[:, 1:, None])[..., 0]
            self.cache[key] = [[0.0, *row] for row in taken.tolist()]
        return self.cache[key]

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        raise AssertionError("publishing scores, it does not sample")

    async def sleep(self) -> None:
        pass

    async def wake(self) -> None:
        pass

    async def abort(self, request_id: int | None = None) -> None:
        pass


class Replicas(ModuleEngine):
    """Two replicas; every bucket goes to both."""

    def __init__(self, engines: list[ModuleEngine]):
        self.engines = engines
        self.skipped: int | None = None

    @property
    def replicas(self) -> Sequence[CopyingEngine]:
        return self.engines

    async def load_bucket(self, bucket: list[tuple[str, Tensor]]) -> list[dict[str, str]]:
        return [(await engine.load_bucket(bucket))[0] for engine in self.engines]

    async def finish_update(self, version: int) -> None:
        for engine in self.engines:
            await engine.finish_update(version)


class Trainer:
    """A model that takes Adam steps on random tokens."""

    def __init__(self, tied: bool, lr: float = 1e-3):
        self.model = small_model(tied)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.random = torch.Generator().manual_seed(1)

    def step(self) -> None:
        ids = torch.randint(VOCAB, (2, 16), generator=self.random)
        self.model(ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    async def scores(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return scores(self.model, sequences)

    async def cast_scores(self, sequences: Sequence[Sequence[int]], dtype: torch.dtype) -> list[list[float]]:
        cast = copy.deepcopy(self.model).to(torch.float64 if dtype == torch.float32 else dtype)
        return scores(cast, sequences)

    def sync(self, engine: CopyingEngine, dtype: torch.dtype = torch.float32, every: int = 1) -> CopySync:
        probe = LogprobProbe(
            probe_sequences(VOCAB), self.scores, lambda sequences: self.cast_scores(sequences, dtype), dtype
        )
        return CopySync(lambda: self.model.named_parameters(), engine, probe, every)


def test_the_engine_computes_with_what_was_published_and_the_receipt_says_so():
    trainer = Trainer(tied=True)
    engine = ModuleEngine(trainer.model)
    sync = trainer.sync(engine)
    for version in range(3):
        trainer.step()
        receipt = asyncio.run(sync.publish(version))
        numbers = sum(p.numel() for p in trainer.model.parameters())
        assert (receipt.version, receipt.num_replicas, receipt.bytes_moved) == (version, 1, 4 * numbers)
        assert receipt.num_tensors == len(list(trainer.model.parameters()))
        assert scores(engine.model, [[1, 2, 3]]) == scores(trainer.model, [[1, 2, 3]])
    [result] = receipt.probes
    assert result.difference < 1e-6 < result.bound < 1e-4
    metrics = receipt.metrics()
    assert metrics["weight_sync/probe_difference"] == result.difference
    assert metrics["weight_sync/probe_bound"] == result.bound
    assert metrics["weight_sync/tensors_sent"] == receipt.num_tensors and not metrics["weight_sync/tensors_read_back"]
    assert "does not show its weights" in receipt.warning()


def swap(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    swapped = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    for old, new in swapped.items():
        if "layers.1" in name and old in name:
            return name.replace(old, new), tensor
    return name, tensor


def transpose_q(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    return (name, tensor.T.contiguous()) if "layers.0.self_attn.q_proj.weight" in name else (name, tensor)


FAULTS = {
    "a dropped tensor": (lambda e: setattr(e, "loses", lambda n: "1.mlp.down" in n), "did not receive.*layers.1"),
    "a stale tied head": (lambda e: setattr(e, "packs", False), "replica 0"),
    "a transposed shard, in transit": (lambda e: setattr(e, "change", transpose_q), "another .*q_proj.weight"),
    "a transposed shard, in the engine": (lambda e: setattr(e, "rename", transpose_q), "replica 0"),
    "a missed prefix-cache flush": (lambda e: setattr(e, "flushes", False), "stayed where it was"),
    "a partial update": (lambda e: setattr(e, "applies", lambda n: "layers.0" not in n), "replica 0"),
    "a wrong type": (lambda e: setattr(e, "change", lambda n, t: (n, t.bfloat16())), "another .*float32.*bfloat16"),
    "a wrong type, in the engine": (lambda e: setattr(e, "rename", lambda n, t: (n, t.bfloat16())), "replica 0"),
    "an update that is not applied": (lambda e: setattr(e, "applies", lambda n: False), "replica 0"),
    "a name mapped wrongly": (lambda e: setattr(e, "rename", swap), "replica 0"),
    "one stale norm": (lambda e: setattr(e, "applies", lambda n: n != "model.norm.weight"), "replica 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_one_step_after_a_good_publish_is_caught_at_its_publish(name: str):
    trainer = Trainer(tied="tied" in name)
    engine = ModuleEngine(trainer.model)
    sync = trainer.sync(engine)
    for version in range(3):
        trainer.step()
        asyncio.run(sync.publish(version))
    inject, message = FAULTS[name]
    inject(engine)
    trainer.step()
    with pytest.raises(StaleWeightsError, match=message):
        asyncio.run(sync.publish(3))


def test_an_old_version_sent_again_is_caught_although_every_digest_agrees():
    trainer = Trainer(tied=False)
    sync = trainer.sync(ModuleEngine(trainer.model))
    for version in range(2):
        trainer.step()
        asyncio.run(sync.publish(version))
    old = [(name, tensor.detach().clone()) for name, tensor in trainer.model.named_parameters()]
    sync.weights = lambda: old
    trainer.step()
    with pytest.raises(StaleWeightsError, match="replica 0"):
        asyncio.run(sync.publish(2))


def test_adapters_that_are_left_out_are_caught_although_every_digest_agrees():
    trainer = Trainer(tied=False)
    engine = ModuleEngine(trainer.model)
    lora.add_adapters(trainer.model, HFModelConfig(lora_rank=4), seed=0)
    trainer.optimizer = torch.optim.Adam([p for p in trainer.model.parameters() if p.requires_grad], lr=1e-2)
    scales, sync = lora.adapter_scales(trainer.model), trainer.sync(engine)
    sync.weights = lambda: lora.merge_adapters(trainer.model.named_parameters(), scales)
    for version in range(3):
        trainer.step()
        asyncio.run(sync.publish(version))
    assert scores(engine.model, [[1, 2, 3]])[0] == pytest.approx(scores(trainer.model, [[1, 2, 3]])[0], abs=1e-6)
    trainer.step()
    scales = dict.fromkeys(scales, 0.0)
    with pytest.raises(StaleWeightsError, match="replica 0 does not compute with version 3"):
        asyncio.run(sync.publish(3))


@pytest.mark.parametrize("honest", [True, False])
def test_a_skipped_replica_is_named(honest: bool):
    trainer = Trainer(tied=False)
    both = [ModuleEngine(trainer.model) for _ in range(2)]
    sync = trainer.sync(Replicas(both))
    asyncio.run(sync.publish(0))
    trainer.step()
    if honest:  # it says which version it has

        async def nothing(version: int) -> None:
            pass

        both[1].finish_update = nothing
    else:
        both[1].applies = lambda name: False
    with pytest.raises(StaleWeightsError, match="replica 1"):
        asyncio.run(sync.publish(1))


def swap_q_and_k(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    for old, new in (("q_proj", "k_proj"), ("k_proj", "q_proj")):
        if f"layers.0.self_attn.{old}" in name:
            return name.replace(old, new), tensor
    return name, tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_that_is_wrong_from_the_first_publish_on_is_caught_at_the_first(dtype: torch.dtype):
    trainer = Trainer(tied=False, lr=1e-2)
    for _ in range(20):  # attention patterns, as a trained model has them
        trainer.step()
    engine = ModuleEngine(trainer.model, dtype)
    engine.rename = swap_q_and_k
    with pytest.raises(StaleWeightsError, match="replica 0 does not compute with version 0"):
        asyncio.run(trainer.sync(engine, dtype).publish(0))


def test_the_bound_of_the_probe_does_not_depend_on_what_the_engine_showed():
    trainer = Trainer(tied=False)
    bounds = []
    for error in (0.0, 1e-5):
        engine = ModuleEngine(trainer.model)
        sync = trainer.sync(engine)
        for version in range(3):
            engine.change = lambda name, tensor: (name, tensor)
            engine.rename = lambda name, tensor, error=error: (name, tensor * (1 + error * ("q_norm" in name)))
            bounds.append(asyncio.run(sync.publish(version)).probes[0].bound)
    assert max(bounds) == min(bounds)


class ReadableEngine(ModuleEngine):
    """Shows what its layers hold."""

    async def finish_update(self, version: int) -> None:
        held = {name: fingerprint(tensor) for name, tensor in self.params.items()}
        wrong = [(name, name, sent, held[name]) for name, sent in self.arrived.items() if held[name] != sent]
        self.read_back = ReadBack(len(self.arrived), tuple(wrong), unread=("rotary.table",))
        self.read_back.check("replica 0", version)
        await super().finish_update(version)

    async def load_bucket(self, bucket: list[tuple[str, Tensor]]) -> list[dict[str, str]]:
        [arrived] = await super().load_bucket(bucket)
        self.arrived = getattr(self, "arrived", {}) | arrived
        return [arrived]


def test_what_the_layers_hold_is_compared_at_every_publish_and_the_receipt_says_what_was_not():
    trainer = Trainer(tied=False)
    engine = ReadableEngine(trainer.model)
    sync = trainer.sync(engine, every=0)
    for version in range(2):
        receipt = asyncio.run(sync.publish(version))
        trainer.step()
    assert receipt.num_read_back == receipt.num_tensors and not receipt.probes
    assert "1 of its parameters (first rotary.table)" in receipt.warning()
    assert receipt.metrics()["weight_sync/parameters_not_read_back"] == 1
    engine.rename = lambda name, tensor: (name, tensor * (1.001 if name == "model.norm.weight" else 1))
    with pytest.raises(StaleWeightsError, match=r"another model.norm.weight than version 2 has \(arrived .*, held"):
        asyncio.run(sync.publish(2))
    assert engine.version == 1


def test_a_fused_matrix_that_got_only_some_of_its_projections_is_named():
    read_back = ReadBack(3, missing=("32 of 96 rows of layers.0.qkv_proj.weight",))
    with pytest.raises(StaleWeightsError, match=r"no value for 1 .*first 32 of 96 rows of layers.0.qkv_proj.weight"):
        read_back.check("replica 1, rank 0", 7)


def test_the_probe_runs_first_and_then_at_its_cadence():
    trainer = Trainer(tied=False)
    sync = trainer.sync(ModuleEngine(trainer.model), every=3)
    assert [bool(asyncio.run(sync.publish(v)).probes) for v in range(7)] == [
        True,
        False,
        False,
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(("dtype", "publishes", "lr"), [(torch.float32, 60, 3e-4), (torch.bfloat16, 30, 1e-3)])
def test_good_publishes_raise_no_alarm(dtype: torch.dtype, publishes: int, lr: float):
    trainer = Trainer(tied=True, lr=lr)
    engine = ModuleEngine(trainer.model, dtype)
    engine.bucket_bytes = 1 << 20
    sync = trainer.sync(engine, dtype)
    for version in range(publishes):
        trainer.step()
        assert asyncio.run(sync.publish(version)).probes


def test_buckets_keep_order_and_size_and_cast_only_floats():
    tensors = [(str(i), torch.full((n,), i, dtype=torch.float32)) for i, n in enumerate((10, 30, 100, 5, 5))]
    cut = list(buckets([*tensors, ("ids", torch.arange(3))], 100, torch.bfloat16))
    assert [[name for name, _ in bucket] for bucket in cut] == [["0", "1"], ["2"], ["3", "4", "ids"]]
    assert cut[0][0][1].dtype == torch.bfloat16 and cut[2][2][1].dtype == torch.int64


def test_a_fingerprint_sees_values_places_types_and_shapes_but_not_strides():
    torch.manual_seed(0)
    tensor = torch.randn(300, 301)
    changed = tensor.clone()
    changed[200, 5] += 1e-6
    others = [changed, tensor.T, tensor.view(301, 300), tensor.bfloat16(), tensor.roll(1), tensor[torch.randperm(300)]]
    prints = [fingerprint(t) for t in (tensor, *others)]
    assert len(set(prints)) == len(prints)
    assert fingerprint(tensor.T.contiguous().T) == prints[0]


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_model_computes_with_its_trained_values_in_another_dtype_and_then_with_its_own_again(compute: torch.dtype):
    model = small_model()
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = MasterWeights(model, compute)
    own = {name: p.data_ptr() for name, p in model.named_parameters()}
    with weights.cast_to(torch.float64):
        assert all(torch.equal(p, exact[name].double()) for name, p in model.named_parameters())
        assert scores(model, [[1, 2, 3]])
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == own
    assert {p.dtype for p in model.parameters()} == {compute}
    assert other_dtype(torch.bfloat16, compute) == (torch.float32 if compute == torch.bfloat16 else torch.bfloat16)
