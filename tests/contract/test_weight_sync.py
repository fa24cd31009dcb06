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
from verl.weight_sync.logprob_probe import ROUNDING_RMS, LogprobProbe, probe_sequences
from verl.workers.rollout.base import Completion, CopyingEngine, GenerationRequest, StaleWeightsError

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

    def sync(self, engine: CopyingEngine, rounding: float = ROUNDING_RMS[torch.float32], every: int = 1) -> CopySync:
        probe = LogprobProbe(probe_sequences(VOCAB), self.scores, rounding)
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
    assert result.difference < 1e-6 and result.trainer_change > 1e-3 and not result.change_too_small


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


def test_a_step_too_small_to_see_is_said_to_be_too_small():
    trainer = Trainer(tied=False, lr=1e-9)
    sync = trainer.sync(ModuleEngine(trainer.model))
    for version in range(2):
        receipt = asyncio.run(sync.publish(version))
        trainer.step()
    assert receipt.probes[0].change_too_small


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


@pytest.mark.parametrize(("dtype", "publishes", "lr"), [(torch.float32, 1000, 3e-4), (torch.bfloat16, 200, 1e-3)])
def test_a_thousand_good_publishes_raise_no_alarm(dtype: torch.dtype, publishes: int, lr: float):
    trainer = Trainer(tied=True, lr=lr)
    engine = ModuleEngine(trainer.model, dtype)
    engine.bucket_bytes = 1 << 20
    sync = trainer.sync(engine, ROUNDING_RMS[dtype])
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
