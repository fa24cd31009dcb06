"""On-policy distillation: how far the policy is from a teacher on the tokens that the policy sampled.

Shapes: M tokens of a micro-batch, k tokens of the vocabulary at each. Log-probs are nats, at the temperature of each
model. Sources: arXiv 2306.13649 (training on the policy's own samples), 2306.08543 (reverse KL by policy gradient).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from verl.algorithms.kl import KL_ESTIMATORS, kl_k1, kl_penalty
from verl.algorithms.policy_loss import TokenMetrics, aggregation_mode, get_policy_loss, losses_per_token
from verl.config import ActorConfig, DistillationLossConfig
from verl.config.user_keys import with_value
from verl.data.batch import Batch
from verl.utils.errors import ConfigError
from verl.utils.registry import Registry

AT_IDS = "logprobs_at_ids"
# (policy's log-probs, teacher's, batch, config, the actor's) -> losses and metrics (M,)
DistillationFunction = Callable[
    [Tensor, Tensor, Batch, DistillationLossConfig, ActorConfig], tuple[Tensor, TokenMetrics]
]


@dataclass(frozen=True)
class Divergence:
    """A registered divergence; both log-probs are (M, k) with `use_topk`, else (M,), of the sampled token."""

    function: DistillationFunction
    use_topk: bool
    per_token: bool

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the teacher gives."""
        return ("teacher_top_ids", "teacher_top_logprobs") if self.use_topk else ("teacher_logprobs",)


DISTILLATION_LOSSES: Registry[Divergence] = Registry("distillation loss")


def register_distillation_loss(
    name: str, use_topk: bool = False, per_token: bool = True
) -> Callable[[DistillationFunction], DistillationFunction]:
    """Decorator that makes a divergence selectable as `distillation.distillation_loss.loss_mode=<name>`.

    `per_token=False`: the losses of a sequence depend on each other; the batch then bounds whole sequences.
    """

    def add(function: DistillationFunction) -> DistillationFunction:
        DISTILLATION_LOSSES.register(name)(Divergence(function, use_topk, per_token))
        return function

    return add


@register_distillation_loss("forward_kl_topk", use_topk=True)
def forward_kl_topk(
    logprobs: Tensor, teacher: Tensor, batch: Batch, config: DistillationLossConfig, actor: ActorConfig
) -> tuple[Tensor, TokenMetrics]:
    """KL(teacher || policy) over the teacher's k most likely tokens: the sum of q (log q - log p).

    With `topk_tail` the rest of the vocabulary is one more outcome, 1 - sum q and 1 - sum p: the KL of two
    distributions over k + 1 outcomes, which is at most that over the vocabulary (log-sum inequality), and 0 with
    gradient 0 where they agree. Without, probability that moves from the rest to the k tokens lowers the loss.
    """
    losses = (teacher.exp() * (teacher - logprobs)).sum(1)
    teacher_mass, mass = teacher.exp().sum(1), logprobs.exp().sum(1)
    if config.topk_tail:
        least = torch.finfo(mass.dtype).eps  # what is left after rounding is no probability
        rest, rest_teacher = (1 - mass).clamp(min=least), (1 - teacher_mass).clamp(min=least)
        losses = losses + rest_teacher * (rest_teacher.log() - rest.log())
    return losses, {
        f"{name}{suffix}": value.detach()
        for name, value in (("student_mass", mass), ("teacher_mass", teacher_mass))
        for suffix in ("", "_min", "_max")
    }


def _estimate(
    logprobs: Tensor, teacher: Tensor, batch: Batch, config: DistillationLossConfig, actor: ActorConfig, name: str
) -> tuple[Tensor, TokenMetrics]:
    return kl_penalty(logprobs, teacher, name), {}


for _name in KL_ESTIMATORS:  # of KL(policy || teacher), on the sampled token; verl.algorithms.kl says which
    register_distillation_loss(_name)(partial(_estimate, name=_name))


