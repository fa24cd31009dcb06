"""The packed estimator and loss of docs/extend/own_algorithm.md compute what they say, in any cut and order."""

import math
import runpy

import pytest
import torch

from tests.conftest import ROOT
from tests.unit.algorithms.algorithm_cases import column_by_sequence, random_batch
from verl.algorithms.advantages import ADVANTAGES, compute_advantages, with_token_rewards
from verl.algorithms.losses import POLICY_LOSSES, get_policy_loss, with_chosen_tokens
from verl.commands.certify.comparison import certify
from verl.config import ActorConfig, AlgorithmConfig, PolicyLossConfig, load_config
from verl.data.batch import Batch

LOSS, ESTIMATOR = "surprising_tokens", "uncertain_tokens"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file registers, for one test."""
    for registry in (ADVANTAGES, POLICY_LOSSES):
        others = {name: item for name, item in registry._items.items() if name not in (LOSS, ESTIMATOR)}
        monkeypatch.setattr(registry, "_items", others)  # a test of the page may have registered them
    runpy.run_path(str(ROOT / "examples" / "own_algorithm" / "my_packed_algorithm.py"))


def actor(**extra: float) -> ActorConfig:
    settings = PolicyLossConfig(loss_mode=LOSS, extra=extra)
    return ActorConfig(policy_loss=settings, clip_ratio_low=0.1, clip_ratio_high=0.3)


def full_batch() -> Batch:
    batch, generator = random_batch(), torch.Generator().manual_seed(9)
    mask = batch["loss_mask"]
    entropy = torch.rand(batch.num_tokens, generator=generator, dtype=torch.float64) * mask
    current = -torch.rand(batch.num_tokens, generator=generator, dtype=torch.float64) * mask
    return batch.with_columns(entropy=entropy, current_logprobs=current)


def test_the_advantages_are_those_of_the_definition():
    batch = with_token_rewards(full_batch())
    found = compute_advantages(batch, AlgorithmConfig(adv_estimator=ESTIMATOR))["advantages"]
    scores, groups = batch["rewards"].tolist(), batch["group_ids"].tolist()
    masks, entropies = column_by_sequence(batch, "loss_mask"), column_by_sequence(batch, "entropy")
    sampled = [e for row, mask in zip(entropies, masks, strict=True) for e, m in zip(row, mask, strict=True) if m]
    expected = []
    for i, (row, mask) in enumerate(zip(entropies, masks, strict=True)):
        group = [scores[j] for j in range(len(scores)) if groups[j] == groups[i]]
        lead = scores[i] - math.fsum(group) / len(group)
        expected += [lead * e * len(sampled) / math.fsum(sampled) if m else 0.0 for e, m in zip(row, mask, strict=True)]
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_the_least_likely_tokens_of_a_mini_batch_are_chosen(share: float):
    batch = full_batch()
    chosen = with_chosen_tokens(batch, actor(share=share), torch.rand(batch.num_tokens))["chosen_tokens"]
    sampled = batch["current_logprobs"][batch["loss_mask"]].sort().values
    assert torch.equal(batch["current_logprobs"][chosen].sort().values, sampled[: round(share * len(sampled))])


def test_the_losses_are_those_of_the_definition():
    batch, config = full_batch(), actor(bonus=0.5)
    batch = with_chosen_tokens(batch, config, torch.rand(batch.num_tokens))
    logprobs, old, advantages = batch["current_logprobs"], batch["old_logprobs"], batch["advantages"]
    found, metrics = get_policy_loss(LOSS).function(logprobs, old, advantages, batch, config)
    for t in range(batch.num_tokens):
        ratio, a = math.exp(float(logprobs[t] - old[t])), float(advantages[t])
        weight = min(math.exp(float(old[t] - batch["rollout_logprobs"][t])), 2.0)
        loss = -min(ratio * a, min(max(ratio, 0.9), 1.3) * a) * weight if metrics["chosen"][t] else 0.0
        assert float(found[t]) == pytest.approx(loss - 0.5 * float(batch["entropy"][t]), abs=1e-12)


def test_they_are_certified():
    names = (f"algorithm.adv_estimator={ESTIMATOR}", f"actor_rollout_ref.actor.policy_loss.loss_mode={LOSS}")
    config = load_config([*names, "actor_rollout_ref.actor.policy_loss.extra.bonus=0.1"])
    certificate = certify(config, tiny=True, num_sequences=6, longest=16)
    assert certificate.holds, certificate.verdict()
