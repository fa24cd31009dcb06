"""Actor, critic and reference as the driver sees them: mini-batches, micro-batches, one schedule step per update."""

import pytest
import torch

from tests.engine_cases import build_engine, random_batch, save_tiny_model
from verl.algorithms.losses import make_actor_loss
from verl.config import ActorConfig, FSDPEngineConfig, RolloutConfig, RunConfig, load_config
from verl.config.actor import FORWARD_BATCHING_KEYS, LOG_PROB_BATCHING_KEYS, PPO_BATCHING_KEYS
from verl.config.load import unread_keys
from verl.config.run_config import ActorRolloutRefConfig
from verl.data.micro_batches import MicroBatching
from verl.runtime.inline import InlineGroup
from verl.utils.errors import ConfigError
from verl.workers.actor import Actor
from verl.workers.engine_worker import EngineWorker, MiniBatches, micro_batching


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def batch_with_advantages():
    batch = random_batch()  # three groups of two
    mask = batch["loss_mask"]
    return batch.with_columns(advantages=torch.linspace(-1, 1, batch.num_tokens) * mask)


def build_actor(folder, **actor) -> Actor:
    actor = ActorConfig(**{"use_dynamic_bsz": True, "ppo_mini_batch_size": 256, **actor})
    rollout = RolloutConfig(temperature=0.8, log_prob_use_dynamic_bsz=True)
    config = RunConfig(actor_rollout_ref=ActorRolloutRefConfig(actor=actor, rollout=rollout))
    engine = build_engine(folder, optim={"lr_warmup_steps": 10, "zero_indexed_step": False})
    return Actor(config, InlineGroup(EngineWorker(engine, make_actor_loss(actor))))


def weights(actor: Actor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.group.local_worker.engine.export_weights()}


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_epoch_sees_every_group_once_and_whole(shuffle):
    batch = random_batch()
    seen = [mini["group_ids"].tolist() for _, mini in MiniBatches(2, 2, shuffle, seed=1).split(batch, step=3)]
    for epoch in (seen[:2], seen[2:]):
        assert sorted(group for mini in epoch for group in mini) == [0, 0, 1, 1, 2, 2]
        assert [len(mini) for mini in epoch] == [4, 2]
    if not shuffle:
        assert seen == [[0, 0, 1, 1], [2, 2]] * 2


def test_the_shuffle_follows_from_seed_step_and_epoch():
    batch = random_batch(shapes=[(2, 2)] * 20)

    def order(seed: int, step: int) -> list[int]:
        return torch.cat([rows for rows, _ in MiniBatches(2, 2, True, seed).split(batch, step)]).tolist()

    assert order(1, 5) == order(1, 5)
    assert order(1, 5) != order(1, 6) and order(1, 5) != order(2, 5)
    assert order(1, 5)[:20] != order(1, 5)[20:]


def test_micro_batches_are_tokens_unless_a_number_of_sequences_is_set():
    sizes = {"ppo_max_token_len_per_gpu": 100, "ppo_micro_batch_size_per_gpu": 4}
    assert micro_batching(ActorConfig(**sizes, use_dynamic_bsz=True), PPO_BATCHING_KEYS) == MicroBatching(
        max_tokens=100
    )
    assert micro_batching(ActorConfig(**sizes, use_dynamic_bsz=True), PPO_BATCHING_KEYS, 2) == MicroBatching(
        max_tokens=200
    )
    assert micro_batching(ActorConfig(**sizes), PPO_BATCHING_KEYS, 2) == MicroBatching(max_sequences=4)
    assert micro_batching(ActorConfig(ppo_max_token_len_per_gpu=100), PPO_BATCHING_KEYS) == MicroBatching(
        max_tokens=100
    )
    with pytest.raises(ConfigError, match="max_sequences=0 is impossible"):
        micro_batching(ActorConfig(ppo_micro_batch_size_per_gpu=0), PPO_BATCHING_KEYS)


