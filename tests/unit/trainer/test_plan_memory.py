"""Bytes of every role on a device, against sums written by hand."""

import pytest

from verl.config import ConfigError, load_config
from verl.models.parameter_counts import ParameterCounts
from verl.placement.memory import PoolMemory, estimate_memory
from verl.placement.plan import Machine, plan_placement
from verl.placement.tables import memory_table

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR, CRITIC = "actor_rollout_ref.actor.fsdp_config", "critic.fsdp"
GRPO = ["algorithm.adv_estimator=grpo", "data.train_batch_size=64", f"{ROLLOUT}.n=1"]
VLLM = [*GRPO, f"{ROLLOUT}.name=vllm", "trainer.n_gpus_per_node=8"]
N, GB = 8_000_000_000, 1e9
COUNTS = ParameterCounts(N, 0, N)


def memory(
    *words: str, kind: str = "cuda", count: int = 8, device: float | None = 80, counts: ParameterCounts = COUNTS
) -> list[PoolMemory]:
    config = load_config(words)
    plan = plan_placement(config, Machine(kind, count))
    roles = {role: counts for pool in plan.pools for role in pool.roles}
    return estimate_memory(config, plan, roles, None if device is None else int(device * GB))


def held(pool: PoolMemory) -> dict[str, dict[str, float]]:
    """{role and what: {phase: GB}}, without phases that hold nothing."""
    return {
        f"{h.role} {h.what}": {p: size / GB for p, size in zip(pool.phases, h.sizes, strict=True) if size}
        for h in pool.holdings
    }


def everywhere(pool: PoolMemory, size: float) -> dict[str, float]:
    return dict.fromkeys(pool.phases, size)


def test_a_sharded_trainer_and_its_replicas_that_sleep():
    [pool] = memory(*VLLM, f"{ROLLOUT}.tensor_model_parallel_size=2")
    assert pool.phases == ("collect", "log-probs", "update actor", "publish")
    awake = {"collect", "publish"}
    assert held(pool) == {
        "actor parameters": everywhere(pool, 4.0),  # 8e9 x 4 bytes / 8
        "actor gradients": {"update actor": 4.0 + 32.0},  # the shard, and the sum between micro-batches
        "actor optimiser state": everywhere(pool, 8.0),
        "rollout weights": dict.fromkeys(awake, 8.0),  # 8e9 x 2 bytes / 2
        "rollout KV cache": dict.fromkeys(awake, 32.0),  # half of 80 less the weights
    }
    assert pool.sums == (52e9, 12e9, 48e9, 52e9) and pool.peak == (52e9, "collect") and pool.rollout_share == 0


def test_one_device_holds_the_copy_that_computes_and_samples_from_it():
    [pool] = memory(*GRPO, count=1, device=200)
    found = held(pool)
    assert found["actor parameters"] == everywhere(pool, 32.0 + 16.0)
    assert found["actor gradients"] == {"update actor": 32.0} and found["actor optimiser state"]["collect"] == 64.0
    assert "rollout weights" not in found and "rollout KV cache" not in found  # the trainer has its half already


def test_offloading_lowers_what_is_held_while_a_role_is_idle():
    ppo = ["data.train_batch_size=64", f"{ROLLOUT}.n=1", f"{ROLLOUT}.name=vllm", "trainer.n_gpus_per_node=8"]
    options = [f"{part}.{name}=True" for part in (ACTOR, CRITIC) for name in ("param_offload", "optimizer_offload")]
    [pool] = memory(*ppo, *options)
    found = held(pool)
    assert found["actor parameters"] == dict.fromkeys(("log-probs", "update actor", "publish"), 4.0)
    assert found["critic parameters"] == dict.fromkeys(("values", "update critic"), 4.0)
    assert found["actor optimiser state"] == {"update actor": 8.0}
    assert found["critic optimiser state"] == {"update critic": 8.0}
    assert dict(zip(pool.phases, pool.sums, strict=True))["collect"] == 40e9  # of the rollout alone
    [policy] = memory(*VLLM, f"{ACTOR}.offload_policy=True")
    assert {key: sizes for key, sizes in held(policy).items() if key.startswith("actor")} == {
        "actor gradients": {"update actor": 32.0}
    }


def test_types_shards_and_optimisers_count():
    [pool] = memory(
        *VLLM, f"{ACTOR}.model_dtype=bf16", f"{ACTOR}.fsdp_size=2", "actor_rollout_ref.actor.optim.optimizer=SGD"
    )
    assert held(pool)["actor parameters"] == everywhere(pool, 8.0)  # 8e9 x 2 bytes / 2
    assert held(pool)["actor gradients"] == {"update actor": 8.0 + 32.0}  # summed in float32
    narrow = f"{ACTOR}.mixed_precision={{reduce_dtype: bf16}}"
    [bf16] = memory(*VLLM, f"{ACTOR}.model_dtype=bf16", f"{ACTOR}.fsdp_size=2", narrow)
    assert held(bf16)["actor gradients"] == {"update actor": 8.0 + 16.0}
    assert "actor optimiser state" not in held(pool)
    [zero2] = memory(*VLLM, f"{ACTOR}.reshard_after_forward=False")
    assert held(zero2)["actor gathered layers"] == {"log-probs": 16.0, "update actor": 16.0}


