"""The certificate of functions of the user's own."""

import pytest

from tests.e2e.test_certify import ACTOR, run
from tests.tiers import soak

pytestmark = pytest.mark.slow

LOSS = """
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss


@register_policy_loss("certified_from_outside")
def own(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **kwargs):
    ratio = (log_prob - old_log_prob).exp()
    main = agg_loss(-advantages * ratio.clamp(max=1.3), response_mask, loss_agg_mode)
    pull = agg_loss((log_prob - old_log_prob) ** 2, response_mask, loss_agg_mode)
    return main + 0.1 * pull, {"actor/pull": pull.detach().item()}
"""


@pytest.mark.parametrize("mode", [*soak(["token-mean"]), "seq-mean-token-sum-norm"])
def test_a_padded_loss_from_outside_is_certified(tmp_path, monkeypatch, mode):
    (tmp_path / "my_certified_loss.py").write_text(LOSS)
    monkeypatch.syspath_prepend(str(tmp_path))
    certificate = run(
        "actor_rollout_ref.model.external_lib=my_certified_loss",
        f"{ACTOR}.policy_loss.loss_mode=certified_from_outside",
        f"{ACTOR}.loss_agg_mode={mode}",
    )
    assert certificate.holds, certificate.verdict()


PACKED = """
import torch

from verl.algorithms.advantages import register_advantage
from verl.algorithms.losses import register_policy_loss


@register_advantage("surprise_from_outside", columns=("old_logprobs",))
def surprise(batch, config):
    advantages = torch.where(batch["loss_mask"], batch["token_rewards"] - 0.1 * batch["old_logprobs"], 0.0)
    return advantages, advantages


def choose_unlikely(batch, config, draws):
    return (batch["current_logprobs"] < -1.0) & (draws < 0.5)


@register_policy_loss("spread_from_outside", outputs=("sum_pi_squared", "entropy"), choose_tokens=choose_unlikely)
def spread(logprobs, old_logprobs, advantages, batch, config):
    losses = -advantages * (logprobs - old_logprobs).exp()
    extra = batch["sum_pi_squared"] - 0.1 * batch["entropy"]
    return losses + torch.where(batch["chosen_tokens"], extra, 0.0), {"chosen_tokens": batch["chosen_tokens"]}
"""


def test_functions_on_packed_batches_from_a_file_are_certified_with_what_they_ask_for(tmp_path, monkeypatch):
    (tmp_path / "my_packed_functions.py").write_text(PACKED)
    monkeypatch.syspath_prepend(str(tmp_path))
    certificate = run(
        "actor_rollout_ref.model.external_lib=my_packed_functions",
        "algorithm.adv_estimator=surprise_from_outside",
        f"{ACTOR}.policy_loss.loss_mode=spread_from_outside",
    )
    assert certificate.holds, certificate.verdict()