@pytest.mark.parametrize("dynamic", [True, False])
def test_the_limit_of_a_micro_batch_that_does_not_decide_counts_as_unread(dynamic):
    roles = {
        "actor_rollout_ref.actor": PPO_BATCHING_KEYS,
        "actor_rollout_ref.rollout": LOG_PROB_BATCHING_KEYS,
        "critic": FORWARD_BATCHING_KEYS,
    }
    asked = [f"{role}.{key}" for role, keys in roles.items() for key in keys[1:]]
    flag = f"actor_rollout_ref.actor.use_dynamic_bsz={dynamic}"
    config = load_config([flag, "critic.ppo_micro_batch_size_per_gpu=1", *[f"{key}=2000" for key in asked]])
    arr = config.actor_rollout_ref
    for section, keys in zip((arr.actor, arr.rollout, config.critic), roles.values(), strict=True):
        micro_batching(section, keys)
    unread = [key for key in unread_keys(config) if key in asked]
    assert unread == [key for key in asked if key.endswith("micro_batch_size_per_gpu") == dynamic]


def test_shared_prompts_and_sequences_reach_training_and_log_probs(folder):
    shared = FSDPEngineConfig(ulysses_sequence_parallel_size=2)
    actor = build_actor(folder, use_prefix_grouper=True, fsdp_config=shared, ppo_max_token_len_per_gpu=100)
    assert actor.train_micro == MicroBatching(max_tokens=200, share_prefixes=True)
    assert actor.infer_micro == MicroBatching(max_tokens=2 * 16384, share_prefixes=True)
    assert build_actor(folder).train_micro == MicroBatching(max_tokens=16384)


def test_an_update_takes_every_optimiser_step_and_one_schedule_step(folder):
    actor = build_actor(folder, ppo_mini_batch_size=1, ppo_epochs=2)
    batch = batch_with_advantages()
    batch = batch.with_columns(old_logprobs=actor.logprobs(batch))
    metrics, _ = actor.update(batch, step=0)
    engine = actor.group.local_worker.engine
    steps = {int(state["step"]) for state in engine.optimizer.state.values()}
    assert steps == {6} and engine.lr_scheduler.steps_done == 1
    assert metrics.values()["lr"] == pytest.approx(1e-2 / 10)
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(2e-2 / 10)


def test_without_old_log_probs_the_update_is_that_of_the_policy_itself(folder):
    batch = batch_with_advantages()
    implied, given = build_actor(folder), build_actor(folder)
    old = given.logprobs(batch)
    _, logprobs = implied.update(batch, step=0)
    given.update(batch.with_columns(old_logprobs=old), step=0)
    torch.testing.assert_close(logprobs.double(), old.double(), rtol=1e-6, atol=1e-6)
    for name, tensor in weights(given).items():
        torch.testing.assert_close(weights(implied)[name], tensor, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "size", [{"ppo_max_token_len_per_gpu": 12}, {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 1}]
)
def test_micro_batch_keys_do_not_change_the_update(folder, size):
    batch = batch_with_advantages()
    whole, parts = build_actor(folder), build_actor(folder, **size)
    old = whole.logprobs(batch)
    for actor in (whole, parts):
        actor.update(batch.with_columns(old_logprobs=old), step=0)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], tensor, rtol=1e-6, atol=1e-9)


def test_a_clipped_ratio_is_measured_at_the_sampling_temperature(folder):
    actor, batch = build_actor(folder), batch_with_advantages()
    plain = actor.group.local_worker.engine.forward(batch, ("logprobs",))["logprobs"]
    assert not torch.allclose(actor.logprobs(batch), plain, atol=1e-3)
    metrics, _ = actor.update(batch.with_columns(old_logprobs=actor.logprobs(batch)), step=0)
    assert metrics.values()["ppo_kl"] == pytest.approx(0.0, abs=1e-6)