def test_a_frozen_reference_is_stored_as_it_computes_and_adapters_need_none():
    kl = "algorithm.use_kl_in_reward=True"
    [pool] = memory(*VLLM, kl)
    assert held(pool)["reference parameters"] == everywhere(pool, 2.0) and "reference" in pool.phases
    [offloaded] = memory(*VLLM, kl, "actor_rollout_ref.ref.fsdp_config.param_offload=True")
    assert held(offloaded)["reference parameters"] == {"reference": 2.0}
    adapted = ParameterCounts(N, 0, 80_000_000)
    [lora] = memory(*VLLM, kl, "actor_rollout_ref.model.lora_rank=8", counts=adapted)
    found = held(lora)
    assert "reference parameters" not in found and "reference" in lora.phases
    assert found["actor gradients"] == {"update actor": pytest.approx(0.04 + 0.32)}
    assert found["actor optimiser state"] == everywhere(lora, pytest.approx(0.08))


@pytest.mark.parametrize(
    ("words", "weights", "in_host"),
    [
        ([], 16.16, 16.16),
        (["actor_rollout_ref.model.lora.merge=True"], 16.0, 0.0),
        ([f"{ROLLOUT}.free_cache_engine=False"], 16.16, 0.0),
        ([f"{ROLLOUT}.name=sglang"], 16.0, 0.0),
    ],
)
def test_weights_to_which_adapters_are_published_sleep_in_host_memory(words, weights, in_host):
    adapted = ParameterCounts(N, 0, 80_000_000)
    [pool] = memory(*VLLM, "actor_rollout_ref.model.lora_rank=8", *words, counts=adapted)
    assert held(pool)["rollout weights"]["collect"] == pytest.approx(weights)
    assert pool.in_host == pytest.approx(in_host * GB)
    text = memory_table(plan_placement(load_config(VLLM), Machine("cuda", 8)), pool)
    assert ("in host memory: 16.16 GB for each device" in text) == bool(in_host)


