"""The replicas of a plan: each process sees its devices, each gets requests, weights and a receipt."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import rollout_server
from tests.contract.test_transports import SEQUENCES, Publishing, settings
from tests.contract.test_weight_sync import ModuleEngine, Trainer, scores, small_model
from tests.rollout_adapters import letters_tokenizer
from tests.unit.plugin.fake_devices import FakePlatform
from verl.config import load_config
from verl.placement import pools as placement
from verl.placement.pools import plan_run
from verl.trainer.ppo.rollout_setup import build_rollout_engine
from verl.utils.errors import WorkerError
from verl.weight_sync.logprob_probe import LogprobProbe
from verl.workers.rollout.base import GenerationRequest, SamplingParams, StaleWeightsError
from verl.workers.rollout.remote import engine as remote_engine
from verl.workers.rollout.router import Router

ROLLOUT = "actor_rollout_ref.rollout"
SPLIT = ["actor_rollout_ref.hybrid_engine=False", f"{ROLLOUT}.n_gpus_per_node=2", "trainer.n_gpus_per_node=2"]
BESIDE_RANKS: Any = SimpleNamespace(group=SimpleNamespace(local_worker=None))


@pytest.fixture
def on_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight devices, of which this process sees four."""
    platform = FakePlatform()
    monkeypatch.setattr(FakePlatform, "device_count", lambda self: 4)
    monkeypatch.setattr(FakePlatform, "rollout_env_vars", lambda self: {"CHIP_ROLLOUT": "yes"})
    for module in (placement, remote_engine):
        monkeypatch.setattr(module, "get_platform", lambda: platform)
    monkeypatch.setenv("CHIP_VISIBLE_DEVICES", "7,6,5,4")


def start(folder: Path, *words: str) -> tuple[Any, list[str]]:
    """The engine of a run, and what its processes see, in the order of the replicas."""
    small_model().save_pretrained(folder)
    seen = folder / "seen"
    note = f'echo "$CHIP_VISIBLE_DEVICES $CHIP_ROLLOUT" >> {seen}; shift 2'
    python = rollout_server.python_wrapper(folder, first=note)
    fixed = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.n=1", f"{ROLLOUT}.dtype=float32", f"{ROLLOUT}.server.python={python}"]
    config = load_config([*fixed, "data.train_batch_size=8", f"actor_rollout_ref.model.path={folder}", *words])
    engine = build_rollout_engine(config, plan_run(config), BESIDE_RANKS, letters_tokenizer())
    return engine, sorted(seen.read_text().splitlines())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([f"{ROLLOUT}.tensor_model_parallel_size=2"], ["5,4 yes", "7,6 yes"]),
        ([f"{ROLLOUT}.data_parallel_size=2"], ["5,4 yes", "7,6 yes"]),
        ([f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.data_parallel_size=2"], ["7,6,5,4 yes"]),
        ([f"{ROLLOUT}.num_replicas=1"], ["7 yes"]),
        (SPLIT, ["4 yes", "5 yes"]),
    ],
)
def test_every_replica_of_the_plan_sees_its_own_devices(
    words: list[str], expected: list[str], tmp_path: Path, on_chips: None
):
    engine, seen = start(tmp_path, *words)
    assert seen == expected and len(engine.replicas) == len(expected)
    if len(expected) > 1:
        assert engine.shares_devices is (words != SPLIT)
    engine.close()


@pytest.fixture
def replicas(tmp_path: Path, on_chips: None) -> Iterator[Router]:
    engine, _ = start(tmp_path, f"{ROLLOUT}.tensor_model_parallel_size=2")
    yield engine
    engine.close()


def answers(engine: Router) -> Counter[int]:
    """Which replica answered how many of eight requests."""

    async def ask() -> Any:
        requests = [GenerationRequest(number, [1, 2], SamplingParams(max_tokens=1)) for number in range(8)]
        return await asyncio.gather(*map(engine.generate, requests))

    return Counter(token for [completion] in asyncio.run(ask()) for token in completion.token_ids)


def test_each_step_gives_every_replica_weights_a_receipt_and_half_of_the_requests(replicas: Router, tmp_path: Path):
    publishing = Publishing(replicas, settings("naive", tmp_path))

    async def trainer(sequences: Any) -> list[list[float]]:
        return scores(publishing.model, sequences)

    publishing.sync.probe, publishing.sync.probe_every = LogprobProbe(SEQUENCES, trainer), 1
    for version in range(3):
        publishing.step()
        receipt = publishing.publish(version)
        assert (receipt.version, receipt.num_replicas, len(receipt.probes)) == (version, 2, 2)
        assert answers(replicas) == {0: 4, 1: 4}
        asyncio.run(replicas.sleep())
        asyncio.run(replicas.wake())
        assert answers(replicas) == {0: 4, 1: 4}  # as validation does: nothing was lost
        asyncio.run(replicas.sleep_until_update())
    asyncio.run(replicas.wake())
    with pytest.raises(WorkerError, match="no weights"):
        answers(replicas)
    publishing.close()


def test_a_stale_data_parallel_rank_of_a_replica_is_named():
    trainer = Trainer(tied=False)
    first, second = ModuleEngine(trainer.model), ModuleEngine(trainer.model)
    of_first = first.compute_logprobs

    async def of_both(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [*await of_first(sequences), *await second.compute_logprobs(sequences)]

    first.compute_logprobs = of_both
    sync = trainer.sync(first)
    [probe] = asyncio.run(sync.publish(0)).probes
    assert probe.difference < probe.bound
    trainer.step()
    with pytest.raises(StaleWeightsError, match=r"replica 0 \(data-parallel rank 1\) does not compute with version 1"):
        asyncio.run(sync.publish(1))
