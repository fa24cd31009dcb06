"""An installed package with an entry point `verl.plugins` brings an estimator and a loss; nothing else names them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.e2e import jobs

MODULE = """
import torch

from verl.algorithms.advantages import register_advantage
from verl.algorithms.losses import register_policy_loss


@register_advantage("third_party_score")
def score(batch, config):
    scores = batch.sum_per_sequence(batch["token_rewards"])[batch.sequence_ids()]
    column = torch.where(batch["loss_mask"], scores, 0.0)
    return column, column


@register_policy_loss("third_party_reinforce")
def reinforce(logprobs, old_logprobs, advantages, batch, config):
    return -advantages * logprobs, {"third_party": torch.full_like(logprobs, 7.0)}
"""


def test_a_run_finds_the_functions_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = tmp_path / "site"
    info = site / "third_party-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "third_party.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third_party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\nthird = third_party\n")
    jobs.prepare(tmp_path)
    names = ("algorithm.adv_estimator=third_party_score", "trainer.total_training_steps=1", "trainer.save_freq=-1")
    loss = f"{jobs.ARR}.actor.policy_loss.loss_mode=third_party_reinforce"
    words = jobs.overrides(tmp_path, "run", *names, loss, "trainer.val_before_train=False")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{site}"}
    environment["VERL_FILE_LOGGER_ROOT"] = str(tmp_path / "metrics")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert jobs.metrics(tmp_path, "run")[1]["actor/third_party"] == 7.0
