"""Which engines get adapters alone, and what vLLM is told of them."""

import asyncio
import json
from pathlib import Path

import pytest
from torch import Tensor

from tests.contract.test_weight_sync import ModuleEngine, Replicas, Trainer
from verl.config import ConfigError, load_config
from verl.trainer.ppo.rollout_setup import check_rollout_engine_can_train, rollout_of_run
from verl.weight_sync.copy_sync import CopySync
from verl.workers.rollout.adapters import adapter_arguments, publishes_adapters
from verl.workers.rollout.base import StaleWeightsError

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
VLLM = [f"{ROLLOUT}.name=vllm", f"{MODEL}.lora_rank=8"]


@pytest.mark.parametrize(
    ("words", "alone"),
    [
        (VLLM, True),
        ([*VLLM, f"{MODEL}.lora.merge=False"], True),
        ([*VLLM, f"{MODEL}.lora.merge=True"], False),
        ([f"{ROLLOUT}.name=vllm", f"{MODEL}.lora.merge=False"], False),  # nothing has adapters
        ([f"{ROLLOUT}.name=native", f"{MODEL}.lora_rank=8", f"{MODEL}.lora.merge=False"], False),  # samples in place
        ([f"{ROLLOUT}.name=sglang", f"{MODEL}.lora_rank=8"], False),
    ],
)
def test_adapters_go_alone_to_an_engine_that_takes_them_unless_they_are_merged(words: list[str], alone: bool):
    config = load_config(words)
    assert publishes_adapters(config.actor_rollout_ref) is alone
    assert ("enable_lora" in rollout_of_run(config).engine_kwargs.vllm) is alone


def test_an_engine_that_takes_whole_weights_refuses_adapters_alone():
    config = load_config([f"{ROLLOUT}.name=sglang", f"{MODEL}.lora_rank=8", f"{MODEL}.lora.merge=False"])
    with pytest.raises(ConfigError, match=r"lora.merge=False .*sglang takes whole weights only; set .*merge=True"):
        publishes_adapters(config.actor_rollout_ref)


@pytest.mark.parametrize(("rank", "most"), [(1, 1), (2, 8), (8, 8), (33, 64), (257, 320), (512, 512)])
def test_vllm_is_told_the_next_rank_that_it_is_made_for(rank: int, most: int):
    words = [f"{ROLLOUT}.name=vllm", f"{MODEL}.lora_rank={rank}", f"{MODEL}.lora.fully_sharded_loras=True"]
    told = adapter_arguments(load_config(words).actor_rollout_ref)
    assert told == {"enable_lora": True, "max_loras": 1, "max_lora_rank": most, "fully_sharded_loras": True}


def test_the_rank_of_a_folder_counts_and_own_engine_kwargs_go_first(tmp_path: Path):
    pytest.importorskip("peft")
    settings = {"peft_type": "LORA", "r": 4, "rank_pattern": {"q_proj": 30}, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "adapter_model.safetensors").touch()
    words = [f"{ROLLOUT}.name=vllm", f"{MODEL}.lora_adapter_path={tmp_path}"]
    assert adapter_arguments(load_config(words).actor_rollout_ref)["max_lora_rank"] == 32
    own = rollout_of_run(load_config([*words, f"+{ROLLOUT}.engine_kwargs.vllm.max_lora_rank=64"]))
    assert own.engine_kwargs.vllm["max_lora_rank"] == 64


def test_a_rank_beyond_vllm_is_refused_before_the_start():
    words = [f"{ROLLOUT}.name=vllm", f"{MODEL}.lora_rank=513"]
    with pytest.raises(ConfigError, match=r"rank 512 at most, and these have rank 513; set .*merge=True"):
        check_rollout_engine_can_train(load_config(words).actor_rollout_ref)
    check_rollout_engine_can_train(load_config([*words, f"{MODEL}.lora.merge=True"]).actor_rollout_ref)


def test_base_weights_go_once_to_each_replica_and_adapters_alone_after_them():
    trainer, sent = Trainer(tied=False), []
    engines = [ModuleEngine(trainer.model) for _ in range(2)]
    replicas = Replicas(list(engines))

    def adapters(with_base: bool) -> list[tuple[str, Tensor]]:
        sent.append(with_base)
        named = list(trainer.model.named_parameters())
        return named if with_base else named[-3:]

    sync = CopySync(lambda: [], replicas, adapters=adapters)
    for version in range(3):
        receipt = asyncio.run(sync.publish(version))
    assert sent == [True, False, False] and receipt.num_tensors == 3
    replicas.engines = [engines[0], ModuleEngine(trainer.model)]  # another took the place of the second
    asyncio.run(sync.publish(3))
    asyncio.run(sync.publish(4))
    assert sent[3:] == [True, False]
    replicas.engines = [engines[0], ModuleEngine(trainer.model)]
    engines[0].loses = lambda name: "layers.0" in name
    with pytest.raises(StaleWeightsError, match="replica 0 did not receive"):
        asyncio.run(sync.publish(5))
    engines[0].loses = lambda name: False
    replicas.engines = [engines[0]]  # its weights are those of a publish that failed
    asyncio.run(sync.publish(5))
    assert sent[5:] == [True, True]
