"""PF-PPO in real runs: what is drawn, what the metrics and the ledger are about, and a run that goes on."""

from pathlib import Path

import pytest
import torch

from tests.e2e import jobs
from tests.e2e.jobs import ARR
from verl.algorithms.policy_filtration import draw, filtration_probabilities
from verl.config.algorithm import PFPPOConfig
from verl.data.random_streams import sequence_draws
from verl.observe.ledger import read_ledger
from verl.trainer.ppo import old_logprobs
from verl.workers.batch_dispatch import ShardDispatcher

PPO = ("algorithm.adv_estimator=gae", "critic.fsdp.dtype=float32", "critic.optim.lr=1e-2", "trainer.save_freq=1")
FILTER = ("algorithm.use_pf_ppo=True", "algorithm.pf_ppo.weight_pow=4", f"{ARR}.actor.ppo_mini_batch_size=2")
SETTINGS = PFPPOConfig(weight_pow=4.0)
SHORT = ("trainer.val_before_train=False", "trainer.test_freq=-1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    return tmp_path


def train(folder: Path, run: str, steps: int, *more: str) -> dict:
    model = f"critic.model.path={folder / 'model'}"
    jobs.train(folder, run, *PPO, model, *FILTER, *SHORT, f"trainer.total_training_steps={steps}", *more)
    return jobs.without_timings(jobs.metrics(folder, run))


def test_a_run_trains_on_what_it_draws_and_goes_on_where_it_was_stopped(folder: Path):
    whole = train(folder, "whole", 3)
    train(folder, "cut", 2)
    assert train(folder, "cut", 3) == whole
    for step in (1, 2, 3):
        rewards = read_ledger(folder / "whole" / "ledger", step).batch["rewards"]
        probabilities = filtration_probabilities(rewards, SETTINGS)
        drawn = draw(probabilities, sequence_draws(42, step - 1, 16))
        row = whole[step]
        assert row["training/pf_ppo/distinct_sequences"] == len(drawn.unique()) < 16
        assert row["training/pf_ppo/score"] == pytest.approx(float(rewards.double()[drawn].mean()))
        assert row["critic/score/mean"] == pytest.approx(float(rewards.double().mean()))  # of all answers


def test_two_ranks_draw_the_same_sequences(folder: Path):
    one, two = (
        train(folder, name, 1, *more)
        for name, more in (("one", ()), ("two", ("trainer.device=cpu", "trainer.n_gpus_per_node=2")))
    )
    names = ("training/pf_ppo/distinct_sequences", "training/pf_ppo/score", "actor/pg_loss", "critic/vf_loss")
    for name in names:
        assert one[1][name] == pytest.approx(two[1][name], rel=1e-4, abs=1e-6), name


def test_both_roles_are_updated_by_what_was_drawn_and_metrics_of_bypass_mode_are_of_all_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    compared, minis, mismatch, update = [], [], old_logprobs.mismatch_metrics, ShardDispatcher.update

    def watched_metrics(batch, logprobs):
        compared.append((batch.num_tokens, bool((logprobs[batch["loss_mask"]] < 0).all())))
        return mismatch(batch, logprobs)

    def watched_update(self, batch, *args):
        minis.append(batch)
        return update(self, batch, *args)

    monkeypatch.setattr(old_logprobs, "mismatch_metrics", watched_metrics)
    monkeypatch.setattr(ShardDispatcher, "update", watched_update)
    rows = train(folder, "bypass", 1, "algorithm.rollout_correction.bypass_mode=True")
    batch = read_ledger(folder / "bypass" / "ledger", 1).batch
    assert compared == [(batch.num_tokens, True)] and abs(rows[1]["rollout_corr/kl"]) < 1e-3
    drawn = batch.select(draw(filtration_probabilities(batch["rewards"], SETTINGS), sequence_draws(42, 0, 16)))
    of_critic, of_actor = minis[:2], minis[2:]
    assert [mini.num_sequences for mini in minis] == [8] * 4
    for role in (of_critic, of_actor):
        for name in ("tokens", "advantages", "group_ids"):
            assert torch.equal(torch.cat([mini[name] for mini in role]), drawn[name]), name
