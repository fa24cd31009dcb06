"""Rollout correction in real runs whose rollout log-probs are off by a known noise: every mode, and two ranks."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from tests.e2e import jobs
from tests.e2e.jobs import ARR
from verl.config import RolloutCorrectionConfig, load_config
from verl.config.algorithm import correction_presets
from verl.data.batch import Batch
from verl.observe.ledger import read_ledger
from verl.observe.metric_names import find_metric
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.trainer import PPOTrainer
from verl.utils.errors import ConfigError, DataError
from verl.workers.batch_dispatch import ShardDispatcher

KEY = "algorithm.rollout_correction"
SHORT = ("trainer.total_training_steps=3", "trainer.save_freq=-1", "trainer.val_before_train=False")
TWO_UPDATES = f"{ARR}.actor.ppo_mini_batch_size=2"
REJECTION = [f"{KEY}.rollout_rs='token_k2,seq_mean_k1'", f"{KEY}.rollout_rs_threshold='0.03,0.8_1.25'"]
MODES = {
    "decoupled": [f"{KEY}.rollout_is=token", f"{KEY}.rollout_is_threshold=1.1", *REJECTION],
    "decoupled_icepop": [f"{KEY}.rollout_is=token", f"{KEY}.rollout_is_threshold=0.9_1.2"],
    "ppo_clip": [f"{KEY}.bypass_mode=True", *REJECTION],
    "reinforce": [
        f"{KEY}.bypass_mode=True",
        f"{KEY}.loss_type=reinforce",
        f"{KEY}.rollout_is=sequence",
        f"{KEY}.rollout_is_batch_normalize=True",
        *REJECTION,
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("correction")
    jobs.prepare(out)
    return out


@pytest.fixture
def run(folder, monkeypatch):
    """Trains; returns the batches of the steps, the mini-batches that were trained, and the metrics by step."""
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(folder / "metrics"))
    step, update, collect = PPOTrainer.step, ShardDispatcher.update, PPOTrainer.collect

    def train(name: str, *overrides: str, noise: float = 0.25) -> tuple[list[Batch], list[Batch], dict]:
        steps: list[Batch] = []
        minis: list[Batch] = []

        def noisy_collect(self, timer):
            rollouts = collect(self, timer)
            trajectories = []
            for number, t in enumerate(rollouts.trajectories):
                drawn = torch.randn(len(t.tokens), generator=torch.Generator().manual_seed(number))
                shifted = (t.rollout_logprobs - noise * drawn.abs() * t.loss_mask).float()
                trajectories.append(dataclasses.replace(t, rollout_logprobs=shifted))
            return dataclasses.replace(rollouts, trajectories=trajectories)

        def watched_step(self, timer):
            record = step(self, timer)
            steps.append(record.batch)
            return record

        def watched_update(self, batch, *args):
            minis.append(batch)
            return update(self, batch, *args)

        monkeypatch.setattr(PPOTrainer, "collect", noisy_collect)
        monkeypatch.setattr(PPOTrainer, "step", watched_step)
        monkeypatch.setattr(ShardDispatcher, "update", watched_update)
        jobs.train(folder, name, *SHORT, *overrides)
        metrics = jobs.metrics(folder, name)
        assert not [n for row in metrics.values() for n in row if find_metric(n) is None]
        return steps, minis, {number: row for number, row in metrics.items() if number}

    return train


@pytest.mark.parametrize("mode", MODES)
def test_a_run_in_each_mode_trains_on_what_is_accepted_with_its_weights(mode, run, folder):
    steps, minis, metrics = run(mode, TWO_UPDATES, *MODES[mode])
    rejects, bypassed = any("rollout_rs" in o for o in MODES[mode]), "bypass_mode=True" in " ".join(MODES[mode])
    assert len(steps) == 3 and len(minis) == 6
    for mini in minis:
        assert bool(mini["rejected_tokens"].any() if rejects else "rejected_tokens" not in mini)
        assert float(mini["loss_weights"].sum()) == pytest.approx(1.0, abs=1e-6)
        assert (mini["loss_weights"][~mini["loss_mask"]] == 0).all()
        assert ("rollout_is_weights" in mini) == (mode != "ppo_clip")
        assert torch.equal(mini["old_logprobs"], mini["rollout_logprobs"]) == bypassed
        if mode.startswith("decoupled"):
            ratio = (mini["old_logprobs"] - mini["rollout_logprobs"]).exp()[mini["loss_mask"]]
            inside = ratio.clamp(max=1.1) if mode == "decoupled" else ratio * ((ratio >= 0.9) & (ratio <= 1.2))
            torch.testing.assert_close(mini["rollout_is_weights"][mini["loss_mask"]], inside, rtol=1e-5, atol=0)
        if mode == "reinforce":
            w, kept = mini["rollout_is_weights"], mini.sum_per_sequence(mini["loss_mask"].float())
            means = (mini.sum_per_sequence(w) / kept.clamp(min=1))[kept > 0]
            assert float(means.mean()) == pytest.approx(1.0, abs=1e-5)
    for number, batch in enumerate(steps, 1):
        trajectories = read_ledger(folder / mode / "ledger", number).batch
        assert torch.equal(trajectories["loss_mask"], batch["loss_mask"])
        assert torch.equal(batch["loss_mask"], batch.sampled_mask())
        assert batch["loss_mask"].sum() > 16  # what was rejected was still sampled
        row = metrics[number]
        assert math.isfinite(row["actor/pg_loss"]) and row["actor/grad_norm"] > 0
        assert row["rollout_corr/kl"] < -0.1 and row["rollout_corr/chi2_token"] > 0
        assert ("timing_s/old_log_prob" in row) == (not bypassed)
        assert (row.get("rollout_corr/rollout_rs_masked_fraction", 0) > 0) == rejects
        assert ("rollout_corr/rollout_is_mean" in row) == (mode != "ppo_clip")
        assert 0.5 < row["actor/entropy"] < 4


def test_two_ranks_train_as_one(run):
    runs = {
        n: run(f"ranks_{n}", TWO_UPDATES, *MODES["reinforce"], "trainer.device=cpu", f"trainer.n_gpus_per_node={n}")
        for n in (1, 2)
    }
    (_, minis, one), (_, others, two) = runs[1], runs[2]
    for mini, other in zip(minis, others, strict=True):
        assert torch.equal(mini["loss_mask"], other["loss_mask"])
    for number, row in one.items():
        for name in ("actor/pg_loss", "actor/grad_norm", "rollout_corr/rollout_rs_masked_fraction", "rollout_corr/kl"):
            assert two[number][name] == pytest.approx(row[name], rel=2e-3, abs=1e-5), name


def test_the_optimal_token_baseline_gets_the_weights_and_reports_its_variance(run):
    baseline = "algorithm.adv_estimator=optimal_token_baseline"
    steps, _, metrics = run("otb", baseline, f"{KEY}.rollout_is=token")
    assert all({"rollout_is_weights", "sum_pi_squared"} <= batch.token_columns.keys() for batch in steps)
    for row in metrics.values():
        assert row["variance_proxy/proxy1_signal_strength"] == pytest.approx(row["actor/grad_norm"] ** 2)
        assert row["variance_proxy/expected_w"] > 0 and row["variance_proxy/proxy2_total_power"] > 0


def test_a_run_without_correction_has_none_of_its_columns_or_metrics(run):
    steps, minis, metrics = run("off", noise=0.0)
    names = {"rollout_is_weights", "rejected_tokens", "current_logprobs"}
    assert not any(names & batch.token_columns.keys() for batch in (*steps, *minis))
    assert not [n for row in metrics.values() for n in row if "rollout_is" in n or "rollout_rs" in n]


@pytest.mark.parametrize("bypass", [True, False])
def test_a_step_without_an_accepted_token_stops_the_run(run, bypass):
    rules = [f"{KEY}.rollout_rs=token_k1", f"{KEY}.rollout_rs_threshold=5_6", f"{KEY}.bypass_mode={bypass}"]
    with pytest.raises(DataError, match=r"step 1: .*rollout_rs=token_k1 rejects every sampled token.*widen"):
        run(f"nothing_{bypass}", *rules)


def test_bypass_mode_says_which_keys_it_overrules(run, caplog):
    run("said", f"{KEY}.bypass_mode=True", f"{ARR}.actor.policy_loss.loss_mode=gspo", noise=0.0)
    assert "policy_loss.loss_mode=gspo has no effect: algorithm.rollout_correction.bypass_mode=True" in caplog.text
    caplog.clear()
    run("weights_said", f"{KEY}.bypass_mode=True", f"{KEY}.rollout_is=token", noise=0.0)
    assert "rollout_correction.rollout_is=token has no effect: with" in caplog.text


def test_a_padded_loss_that_ignores_the_weights_is_refused_before_the_first_step(folder, monkeypatch):
    from verl.algorithms.losses import POLICY_LOSSES
    from verl.doors import core_algos

    monkeypatch.setattr(POLICY_LOSSES, "_items", dict(POLICY_LOSSES._items))
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", {})

    @core_algos.register_policy_loss("deaf")
    def deaf(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        return core_algos.agg_loss(-advantages * log_prob, response_mask, loss_agg_mode), {}

    overrides = jobs.overrides(folder, "deaf", f"{ARR}.actor.policy_loss.loss_mode=deaf", f"{KEY}.rollout_is=token")
    with pytest.raises(ConfigError, match="the policy loss 'deaf' ignores its argument rollout_is_weights"):
        run_ppo(load_config(overrides))


# ---- configuration


@pytest.mark.parametrize("name", correction_presets())
def test_each_preset_resolves_to_the_section_of_its_overrides(name, folder):
    overrides = [f"{KEY}.{key}={value}" for key, value in correction_presets()[name].items()]
    config = load_config(jobs.overrides(folder, name, *overrides))
    assert config.algorithm.rollout_correction == getattr(RolloutCorrectionConfig, name)()


def test_there_are_18_presets():
    presets = correction_presets()
    assert len(presets) == 18 and presets["disabled"] == {}
    assert presets["decoupled_token_icepop"] == {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{KEY}.rollout_rs=token_k1"], "rollout_rs=token_k1 needs rollout_rs_threshold"),
        (
            [f"{KEY}.rollout_rs='token_k1,seq_sum_k2'", f"{KEY}.rollout_rs_threshold='2,2,2'"],
            "has 3 bounds for the 2 rules",
        ),
        ([f"{KEY}.rollout_rs=token_k2", f"{KEY}.rollout_rs_threshold=0.5_2"], "must be one number"),
        ([f"{KEY}.rollout_rs=token_k1", f"{KEY}.rollout_rs_threshold=0.5"], "so none; give lo_hi, or a number above 1"),
        ([f"{KEY}.rollout_is=token", f"{ARR}.rollout.calculate_log_probs=False"], "calculate_log_probs=False; set it"),
        ([f"{KEY}.bypass_mode=True", f"{ARR}.rollout.calculate_log_probs=False"], "calculate_log_probs=False; set it"),
        ([f"{ARR}.actor.policy_loss.loss_mode=bypass_mode"], "needs algorithm.rollout_correction.bypass_mode=True"),
    ],
)
def test_what_cannot_work_is_refused_when_the_configuration_loads(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides)
