"""An estimator and a loss of packed columns; `actor_rollout_ref.model.external_lib=my_packed_algorithm` adds both."""

import torch

from verl.algorithms.advantages import register_advantage
from verl.algorithms.losses import register_policy_loss


@register_advantage("uncertain_tokens", outputs=("entropy",))
def uncertain_tokens(batch, config):
    """The score less the mean of its group, times the entropy of the token over the mean entropy."""
    mask, scores = batch["loss_mask"], batch.sum_per_sequence(batch["token_rewards"].double())
    _, group = batch["group_ids"].unique(return_inverse=True)
    means = torch.zeros_like(scores).index_add(0, group, scores) / group.bincount(minlength=len(scores)).clamp(min=1)
    entropy = batch["entropy"].double()
    advantages = (scores - means[group])[batch.sequence_ids()] * entropy / entropy[mask].mean().clamp(min=1e-6)
    advantages = torch.where(mask, advantages, 0.0).float()
    return advantages, advantages


def choose_surprising(batch, config, draws):
    """(T,) True for the `share` of a mini-batch's sampled tokens that the policy finds least likely; ties by chance."""
    mask = batch["loss_mask"]
    count = round(config.policy_loss.extra.get("share", 0.2) * int(mask.sum()))
    by_chance = draws[mask].argsort()
    order = by_chance[batch["current_logprobs"][mask][by_chance].argsort(stable=True)]
    chosen = torch.zeros_like(mask)
    chosen[mask.nonzero().squeeze(1)[order[:count]]] = True
    return chosen


@register_policy_loss(
    "surprising_tokens",
    columns=("rollout_logprobs",),
    outputs=("entropy",),
    choose_tokens=choose_surprising,
    aggregation="token-mean",
)
def surprising_tokens(logprobs, old_logprobs, advantages, batch, config):
    """PPO's clip on the chosen tokens, times p_old / p_rollout, at most 2; a bonus of entropy on all."""
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    weights = (old_logprobs - batch["rollout_logprobs"]).exp().clamp(max=2.0)
    losses = -torch.minimum(ratio * advantages, clipped * advantages) * weights
    bonus = config.policy_loss.extra.get("bonus", 0.0) * batch["entropy"]
    return torch.where(batch["chosen_tokens"], losses, 0.0) - bonus, {"chosen": batch["chosen_tokens"]}
