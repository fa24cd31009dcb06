"""The real vLLM with LoRA adapters that are published alone: loaded, used, replaced, read back."""

import asyncio
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.conftest import skip_without_vllm
from tests.contract.test_transports import Rank
from tests.contract.test_vllm import SMALL, answer, trainer_logprobs
from tests.rollout_adapters import EOS, PROMPT, own_logprobs, small_model
from verl.checkpoint_engine.endpoint import TransportSettings
from verl.config import EngineKwargsConfig, HFModelConfig, RolloutConfig, ServerConfig
from verl.models import lora
from verl.runtime.inline import InlineGroup
from verl.utils.errors import ConfigError, WorkerError
from verl.weight_sync.copy_sync import CopySync
from verl.weight_sync.logprob_probe import LogprobProbe, probe_sequences
from verl.weight_sync.weight_transfer import WeightTransfer
from verl.workers.rollout.base import GenerationRequest, SamplingParams, StaleWeightsError
from verl.workers.rollout.remote.engine import RemoteEngine
from verl.workers.rollout.router import Router
from verl.workers.rollout.vllm.engine import VLLMEngine

pytestmark = pytest.mark.vllm
LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}


class Policy:
    """A small model with adapters of rank 4, scale 3, and an engine of this process that takes them."""

    def __init__(self, folder: Path, tied: bool = True, target: str | list[str] = "all-linear"):
        self.model: PreTrainedModel = small_model(tied)
        self.model.save_pretrained(folder)
        settings = HFModelConfig(path=str(folder), lora_rank=4, lora_alpha=12, target_modules=target)
        lora.add_adapters(self.model, settings, seed=0)
        self.scales = lora.adapter_scales(self.model)
        self.engine = self.build(replace(SMALL, engine_kwargs=EngineKwargsConfig(vllm=LORA)), folder)
        self.probe = LogprobProbe(probe_sequences(EOS + 2), lambda sequences: trainer_logprobs(self.model, sequences))
        self.sync = CopySync(lambda: [], self.engine, self.probe, 1, self.transfer(), self.export)

    def build(self, config: RolloutConfig, folder: Path) -> Any:
        return VLLMEngine(config, folder)

    def transfer(self) -> WeightTransfer | None:
        return None

    def export(self, with_base: bool) -> Iterator[tuple[str, Tensor]]:
        named = [(n, p) for n, p in self.model.named_parameters() if with_base or p.requires_grad]
        return lora.split_adapters(named, self.scales)

    def step(self) -> None:
        torch.manual_seed(int(sum(p.double().sum() for p in self.model.parameters()) * 1e6) % 2**31)
        with torch.no_grad():
            for p in self.model.parameters():
                if p.requires_grad:
                    p.add_(torch.randn_like(p) * 0.05)

    def check(self, number: int) -> Any:
        """An answer, whose log-probs must be those of the model with its adapters."""
        [completion] = answer(self.engine, number)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), own_logprobs(self.model, completion.token_ids), atol=1e-5, rtol=0
        )
        return completion


@pytest.fixture(params=[(True, "all-linear"), (False, ["q_proj", "v_proj", "up_proj", "o_proj"])], ids=["tied", "some"])
def policy(request: Any, tmp_path: Path) -> Iterator[Policy]:
    skip_without_vllm()
    policy = Policy(tmp_path / "model", *request.param)
    yield policy
    policy.engine.close()


def test_adapters_alone_are_published_used_and_replaced(policy: Policy, monkeypatch: Any):
    bytes_moved = []
    for version in range(3):
        policy.step()
        receipt = asyncio.run(policy.sync.publish(version))
        assert policy.check(version).policy_version == (version, version)
        assert receipt.probes[0].difference < 1e-5 and receipt.num_read_back == receipt.num_tensors
        assert receipt.warning() == ""
        bytes_moved.append(receipt.bytes_moved)
    adapters = [p for p in policy.model.parameters() if p.requires_grad]
    assert bytes_moved[1] == bytes_moved[2] == sum(p.nbytes for p in adapters)
    assert bytes_moved[0] == sum(p.nbytes for p in policy.model.parameters())
    assert receipt.num_tensors == len(adapters)
    asyncio.run(publish_while_sampling(policy, 3))
    asyncio.run(policy.engine.sleep_until_update())  # keeps the base weights, which no later publish brings
    policy.step()
    asyncio.run(policy.sync.publish(4))
    policy.check(4)
    find_faults(policy, monkeypatch)


