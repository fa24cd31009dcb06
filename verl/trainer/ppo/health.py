"""What a run's metrics say is wrong with it: one line each, once, with what to do."""

from collections import deque
from collections.abc import Mapping
from statistics import median

STEPS = 5  # a sign must hold for so many steps in a row
HISTORY = 20  # gradient norms to compare with
KL_LIMIT = 0.5  # nats between the policy before and after an update
REFERENCE_KL_LIMIT = 1.0  # nats per token between the policy and the reference
NORM_FACTOR = 50.0  # times the median gradient norm
ENTROPY_FACTOR, ENTROPY_FLOOR = 2.0, 0.5  # times the first entropy, and nats


class HealthCheck:
    """Reads the metrics of each step. `look` returns the lines that are new.

    `loss_agg_mode` also aggregates actor/kl_loss and actor/entropy: where it sums over tokens, they grow with the
    answers' length and have no fixed limit.
    """

    def __init__(self, loss_agg_mode: str = "token-mean") -> None:
        self.per_token = "sum" not in loss_agg_mode
        self.norms: deque[float] = deque(maxlen=HISTORY)
        self.first_entropy: float | None = None
        self.in_a_row: dict[str, int] = {}
        self.said: set[str] = set()

    def look(self, metrics: Mapping[str, float]) -> list[str]:
        """Sentences for the log about signs that this step completes; each sign is reported once."""
        lines = []
        for sign, (present, steps, sentence) in self._signs(metrics).items():
            self.in_a_row[sign] = self.in_a_row.get(sign, 0) + 1 if present else 0
            if self.in_a_row[sign] >= steps and sign not in self.said:
                self.said.add(sign)
                lines.append(sentence)
        norm = metrics.get("actor/grad_norm")
        if norm is not None:
            self.norms.append(norm)
        return lines

    def _signs(self, metrics: Mapping[str, float]) -> dict[str, tuple[bool, int, str]]:
        """By sign: whether this step shows it, in how many steps in a row it must, and what to say."""
        low, high = metrics.get("critic/score/min"), metrics.get("critic/score/max")
        kl, entropy = metrics.get("actor/ppo_kl", 0.0), metrics.get("actor/entropy")
        norm, usual = metrics.get("actor/grad_norm"), median(self.norms) if len(self.norms) >= STEPS else None
        if self.first_entropy is None:
            self.first_entropy = entropy
        start = self.first_entropy or 0.0
        loss_kl = metrics.get("actor/kl_loss", 0.0) if self.per_token else 0.0  # with use_kl_loss
        reference_kl = max(loss_kl, metrics.get("actor/reward_kl_penalty", 0.0))  # with use_kl_in_reward
        collapsed = entropy is not None and start > 0 and entropy < 0.02 * start
        scattered = entropy is not None and start > 0 and entropy > max(ENTROPY_FACTOR * start, ENTROPY_FLOOR)
        return {
            "zero": (
                low == high == 0.0,
                STEPS,
                f"every reward was 0 for {STEPS} steps: look at answers with `verl show RUN --worst 5`; the reward "
                "function may not find the answer in them, or the task is too hard to begin with",
            ),
            "flat": (
                metrics.get("reward/groups_without_spread") == 1.0 and low is not None and high != 0.0,
                STEPS,
                f"no group had two different rewards for {STEPS} steps, so group-relative advantages are 0 and nothing "
                "is learnt: take easier or harder prompts, or a reward with more than two values",
            ),
            "kl": (
                abs(kl) > KL_LIMIT,
                1,
                f"an update moved the policy by {kl:.3g} nats (actor/ppo_kl; healthy is below 0.1): lower "
                "actor_rollout_ref.actor.optim.lr, or take fewer epochs (ppo_epochs)",
            ),
            "reference": (
                reference_kl > REFERENCE_KL_LIMIT,
                STEPS,
                f"the policy left its reference: their KL was above {REFERENCE_KL_LIMIT:g} nat per token for {STEPS} "
                f"steps, {reference_kl:.3g} now; lower actor_rollout_ref.actor.optim.lr, or raise "
                "actor_rollout_ref.actor.kl_loss_coef (with use_kl_in_reward: algorithm.kl_ctrl.kl_coef)",
            ),
            "norm": (
                norm is not None and bool(usual) and norm > NORM_FACTOR * (usual or 0.0),
                1,
                f"the gradient norm was {norm or 0.0:.3g}, more than {NORM_FACTOR:g} times the median before: look at "
                "this step with `verl show`; actor_rollout_ref.actor.optim.clip_grad bounds what one step may do",
            ),
            "length": (
                metrics.get("response_length/clip_ratio", 0.0) >= 0.5,
                STEPS,
                f"half of the answers or more were cut at data.max_response_length for {STEPS} steps: raise it, or "
                "check that the model ends its answers (end-of-sequence token, chat template)",
            ),
            "entropy": (
                collapsed,
                STEPS,
                "the entropy of the policy is below 2 % of its first value: it says the same thing every time and can "
                "find nothing new; raise clip_ratio_high or entropy_coeff, or lower the learning rate",
            ),
            "scattered": (
                scattered and self.per_token,
                STEPS,
                f"the entropy of the policy has more than doubled, from {start:.3g} to {entropy or 0.0:.3g} nats, for "
                f"{STEPS} steps: it becomes random; lower actor_rollout_ref.actor.optim.lr or entropy_coeff",
            ),
            "lr": (
                metrics.get("actor/lr", 1.0) == 0.0,
                STEPS,
                f"the learning rate was 0 for {STEPS} steps, which changes nothing: check lr, lr_warmup_steps and "
                "lr_scheduler_type below actor_rollout_ref.actor.optim",
            ),
        }


def setup_lines(adv_estimator: str, samples_per_prompt: int) -> list[str]:
    """What is wrong before the first step."""
    if adv_estimator == "grpo" and samples_per_prompt == 1:
        return [
            "actor_rollout_ref.rollout.n=1 with algorithm.adv_estimator=grpo: a group of one has no other answer to "
            "compare with; its raw reward is the advantage. Set rollout.n to 4 or more"
        ]
    return []
