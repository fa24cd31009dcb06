"""Signs of a sick run in its metrics: one table, for the lines of the run and for alerts of Prometheus."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

STEPS = 5  # a sign must hold for so many steps in a row


@dataclass(frozen=True)
class Step:
    """The input of a sign: the metrics of a step, and numbers of the run. An alert looks at the last ones, too."""

    metrics: Mapping[str, float]
    usual_norm: float = 0.0  # median gradient norm of the steps before; 0 while they are too few
    first_entropy: float = 0.0
    per_token: bool = True  # actor/kl_loss and actor/entropy do not grow with the answers' length
    lost: float = 0.0  # rollout replicas
    overdue_s: float = 0.0  # beyond ten minutes and five times this step, without another
    recent_errors: float = 0.0  # answers whose reward failed, in the last 15 minutes

    def get(self, name: str, default: float = 0.0) -> float:
        return self.metrics.get(name, default)


@dataclass(frozen=True)
class Sign:
    """Something is wrong where a number of a step is above `limit`: `metric`, or what `value` makes of the step.

    `sentence` says what, and what to do; its fields are `value`, `limit`, `steps` and `step`. A run logs it once, after
    `steps` in a row that show the sign. Prometheus raises a sign with a `summary`, after `for_s`.
    """

    name: str
    metric: str
    sentence: str
    value: Callable[[Step], float | None] | None = None
    limit: float = 0.0
    steps: int = STEPS
    summary: str = ""
    for_s: int = 0
    promql: str = ""  # the metric above the limit, unless this says otherwise

    def number(self, step: Step) -> float | None:
        return self.value(step) if self.value else step.metrics.get(self.metric)

    def is_shown(self, step: Step) -> bool:
        number = self.number(step)
        return number is not None and number > self.limit


SIGNS = (
    Sign(
        "zero",
        "critic/score/max",
        "every reward was 0 for {steps} steps: look at answers with `verl show RUN --worst 5`; the reward function may "
        "not find the answer in them, or the task is too hard to begin with",
        value=lambda step: step.get("critic/score/min", 1.0) == step.get("critic/score/max", 1.0) == 0.0,
    ),
    Sign(
        "flat",
        "reward/groups_without_spread",
        "no group had two different rewards for {steps} steps, so group-relative advantages are 0 and nothing is "
        "learnt: take easier or harder prompts, or a reward with more than two values",
        value=lambda step: step.get("reward/groups_without_spread") == 1.0 and step.get("critic/score/max") != 0.0,
    ),
    Sign(
        "outputs",
        "reward/unequal_outputs",
        "outputs of one conversation had different rewards: the reward of the conversation is their mean, and all of "
        "them get its advantage; give them one reward (reward_score of AgentLoopOutput) if it is not so",
        steps=1,
    ),
    Sign(
        "kl",
        "actor/ppo_kl",
        "an update moved the policy by {step.metrics[actor/ppo_kl]:.3g} nats (actor/ppo_kl; healthy is below 0.1): "
        "lower actor_rollout_ref.actor.optim.lr, or take fewer epochs (ppo_epochs)",
        steps=1,
        value=lambda step: abs(step.get("actor/ppo_kl")),
        limit=0.5,  # nats between the policy before and after an update
    ),
    Sign(
        "reference",
        "actor/kl_loss",
        "the policy left its reference: their KL was above {limit:g} nat per token for {steps} steps, {value:.3g} now; "
        "lower actor_rollout_ref.actor.optim.lr, or raise actor_rollout_ref.actor.kl_loss_coef (with use_kl_in_reward: "
        "algorithm.kl_ctrl.kl_coef)",
        value=lambda step: max(
            step.get("actor/kl_loss") if step.per_token else 0.0, step.get("actor/reward_kl_penalty")
        ),
        limit=1.0,  # nats per token between the policy and the reference
    ),
    Sign(
        "norm",
        "actor/grad_norm",
        "the gradient norm was {step.metrics[actor/grad_norm]:.3g}, more than {limit:g} times the median before: look "
        "at this step with `verl show`; actor_rollout_ref.actor.optim.clip_grad bounds what one step may do",
        steps=1,
        value=lambda step: step.get("actor/grad_norm") / step.usual_norm if step.usual_norm else None,
        limit=50.0,
    ),
    Sign(
        "length",
        "response_length/clip_ratio",
        "half of the answers or more were cut at data.max_response_length for {steps} steps: raise it, or check that "
        "the model ends its answers (end-of-sequence token, chat template)",
        value=lambda step: step.get("response_length/clip_ratio") >= 0.5,
    ),
    Sign(
        "entropy",
        "actor/entropy",
        "the entropy of the policy is below 2 % of its first value: it says the same thing every time and can find "
        "nothing new; raise clip_ratio_high or entropy_coeff, or lower the learning rate",
        value=lambda step: step.get("actor/entropy", step.first_entropy) < 0.02 * step.first_entropy,
    ),
    Sign(
        "scattered",
        "actor/entropy",
        "the entropy of the policy has more than doubled, from {step.first_entropy:.3g} to "
        "{step.metrics[actor/entropy]:.3g} nats, for {steps} steps: it becomes random; lower "
        "actor_rollout_ref.actor.optim.lr or entropy_coeff",
        value=lambda step: (
            step.per_token and step.first_entropy > 0 and step.get("actor/entropy") > max(2 * step.first_entropy, 0.5)
        ),
    ),
    Sign(
        "rounded",
        "actor/updates_lost",
        "rounding swallowed more than half of the updates for {steps} steps (actor/updates_lost): set "
        "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32 and dtype=bf16",
        limit=0.5,
    ),
    Sign(
        "lr",
        "actor/lr",
        "the learning rate was 0 for {steps} steps, which changes nothing: check lr, lr_warmup_steps and "
        "lr_scheduler_type below actor_rollout_ref.actor.optim",
        value=lambda step: step.get("actor/lr", 1.0) == 0.0,
    ),
    Sign(
        "VerlNoStep",
        "timing_s/step",
        "The last step is older than five of its kind and ten minutes. docs/scale/when_a_run_hangs.md.",
        lambda step: step.overdue_s,
        summary="no step ended for {{ $value | humanizeDuration }}",
        for_s=60,
        promql="time() - verl_last_step_timestamp_seconds > on(instance, experiment) 600 + 5 * "
        'verl_stage_seconds{stage="step"}',
        limit=60,
    ),
    Sign(
        "VerlGone",
        "",
        "The run has ended, or its machine is gone.",
        summary="the driver does not answer at {{ $labels.instance }}",
        for_s=120,
        promql='up{job="verl"} == 0',
    ),
    Sign(
        "VerlStaleness",
        "training/off_policy/trajectory_staleness/max",
        "The rollout is slower than the trainer; lower the bound of staleness, or add replicas.",
        summary="answers are trained on {{ $value }} versions after they were sampled",
        for_s=600,
        limit=8,
    ),
    Sign(
        "VerlMismatch",
        "rollout_corr/k3_kl",
        "Both compute the same policy; see docs/train/rollout_correction.md.",
        summary="rollout and trainer differ by {{ $value }} nats a token",
        for_s=600,
        limit=0.05,
    ),
    Sign(
        "VerlRewardErrors",
        "reward/errors",
        "The reward function fails (reward.on_error=count); see the ledger and docs/rewards/own_reward.md.",
        lambda step: step.recent_errors,
        summary="{{ $value }} answers without a reward in 15 minutes",
        promql="increase(verl_reward_errors_total[15m]) > 0",
    ),
    Sign(
        "VerlReplicaLost",
        "",
        "The others do their work; the run goes on more slowly.",
        lambda step: step.lost,
        summary="{{ $value }} rollout replicas are lost",
        promql="verl_replicas_lost > 0",
    ),
)
LOGGED = [sign for sign in SIGNS if not sign.summary]
ALERTS = [sign for sign in SIGNS if sign.summary]