def test_experts_are_divided_over_all_devices_of_a_replica():
    sizes = [f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.data_parallel_size=4"]
    experts = ParameterCounts(N, 6_000_000_000, N)
    [whole] = memory(*VLLM, *sizes, counts=experts)
    assert held(whole)["rollout weights"]["collect"] == 8.0
    [spread] = memory(*VLLM, *sizes, f"{ROLLOUT}.expert_parallel_size=8", counts=experts)
    assert held(spread)["rollout weights"]["collect"] == 2e9 * 2 / 2 / GB + 6e9 * 2 / 8 / GB


@pytest.mark.parametrize(
    ("words", "weights", "cache"),
    [
        ([], 0.0, 0.0),
        ([f"{ROLLOUT}.free_cache_engine=False"], 16.0, 24.0),
        ([f"{ROLLOUT}.enable_sleep_mode=False"], 16.0, 24.0),
        ([f"{ROLLOUT}.name=sglang"], 16.0, 0.0),
        (["actor_rollout_ref.hybrid_engine=False", f"{ROLLOUT}.n_gpus_per_node=8"], 16.0, 24.0),
    ],
)
def test_what_a_rollout_holds_while_the_trainer_works(words: list[str], weights: float, cache: float):
    pool = memory(*VLLM, *words, count=16)[-1]
    found = held(pool)
    assert found["rollout weights"].get("update actor", 0.0) == weights
    assert found["rollout KV cache"].get("update actor", 0.0) == cache and found["rollout KV cache"]["collect"] == 24.0


def test_the_native_engine_gathers_a_copy_on_every_rank_and_its_share_counts_what_is_there():
    [pool] = memory(*GRPO, "trainer.n_gpus_per_node=8")
    found = held(pool)
    assert found["rollout weights"] == {"collect": 16.0, "publish": 16.0}
    assert found["rollout KV cache"]["collect"] == 40 - 16 - 12  # the trainer's 12 are within the half


def test_weights_that_fill_the_rollouts_share_of_a_device_are_refused():
    big = ParameterCounts(32_500_000_000, 0, 1)
    with pytest.raises(ConfigError) as raised:
        memory(*VLLM, counts=big)
    assert str(raised.value) == (
        f"{ROLLOUT}: the weights take 65.0 GB of a device, and gpu_memory_utilization=0.5 of its 80.0 GB is 40.0 GB; "
        f"raise {ROLLOUT}.gpu_memory_utilization to 0.82 or more, or raise {ROLLOUT}.tensor_model_parallel_size to 2 "
        "or more"
    )
    [more] = memory(*VLLM, f"{ROLLOUT}.gpu_memory_utilization=0.82", counts=big)
    assert held(more)["rollout KV cache"]["collect"] == pytest.approx(0.6)
    [two] = memory(*VLLM, f"{ROLLOUT}.tensor_model_parallel_size=2", counts=big)
    assert held(two)["rollout KV cache"]["collect"] == 7.5
    served = ["reward.reward_model.enable=True", "reward.reward_model.model_path=m"]
    served.append("reward.reward_model.rollout.name=vllm")
    with pytest.raises(ConfigError, match=r"^reward\.reward_model\.rollout: the weights take 65\.0 GB"):
        memory(*VLLM, f"{ROLLOUT}.tensor_model_parallel_size=2", *served, counts=big)
    with pytest.raises(ConfigError) as native:
        memory(*GRPO, "trainer.n_gpus_per_node=8", counts=big)
    assert str(native.value).endswith(f"40.0 GB; raise {ROLLOUT}.gpu_memory_utilization to 0.82 or more")
    assert memory(*VLLM, counts=big, device=None)[0].rollout_share == 0.5  # nobody knows


def test_a_cache_without_a_known_device_has_a_share_or_the_given_size():
    [pool] = memory(*VLLM, device=None)
    assert pool.rollout_share == 0.5 and "rollout KV cache" not in held(pool)
    [given] = memory(*VLLM, f"{ROLLOUT}.kv_cache_bytes=3000000000", device=None)
    assert given.rollout_share == 0 and held(given)["rollout KV cache"]["collect"] == 3.0
    [cpu] = memory(*GRPO, "trainer.device=cpu", kind="cpu", count=1, device=None)
    assert held(cpu)["rollout KV cache"]["collect"] == (1 << 30) / GB


def test_a_reward_model_on_the_actors_devices_is_awake_in_turn():
    served = ["reward.reward_model.enable=True", "reward.reward_model.model_path=m"]
    served.append("reward.reward_model.rollout.name=vllm")
    [pool] = memory(*VLLM, *served, "reward.reward_model.rollout.tensor_model_parallel_size=4")
    assert pool.phases[:2] == ("collect", "reward")
    assert held(pool)["reward_model weights"] == {"reward": 4.0}
    assert held(pool)["reward_model KV cache"] == {"reward": 36.0}
    own = ["reward.reward_model.enable_resource_pool=True", "reward.reward_model.nnodes=1"]
    apart = memory(*VLLM, *served, *own, "reward.reward_model.n_gpus_per_node=8")[1]
    assert held(apart)["reward_model weights"] == everywhere(apart, 16.0) and "reward" not in apart.phases


def test_a_reward_model_on_the_ranks_is_sharded_and_may_be_offloaded():
    model = ["reward.reward_model.enable=True", "reward.reward_model.model_path=m"]
    [pool] = memory(*VLLM, *model)
    assert held(pool)["reward_model parameters"] == everywhere(pool, 2.0)
    assert "reward_model KV cache" not in held(pool) and pool.phases[:2] == ("collect", "reward")
    [pool] = memory(*VLLM, *model, "reward.reward_model.fsdp_config.param_offload=True")
    assert held(pool)["reward_model parameters"] == {"reward": 2.0}


def test_the_table_of_a_pool():
    config = load_config(VLLM)
    plan = plan_placement(config, Machine("cuda", 8))
    [pool] = estimate_memory(config, plan, dict.fromkeys(("actor", "rollout"), COUNTS))
    assert memory_table(plan, pool).splitlines() == [
        "GB on a device of actor  collect  log-probs  update actor  publish",
        "actor: parameters           4.00       4.00          4.00     4.00",
        "actor: gradients               -          -         36.00        -",
        "actor: optimiser state      8.00       8.00          8.00     8.00",
        "rollout: weights           16.00          -             -    16.00",
        "sum                        28.00      12.00         48.00    28.00",
        "Awake, the rollout fills 50% of a device with weights and KV cache; --device-memory GB shows it.",
    ]


def test_the_published_weights_are_kept_in_host_memory_where_the_trainer_scores_by_them():
    how = [*VLLM, "trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.hybrid_engine=False"]
    how += ["trainer.n_gpus_per_node=4", f"{ROLLOUT}.n_gpus_per_node=4"]
    trainer, rollout = memory(*how)
    assert trainer.kept_in_host == 8e9 and rollout.kept_in_host == 0  # 8e9 x 4 bytes / 4
    plan = plan_placement(load_config(how), Machine("cuda", 8))
    assert "published weights, beside those that it trains, in host memory: 8.00 GB" in memory_table(plan, trainer)
    bypassed, _ = memory(*how, "algorithm.rollout_correction.bypass_mode=True")
    assert bypassed.kept_in_host == 0 and "published" not in memory_table(plan, bypassed)