class DistillationTerm:
    """The distillation loss as a part of the actor's loss, per token."""

    def __init__(self, config: DistillationLossConfig, actor: ActorConfig):
        self.config = config
        self.divergence = DISTILLATION_LOSSES.get(config.loss_mode)
        self.columns, self.per_token = self.divergence.columns, self.divergence.per_token
        self.outputs: tuple[str, ...] = (AT_IDS,) if self.divergence.use_topk else ()
        self.policy_loss, self.actor = None, actor
        if config.use_policy_gradient:
            self.policy_loss = get_policy_loss(config.policy_loss_mode)
            for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
                self.actor = with_value(self.actor, name, config[name])
            self.per_token = self.per_token and self.policy_loss.per_token

    def __call__(self, outputs: dict[str, Tensor], batch: Batch, old_logprobs: Tensor) -> tuple[Tensor, TokenMetrics]:
        """The losses (M,) times their coefficient, and the metrics distillation/*."""
        config, seen = self.config, batch.token_columns
        logprobs = outputs[AT_IDS] if self.divergence.use_topk else outputs["logprobs"]
        teacher = seen["teacher_top_logprobs" if self.divergence.use_topk else "teacher_logprobs"]
        if config.log_prob_min_clamp is not None:
            logprobs, teacher = (x.clamp(min=config.log_prob_min_clamp) for x in (logprobs, teacher))
        returned = self.divergence.function(logprobs, teacher, batch, config, self.actor)
        losses, more = losses_per_token(f"distillation loss {config.loss_mode!r}", returned, outputs["logprobs"])
        if config.loss_max_clamp is not None:
            losses = losses.clamp(-config.loss_max_clamp, config.loss_max_clamp)
        metrics = {"loss": losses, "abs_loss": losses.abs(), "loss_min": losses, "loss_max": losses, **more}
        if self.policy_loss is not None:
            advantages = -losses.detach()
            returned = self.policy_loss.function(outputs["logprobs"], old_logprobs, advantages, batch, self.actor)
            what = f"policy loss {config.policy_loss_mode!r}"
            losses, of_policy = losses_per_token(what, returned, outputs["logprobs"])
            metrics |= {"pg_loss": losses, **of_policy}
        return config.distillation_loss_coef * losses, {f"distillation/{name}": m for name, m in metrics.items()}


def check_distillation(config: DistillationLossConfig, actor: ActorConfig) -> list[str]:
    """ConfigError, before the first step, for a loss that cannot be used; what to doubt, one sentence each."""
    where, divergence = "distillation.distillation_loss", DISTILLATION_LOSSES.get(config.loss_mode)
    if not config.use_policy_gradient:
        if KL_ESTIMATORS.get(config.loss_mode) is kl_k1:
            return [
                f"{where}.loss_mode={config.loss_mode} trained as a loss has a gradient that is 0 on average: the mean "
                f"of the gradient of log p is 0; set {where}.use_policy_gradient=True, or loss_mode=k2 or k3"
            ]
        return []
    if divergence.use_topk:
        raise ConfigError(
            f"{where}.loss_mode={config.loss_mode} does not depend on the sampled token, so as an advantage it has a "
            f"gradient that is 0 on average; set {where}.use_policy_gradient=False, or loss_mode=k1"
        )
    mode = f"{where}.policy_loss_mode={config.policy_loss_mode}"
    loss = get_policy_loss(config.policy_loss_mode)
    asked = [*loss.columns, *loss.outputs, *(("chosen_tokens",) if loss.choose_tokens else ())]
    if asked:
        raise ConfigError(f"{mode} asks for {', '.join(asked)}, which is there for the task's policy loss; use vanilla")
    if loss.aggregation not in (None, aggregation_mode(actor)):
        raise ConfigError(
            f"{mode} is defined with loss_agg_mode={loss.aggregation}, and the actor's is {aggregation_mode(actor)}; "
            f"set actor_rollout_ref.actor.loss_agg_mode={loss.aggregation}"
        )
    loss.check(actor)
    if config.loss_mode in KL_ESTIMATORS and KL_ESTIMATORS[config.loss_mode] is not kl_k1:
        return [
            f"{where}.loss_mode={config.loss_mode} as an advantage (use_policy_gradient=True) has a gradient that is "
            f"not that of a divergence; set {where}.loss_mode=k1"
        ]
    return []
