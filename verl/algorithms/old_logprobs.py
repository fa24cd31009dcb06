"""Where the old log-probs of a run come from, known before it starts; `verl.trainer.ppo.old_logprobs` fills them in."""

from verl.algorithms.advantages import get_advantage
from verl.algorithms.losses import get_policy_loss
from verl.config import RunConfig
from verl.config.asynchronous import SEPARATE, is_asynchronous, staleness
from verl.config.check import trained_actor

FROM_UPDATE, ONE_PASS, RECORDED, SCORED, ROLLOUT = "update", "pass", "recorded", "scored", "rollout"


def old_logprobs_of(config: RunConfig) -> str:
    """update: from the update's own forward pass. pass: from one more before it. rollout: recorded, in bypass mode.

    In asynchronous training the first two are for answers of the published weights. Tokens of older ones have theirs
    recorded by a rollout that computes as the trainer, or scored by the trainer before it gives a version up.
    """
    if config.algorithm.rollout_correction.bypass_mode:
        return ROLLOUT
    if is_asynchronous(config) and _rollout_computes_as_the_trainer(config):
        return RECORDED
    if is_asynchronous(config) and staleness(config) > 0:
        return SCORED
    return FROM_UPDATE if update_gives_old_logprobs(config) else ONE_PASS


def keeps_published_weights(config: RunConfig) -> bool:
    """Whether the actor keeps the published weights beside those that it trains, to score by them."""
    old = config.trainer.v1.trainer_mode == SEPARATE and staleness(config) > 0
    return old and old_logprobs_of(config) == SCORED


def _rollout_computes_as_the_trainer(config: RunConfig) -> bool:
    """Whether it samples with the trainer's own weights, type and full vocabulary, and no cache of older weights."""
    rollout = config.actor_rollout_ref.rollout
    same_type = rollout.dtype in ("auto", config.actor_rollout_ref.actor.engine.get("dtype"))
    unlimited = rollout.top_p == 1 and rollout.top_k in (-1, 0)
    return rollout.name == "native" and same_type and unlimited and rollout.kv_cache_on_publish == "recompute"


def update_gives_old_logprobs(config: RunConfig) -> bool:
    """Whether the update's own forward pass can give the log-probs that it needs: they are used by one optimiser step,
    on unchanged weights. That is one mini-batch and one epoch, no KL in the reward, no rollout correction, no PF-PPO,
    which trains on a part, no advantage estimator and no choice of tokens that needs the policy's outputs first."""
    algorithm, actor = config.algorithm, trained_actor(config)
    first = get_advantage(algorithm.adv_estimator).needs_logprob_pass(algorithm) or outputs_asked_for(config)
    if first or algorithm.use_pf_ppo or get_policy_loss(actor.policy_loss.loss_mode).choose_tokens:
        return False
    one_step = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= config.data.train_batch_size
    return one_step and not algorithm.use_kl_in_reward and not algorithm.rollout_correction.corrects


def outputs_asked_for(config: RunConfig) -> tuple[str, ...]:
    """Outputs of the policy before the update, beside log-probs and entropy, that become columns of the batch."""
    asked = get_advantage(config.algorithm.adv_estimator).outputs
    forced = ("sum_pi_squared",) if config.actor_rollout_ref.actor.calculate_sum_pi_squared else ()
    return tuple(name for name in dict.fromkeys((*asked, *forced)) if name not in ("logprobs", "entropy"))
