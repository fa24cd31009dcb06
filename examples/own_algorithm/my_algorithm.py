"""An advantage estimator and a policy loss; `actor_rollout_ref.model.external_lib=my_algorithm` registers both."""

import torch

from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss


@register_adv_est("leave_one_out")
def leave_one_out(token_level_rewards, response_mask, index, config=None, **kwargs):
    """The score of an answer minus the mean score of the other answers to its prompt."""
    scores, groups = token_level_rewards.sum(-1), torch.as_tensor(index)
    same = (groups[:, None] == groups).float()  # (bs, bs), 1 where two answers share a prompt
    mean_of_others = (same @ scores - scores) / (same.sum(-1) - 1).clamp(min=1)
    advantages = (scores - mean_of_others)[:, None] * response_mask
    return advantages, advantages


@register_policy_loss("cut_ratio")
def cut_ratio(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """REINFORCE whose importance ratio is cut above and carries no gradient."""
    ratio = (log_prob - old_log_prob).detach().exp().clamp(max=config.extra.get("max_ratio", 1.2))
    losses = -ratio * advantages * log_prob
    mean_ratio = (ratio * response_mask).sum() / response_mask.sum()
    return agg_loss(losses, response_mask, loss_agg_mode), {"actor/mean_ratio": mean_ratio.item()}
