"""Estimators and losses that ask the trainer for more, in a real run: what they ask for is there, and nothing else."""

import math
from pathlib import Path

import pytest
import torch

from tests.e2e import jobs
from tests.e2e.jobs import ARR
from verl.algorithms.losses import with_chosen_tokens
from verl.config import ActorConfig, PolicyLossConfig, load_config
from verl.data.batch import Batch
from verl.data.columns import COLUMNS
from verl.data.random_streams import token_draws
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.trainer import PPOTrainer
from verl.utils.errors import ConfigError, RewardError
from verl.workers.batch_dispatch import ShardDispatcher

LOSS = f"{ARR}.actor.policy_loss"
SHORT = ("trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.val_before_train=False")
ASKED = {name for name, column in COLUMNS.items() if column.asked}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("algorithms")
    jobs.prepare(out)
    (out / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    digits = sum(c.isdigit() for c in solution_str) / 8\n"
        "    return {'score': digits, 'format': float(len(solution_str) > 3)}\n"
    )
    return out


@pytest.fixture
def run(folder, monkeypatch, tmp_path):
    """Trains two steps; returns the steps' batches, the mini-batches, and the metrics by step."""
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(folder / "metrics"))

    def train(name: str, *overrides: str) -> tuple[list[Batch], list[Batch], dict]:
        steps: list[Batch] = []
        minis: list[Batch] = []
        step, update = PPOTrainer.step, ShardDispatcher.update

        def watched_step(self, timer):
            record = step(self, timer)
            steps.append(record.batch)
            return record

        def watched_update(self, batch, *args):
            minis.append(batch)
            return update(self, batch, *args)

        monkeypatch.setattr(PPOTrainer, "step", watched_step)
        monkeypatch.setattr(ShardDispatcher, "update", watched_update)
        jobs.train(folder, name, *SHORT, *overrides)
        metrics = jobs.metrics(folder, name)
        assert all(math.isfinite(row["actor/pg_loss"]) for number, row in metrics.items() if number)
        return steps, minis, metrics

    return train


def asked_in(batch: Batch) -> set[str]:
    present = {*batch.token_columns, *batch.sequence_columns}
    return {n for n in present if n in ASKED or n.startswith("reward_parts.")}


def test_what_nobody_asks_for_is_not_computed(run):
    steps, minis, metrics = run("plain", f"{LOSS}.loss_mode=gspo")
    assert not any(asked_in(batch) for batch in (*steps, *minis))
    assert all("timing_s/old_log_prob" not in row for row in metrics.values())


def test_the_token_baselines_get_the_sum_of_squared_probabilities(run):
    steps, _, _ = run("otb", "algorithm.adv_estimator=optimal_token_baseline", f"{LOSS}.loss_mode=dppo_tv")
    for batch in steps:
        squares, mask = batch["sum_pi_squared"], batch["loss_mask"]
        p = batch["old_logprobs"].exp()[mask]
        assert asked_in(batch) == {"sum_pi_squared"}
        assert (squares[~mask] == 0).all() and (squares[mask] <= 1 + 1e-6).all()
        assert (squares[mask] >= p**2 - 1e-6).all() and batch["advantages"].abs().max() > 0


def test_the_key_asks_for_it_too(run):
    steps, _, _ = run("forced", f"{ARR}.actor.calculate_sum_pi_squared=True")
    assert asked_in(steps[0]) == {"sum_pi_squared"}


def test_remax_compares_with_the_reward_of_a_greedy_answer(run, folder):
    steps, _, _ = run("remax", "algorithm.adv_estimator=remax", f"{LOSS}.loss_mode=cispo")
    for batch in steps:
        baselines, groups = batch["reward_baselines"], batch["group_ids"]
        assert asked_in(batch) == {"reward_baselines"} and batch.num_sequences == 16
        for group in groups.unique():
            assert len(baselines[groups == group].unique()) == 1
        expected = (batch["rewards"] - baselines)[batch.sequence_ids()] * batch["loss_mask"]
        torch.testing.assert_close(batch["advantages"], expected, rtol=1e-5, atol=1e-6)


