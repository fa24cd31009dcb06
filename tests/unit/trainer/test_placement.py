"""Which ranks hold which roles, and the placements that are refused."""

from types import SimpleNamespace

import pytest

from verl.config import ConfigError, load_config
from verl.runtime.pools import Pool
from verl.trainer.ppo import placement
from verl.trainer.ppo.placement import place_roles

PPO = ["data.train_batch_size=8", "actor_rollout_ref.rollout.n=1"]
ON_CPU = [*PPO, "trainer.device=cpu"]


def place(*words: str) -> tuple[Pool, ...]:
    return place_roles(load_config(words))


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as raised:
        place(*words)
    return str(raised.value)


def on_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    platform = SimpleNamespace(device_name="cuda", device_count=lambda: count)
    monkeypatch.setattr(placement, "get_platform", lambda: platform)


def test_one_pool_holds_every_role_unless_the_critic_has_ranks_of_its_own():
    assert place(*ON_CPU) == (Pool("actor", ("actor", "rollout", "critic")),)
    grpo = [*ON_CPU, "algorithm.adv_estimator=grpo", "critic.n_gpus_per_node=2"]
    assert place(*grpo) == (Pool("actor", ("actor", "rollout")),)
    assert place(
        *ON_CPU, "algorithm.use_kl_in_reward=True", "critic.n_gpus_per_node=4", "trainer.n_gpus_per_node=2"
    ) == (
        Pool("actor", ("actor", "reference", "rollout"), 2),
        Pool("critic", ("critic",), 4, first_device=2),
    )


def test_a_reference_may_have_ranks_of_its_own_beside_those_of_the_critic():
    own = ["actor_rollout_ref.ref.n_gpus_per_node=2", "trainer.n_gpus_per_node=4"]
    assert place(*ON_CPU, *own) == (Pool("actor", ("actor", "rollout", "critic"), 4),)  # nothing needs a reference
    shared = place(*ON_CPU, *own, "algorithm.use_kl_in_reward=True")
    assert shared == (
        Pool("actor", ("actor", "rollout", "critic"), 4),
        Pool("reference", ("reference",), 2, first_device=4),
    )
    apart = place(*ON_CPU, *own, "algorithm.use_kl_in_reward=True", "critic.n_gpus_per_node=1")
    assert [(pool.name, pool.num_ranks, pool.first_device) for pool in apart] == [
        ("actor", 4, 0),
        ("reference", 2, 4),
        ("critic", 1, 6),
    ]
    assert apart[0].roles == ("actor", "rollout")


def test_the_actor_takes_the_devices_that_the_critic_leaves(monkeypatch: pytest.MonkeyPatch):
    on_gpus(monkeypatch, 8)
    assert [pool.num_ranks for pool in place(*PPO)] == [8]
    assert [pool.num_ranks for pool in place(*PPO, "critic.n_gpus_per_node=4")] == [4, 4]
    assert place(*PPO, "critic.n_gpus_per_node=4")[1].first_device == 4
    fewer = place(*PPO, "critic.n_gpus_per_node=2", "trainer.n_gpus_per_node=1")
    assert [(pool.num_ranks, pool.first_device) for pool in fewer] == [(1, 0), (2, 1)]


def test_a_reference_of_its_own_counts_among_the_devices(monkeypatch: pytest.MonkeyPatch):
    on_gpus(monkeypatch, 8)
    both = [*PPO, "algorithm.use_kl_in_reward=True", "critic.n_gpus_per_node=1"]
    assert [p.num_ranks for p in place(*both, "actor_rollout_ref.ref.n_gpus_per_node=3")] == [4, 3, 1]
    found = refusal(*both, "actor_rollout_ref.ref.n_gpus_per_node=7")
    assert "actor_rollout_ref.ref.n_gpus_per_node=7 and critic.n_gpus_per_node=1, but 8 cuda devices" in found
    assert "leave out actor_rollout_ref.ref.n_gpus_per_node or critic.n_gpus_per_node" in found


def test_placements_with_too_few_devices_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch):
    on_gpus(monkeypatch, 4)
    assert "critic.n_gpus_per_node=4, but 4 cuda devices are visible; lower" in refusal(
        *PPO, "critic.n_gpus_per_node=4"
    )
    both = refusal(*PPO, "critic.n_gpus_per_node=1", "trainer.n_gpus_per_node=4")
    assert "trainer.n_gpus_per_node=4 and critic.n_gpus_per_node=1, but 4 cuda devices" in both
    assert "leave out critic.n_gpus_per_node" in both
    alone = refusal(*PPO, "trainer.n_gpus_per_node=8")
    assert alone == "trainer.n_gpus_per_node=8, but 4 cuda devices are visible; lower it to at most 4"


def test_a_critic_beside_a_single_process_is_refused():
    found = refusal(*ON_CPU, "trainer.runtime=inline", "critic.n_gpus_per_node=1")
    assert found.startswith("trainer.runtime=inline is one process, but critic.n_gpus_per_node=1; use trainer.runtime=")


def test_the_critics_ranks_share_its_sequences():
    found = refusal(*ON_CPU, "critic.n_gpus_per_node=3")
    assert "data.train_batch_size=8" in found and "3 data-parallel ranks of the critic" in found
    found = refusal(*ON_CPU, "critic.n_gpus_per_node=4", "critic.ppo_mini_batch_size=2")
    assert "critic.ppo_mini_batch_size=2" in found and "set critic.ppo_mini_batch_size=4, or a multiple of 4" in found
    place(
        *ON_CPU,
        "critic.n_gpus_per_node=4",
        "critic.ppo_mini_batch_size=2",
        "critic.fsdp.ulysses_sequence_parallel_size=2",
    )


def test_a_total_of_the_reference_is_divided_by_its_own_ranks():
    words = [*ON_CPU, "actor_rollout_ref.ref.log_prob_micro_batch_size=8", "trainer.n_gpus_per_node=2"]
    with pytest.warns(match="old spelling"):
        config = load_config([*words, "actor_rollout_ref.ref.n_gpus_per_node=4"])
    assert config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu == 2


def test_a_total_of_the_critic_is_divided_by_its_own_ranks():
    words = [*ON_CPU, "critic.ppo_micro_batch_size=8", "actor_rollout_ref.actor.ppo_micro_batch_size=8"]
    with pytest.warns(match="old spelling"):
        config = load_config([*words, "trainer.n_gpus_per_node=2", "critic.n_gpus_per_node=4"])
    assert config.critic.ppo_micro_batch_size_per_gpu == 2
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4