async def publish_while_sampling(policy: Policy, version: int) -> None:
    """A request that runs goes on with the new adapters."""
    request = GenerationRequest(99, PROMPT, SamplingParams(max_tokens=24, ignore_eos=True))
    running = asyncio.create_task(policy.engine.generate(request))
    while not any(sample.tokens for p in policy.engine._pending.values() for sample in p.samples):
        await asyncio.sleep(0)
    policy.step()
    await policy.sync.publish(version)
    [completion] = await running
    assert completion.policy_version == (version - 1, version)
    new = own_logprobs(policy.model, completion.token_ids)
    found = torch.tensor(completion.logprobs)
    torch.testing.assert_close(found[-4:], new[-4:], atol=1e-5, rtol=0)
    assert (found[0] - new[0]).abs() > 1e-4


def find_faults(policy: Policy, monkeypatch: Any) -> None:
    """A layer that keeps its last adapters, a scale that is left out, and a layer without adapters are found."""
    from vllm.lora.layers import RowParallelLinearWithLoRA

    with monkeypatch.context() as broken:
        broken.setattr(RowParallelLinearWithLoRA, "set_lora", lambda layer, slot, a, b: None)
        policy.step()
        with pytest.raises(StaleWeightsError, match=r"o_proj computes with another .*o_proj.lora_A than version 5"):
            asyncio.run(policy.sync.publish(5))
    scales, policy.scales = policy.scales, dict.fromkeys(policy.scales, 1.0)
    with pytest.raises(StaleWeightsError, match="does not compute with version 6"):
        asyncio.run(policy.sync.publish(6))
    policy.scales = scales
    more = [(f"base_model.model.model.layers.0.mlp.odd.lora_{part}.weight", torch.ones(4, 4)) for part in "AB"]
    policy.sync.adapters = lambda with_base: [*policy.export(with_base), *more]
    with pytest.raises(
        ConfigError, match=r"Qwen3ForCausalLM takes no adapters for 1 layers .*mlp.odd; set .*merge=True"
    ):
        asyncio.run(policy.sync.publish(7))
    policy.sync.adapters = policy.export
    asyncio.run(policy.sync.publish(8))
    policy.check(8)


class Apart(Policy):
    """The same with an engine of other processes."""

    how: ClassVar[dict[str, Any]] = {}

    def build(self, config: RolloutConfig, folder: Path) -> Any:
        config = replace(config, server=ServerConfig(python=sys.executable, max_start_wait_time=900), **self.how)
        self.start = partial(RemoteEngine, config, folder, (EOS,))
        return self.start(0)

    def transfer(self) -> WeightTransfer | None:
        rank = Rank(lambda: [])
        rank.engine.export_adapters = self.export
        return WeightTransfer(TransportSettings("naive", 1 << 20, {}), InlineGroup(rank), self.engine)


class Two(Apart):
    def build(self, config: RolloutConfig, folder: Path) -> Any:
        engines = [super().build(config, folder), self.start(1)]
        return Router(engines, self.start, max_restarts=1)


class Divided(Apart):
    how: ClassVar = {"tensor_model_parallel_size": 2}


class DividedWhole(Apart):
    how: ClassVar = {**Divided.how, "engine_kwargs": EngineKwargsConfig(vllm={**LORA, "fully_sharded_loras": True})}


@pytest.fixture
def apart(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Apart]:
    skip_without_vllm()
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    apart = request.param(tmp_path / "model")
    for replica in apart.engine.replicas:
        replica.wait_until_ready()
    yield apart
    apart.engine.close()


@pytest.mark.parametrize("apart", [Two], indirect=True)
def test_the_replacement_of_a_lost_replica_gets_base_weights_and_the_newest_adapters(apart: Apart):
    for version in range(2):
        apart.step()
        receipt = asyncio.run(apart.sync.publish(version))
    adapters = receipt.num_tensors
    apart.engine.engines[1].server.process.send_signal(signal.SIGKILL)
    with pytest.raises(WorkerError):
        asyncio.run(apart.engine.engines[1].compute_logprobs([PROMPT]))
    asyncio.run(apart.engine.stats())  # finds it
    apart.engine.starting[1].wait_until_ready()
    apart.step()
    receipt = asyncio.run(apart.sync.publish(2))
    assert receipt.num_replicas == len(receipt.probes) == 2
    assert receipt.num_tensors == receipt.num_read_back == adapters + len(dict(small_model().named_parameters()))
    apart.step()
    assert asyncio.run(apart.sync.publish(3)).num_tensors == adapters
    for number in range(4):
        apart.check(number)


@pytest.mark.parametrize(("apart", "reads"), [(Divided, True), (DividedWhole, False)], indirect=["apart"])
def test_ranks_of_a_replica_hold_their_part_of_every_adapter(apart: Apart, reads: bool):
    for version in range(2):
        apart.step()
        receipt = asyncio.run(apart.sync.publish(version))
        assert receipt.num_read_back == (receipt.num_tensors if reads else 0) or version == 0
        apart.check(version)