def test_gdpo_gets_the_parts_of_the_reward(run):
    keys = "algorithm.gdpo_reward_keys=[format,score]"
    steps, _, _ = run("gdpo", "algorithm.adv_estimator=gdpo", keys, "algorithm.gdpo_reward_weights=[1,0.5]")
    assert asked_in(steps[0]) == {"reward_parts.format", "reward_parts.score"}
    parts = (steps[0]["reward_parts." + name] for name in ("format", "score"))
    torch.testing.assert_close(next(parts) + 0.5 * next(parts), steps[0]["rewards"])
    assert set(steps[0]["reward_parts.format"].tolist()) <= {0.0, 1.0}


def test_a_part_that_the_reward_does_not_return_is_named(run):
    with pytest.raises(
        RewardError, match=r"no 'style', which reward.weights.style weighs \(it has 'score', 'format'\)"
    ):
        run("missing", "algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[style]")


def test_tokens_are_chosen_over_whole_mini_batches_by_the_policy_at_their_beginning(run):
    overrides = (f"{LOSS}.loss_mode=kl-cov", f"{LOSS}.kl_cov_ratio=0.1", f"{ARR}.actor.ppo_mini_batch_size=2")
    _, minis, metrics = run("kl_cov", *overrides)
    assert len(minis) == 4
    for number, mini in enumerate(minis):
        sampled = int(mini["loss_mask"].sum())
        assert int(mini["chosen_tokens"].sum()) == max(int(0.1 * sampled), 1)
        moved = (mini["current_logprobs"] - mini["old_logprobs"]).abs().max() > 1e-4
        assert moved == (number % 2 == 1)  # the second mini-batch of a step sees the weights of the first update
    assert 0 < metrics[1]["actor/chosen_tokens"] < 0.2


def test_random_tokens_are_drawn_anew_in_every_step_by_seed_sequence_and_position(run):
    keys = (f"{LOSS}.clip_cov_ratio=0.3", f"{LOSS}.clip_cov_lb=-100", f"{LOSS}.clip_cov_ub=100")
    steps, minis, _ = run("clip_cov", f"{LOSS}.loss_mode=clip-cov", *keys, f"{ARR}.actor.data_loader_seed=5")
    losses = PolicyLossConfig(loss_mode="clip_cov", clip_cov_ratio=0.3, clip_cov_lb=-100, clip_cov_ub=100)
    for step, (batch, mini) in enumerate(zip(steps, minis, strict=True)):
        draws = token_draws(5, step, batch.sequence_ids(), batch.position_ids())[mini["token_indices"]]
        expected = with_chosen_tokens(mini, ActorConfig(policy_loss=losses), draws)["chosen_tokens"]
        assert expected.any() and torch.equal(mini["chosen_tokens"], expected)


def test_answers_by_older_weights_get_a_log_prob_pass(run, monkeypatch):
    take = PPOTrainer.collect

    def stale(self, timer):
        rollouts = take(self, timer)
        for trajectory in rollouts.trajectories:
            object.__setattr__(trajectory, "policy_version", (self.version - 1, self.version))
        return rollouts

    monkeypatch.setattr(PPOTrainer, "collect", stale)
    _, _, metrics = run("stale")
    assert all("timing_s/old_log_prob" in row for number, row in metrics.items() if number)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("values",), "needs the column 'values', which this run does not fill; set critic.enable=True"),
        (("value",), "asks for a column 'value' of the batch; did you mean 'values'"),
    ],
)
def test_an_estimator_that_asks_for_what_is_not_there_is_refused_before_the_first_step(
    folder, monkeypatch, columns, message
):
    from verl.algorithms.advantages import ADVANTAGES, register_advantage

    monkeypatch.setattr(ADVANTAGES, "_items", dict(ADVANTAGES._items))
    register_advantage("greedy_for_columns", columns=columns)(lambda batch, config: ())
    with pytest.raises(ConfigError, match=message):
        run_ppo(load_config(jobs.overrides(folder, "refused", "algorithm.adv_estimator=greedy_for_columns")))


def test_another_aggregation_than_that_of_the_loss_is_said_to_have_no_effect(caplog, run):
    run("said", f"{LOSS}.loss_mode=sapo", f"{ARR}.actor.loss_agg_mode=token-sum")
    assert "loss_agg_mode=token-sum has no effect: policy_loss.loss_mode=sapo is defined with seq-mean" in caplog.text
