"""Actor, critic and reference as the driver sees them: mini-batches, micro-batches, one schedule step per update."""

import itertools
import random

import pytest
import torch

from tests.engine_cases import build_engine, random_batch, save_tiny_model, tiny_qwen3
from verl.algorithms.losses import make_actor_loss
from verl.commands.certify import formulas
from verl.config import ActorConfig, FSDPEngineConfig, RolloutConfig, RunConfig, load_config
from verl.config.actor import FORWARD_BATCHING_KEYS, LOG_PROB_BATCHING_KEYS, PPO_BATCHING_KEYS
from verl.config.algorithm import PADDED_AGG_MODES
from verl.config.load import pop_unread_keys
from verl.config.run_config import ActorRolloutRefConfig
from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching
from verl.data.trajectory import Trajectory
from verl.runtime.inline import InlineGroup
from verl.trainer.ppo.batch_metrics import entropy_metrics
from verl.utils.errors import ConfigError
from verl.workers.actor import Actor, build_actor_worker
from verl.workers.critic import Critic
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
    return Actor(config, InlineGroup(EngineWorker(engine, make_actor_loss(actor, observe_entropy=True))))


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
    unread = [key for key in pop_unread_keys(config) if key in asked]
    assert unread == [key for key in asked if key.endswith("micro_batch_size_per_gpu") == dynamic]


def test_split_sequences_reach_training_and_log_probs(folder):
    actor = build_actor(
        folder, fsdp_config=FSDPEngineConfig(ulysses_sequence_parallel_size=2), ppo_max_token_len_per_gpu=100
    )
    assert actor.train_micro == MicroBatching(max_tokens=200)
    assert actor.infer_micro == MicroBatching(max_tokens=2 * 16384)


def answers(groups: list[tuple[int, int, int]]) -> Batch:
    """(prompt, answers, tokens of an answer) of each group."""
    rows, draw = [], random.Random(1)
    for number, (prompt, count, length) in enumerate(groups):
        ids = [draw.randrange(3, 60) for _ in range(prompt)]
        for _ in range(count):
            answer = [draw.randrange(3, 60) for _ in range(length)]
            rows.append(Trajectory.from_completion(ids, answer, [0.0] * length, group_id=number))
    return Batch.pack(rows)


def test_a_groups_prompt_is_computed_once_unless_that_saves_next_to_nothing(folder):
    groups, alone, long = answers([(9, 4, 3), (5, 2, 3)]), answers([(9, 1, 3), (5, 1, 3)]), answers([(2, 2, 40)])
    actor = build_actor(folder)
    for batch, computed in ((groups, 9 + 4 * 3 + 5 + 2 * 3), (alone, None), (long, None)):
        weighted = batch.with_columns(advantages=torch.ones(batch.num_tokens) * batch["loss_mask"])
        found = actor.update(weighted, step=1)[0].values()
        assert found.get("perf/computed_tokens") == computed
        assert found.get("perf/trained_tokens") == (batch.num_tokens if computed else None)
    asked = {on: build_actor(folder, use_prefix_grouper=on) for on in (True, False, "auto")}
    passes = {on: actor.logprobs(groups) for on, actor in asked.items()}
    assert {on: actor.dispatcher.shares_prompts for on, actor in asked.items()} == {
        True: True,
        False: False,
        "auto": True,
    }
    for logprobs in passes.values():
        torch.testing.assert_close(logprobs, passes[False], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "shares"),
    [({}, True), ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, False)],
)
def test_layers_with_a_window_and_padded_models_compute_each_prompt_unless_asked(tmp_path, changes, shares):
    engine = build_engine(save_tiny_model(tmp_path, tiny_qwen3(**changes)))
    assert engine.shares_prompts is shares
    padded = build_engine(save_tiny_model(tmp_path / "padded", tiny_qwen3()), model={"use_remove_padding": False})
    assert not padded.shares_prompts


def test_a_critic_that_cannot_share_prompts_computes_each_where_the_actor_is_asked_to(tmp_path):
    config = RunConfig(actor_rollout_ref=ActorRolloutRefConfig(actor=ActorConfig(use_prefix_grouper=True)))
    folder, batch, found = save_tiny_model(tmp_path, tiny_qwen3()), answers([(9, 4, 3)]), []
    for packed in (True, False):
        engine = build_engine(folder, value_head=True, model={"use_remove_padding": packed})
        critic = Critic(config, InlineGroup(EngineWorker(engine)))
        found.append(critic.values(batch))
        assert critic.dispatcher.shares_prompts is packed
    torch.testing.assert_close(*found)


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
    _, outputs = implied.update(batch, step=0)
    given.update(batch.with_columns(old_logprobs=old), step=0)
    torch.testing.assert_close(outputs["logprobs"].double(), old.double(), rtol=1e-6, atol=1e-6)
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


def entropy_by_definition(model, batch, mode: str) -> float:
    """From all logits in float64 at temperature 0.8, aggregated over sampled tokens by `mode`; norm length 10."""
    rows = []
    for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
        with torch.no_grad():
            log_p = (model(batch["tokens"][None, start:stop]).logits[0].double() / 0.8).log_softmax(-1)
        rows.append(-(log_p.exp() * log_p).sum(-1)[:-1][batch["loss_mask"][start + 1 : stop]])
    return float(formulas.aggregated(rows, batch["group_ids"].tolist(), mode, 10.0))


@pytest.mark.parametrize("size", [16384, 12])
@pytest.mark.parametrize("mode", PADDED_AGG_MODES)
def test_the_entropy_is_that_of_the_whole_softmax_before_the_update_however_the_batch_is_split(folder, mode, size):
    batch = batch_with_advantages()
    fields = {"ppo_max_token_len_per_gpu": size, "loss_agg_mode": mode, "loss_scale_factor": 10.0}
    actor = build_actor(folder, **fields, ppo_mini_batch_size=2, ppo_epochs=2)
    actor.infer_micro = MicroBatching(max_tokens=size)
    expected = entropy_by_definition(actor.model, batch, mode)
    in_pass = entropy_metrics(batch.with_columns(**actor.logprobs_and_entropy(batch)), mode, 10.0)
    assert in_pass == {"actor/entropy": pytest.approx(expected, rel=1e-6)}

    _, outputs = build_actor(folder, **fields).update(batch, step=0)
    in_update = entropy_metrics(batch.with_columns(entropy=outputs["entropy"]), mode, 10.0)
    assert in_update == {"actor/entropy": pytest.approx(expected, rel=1e-6)}
    assert entropy_metrics(batch, mode, 10.0) == {}  # nothing is made up


def test_outputs_of_an_update_are_those_of_the_first_epoch(folder):
    batch = batch_with_advantages()
    once, twice = (build_actor(folder, ppo_epochs=epochs, shuffle=True).update(batch, step=0)[1] for epochs in (1, 2))
    torch.testing.assert_close(twice, once)


@pytest.mark.parametrize(
    ("settings", "observed"),
    [
        ([], True),
        (["algorithm.rollout_correction.bypass_mode=True", "actor_rollout_ref.actor.ppo_epochs=2"], True),
        (["actor_rollout_ref.actor.ppo_epochs=2"], False),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=2"], False),
        (["algorithm.use_kl_in_reward=True"], False),
    ],
)
def test_the_update_gives_the_entropy_where_no_other_pass_of_the_policy_does(folder, settings, observed):
    sizes = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.device=cpu"]
    config = load_config([f"actor_rollout_ref.model.path={folder}", *sizes, *settings])
    assert ("entropy" in build_actor_worker(config, 1).loss.outputs) == observed


def test_a_clipped_ratio_is_measured_at_the_sampling_temperature(folder):
    actor, batch = build_actor(folder), batch_with_advantages()
    plain = actor.group.local_worker.engine.forward(batch, ("logprobs",))["logprobs"]
    assert not torch.allclose(actor.logprobs(batch), plain, atol=1e-3)
    metrics, _ = actor.update(batch.with_columns(old_logprobs=actor.logprobs(batch)), step=0)
    assert metrics.values()["ppo_kl"] == pytest.approx(0.0, abs=1e-6)
