"""The algorithm: advantages, KL, group filtering, and rollout correction (rollout versus training log-probs)."""

import math
from dataclasses import dataclass, fields
from typing import Any

from verl.config.base import Section, key, section
from verl.utils.errors import ConfigError

PADDED_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOSS_AGG_MODES = (*PADDED_AGG_MODES, "prompt-mean-token-mean")  # the last needs groups, which padded rows do not say
KL_NAMES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_CHOICES = KL_NAMES + tuple(name + "+" for name in KL_NAMES)

ESTIMATORS = (  # those that verl/algorithms registers; others register theirs
    *("gae", "grpo", "grpo_vectorized", "grpo_passk", "gdpo", "rloo", "rloo_vectorized", "opo", "gpg", "remax"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "optimal_token_baseline", "tir_optimal_token_baseline"),
)
POLICY_LOSSES = (  # likewise
    *("vanilla", "cispo", "gspo", "sapo", "geo_mean", "gpg", "dro", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov"),
    "bypass_mode",
)


@dataclass(frozen=True, kw_only=True)
class KLControlConfig(Section):
    """Coefficient of the KL penalty in the reward."""

    type: str = key(
        "fixed", "Constant coefficient, or one adapted to bring the KL to target_kl.", choices=("fixed", "adaptive")
    )
    kl_coef: float = key(0.001, "Coefficient, or its initial value when adaptive.", minimum=0, maximum=1e6)
    horizon: int = key(10000, "Sequences over which an adaptive coefficient changes.", minimum=1)
    target_kl: float = key(0.1, "Target KL (nats) of an adaptive coefficient.", greater_than=0)


@dataclass(frozen=True, kw_only=True)
class FilterGroupsConfig(Section):
    """Dynamic sampling: replaces groups whose metric is constant."""

    enable: bool = key(False, "Replace groups in which the metric is the same for all answers by the next prompts.")
    metric: str | None = key(
        None, "score, seq_reward and seq_final_reward are the reward; any other is a number that it was returned with."
    )
    max_num_gen_batches: int = key(
        0, "Largest number of batches (of data.gen_batch_size) sampled for one step; 0 is no limit.", minimum=0
    )
    max_inflight_gen_batches: int = key(
        1, "Prompts answered at once, in units of train_batch_size; changes the time only.", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class PFPPOConfig(Section):
    """Policy filtration: by which weights the answers of a step are drawn again before the update."""

    reweight_method: str = key(
        "pow",
        "Weight of an answer with score s: |s|^weight_pow (pow), 1 for the largest and smallest score of the batch and "
        "0 for others (max_min), 0.4 for the largest and 0.1 for others (max_random).",
        choices=("pow", "max_min", "max_random"),
    )
    weight_pow: float = key(2.0, "Exponent of pow; 0 draws all answers alike.", minimum=0, maximum=100)


def _preset(**fixed: Any) -> Any:
    """A classmethod that returns the section with `fixed` values; `is_threshold` and `rs_threshold` replace theirs.

    `threshold` is the one of the two that the preset uses.
    """

    def build(
        cls: type,
        threshold: float | str | None = None,
        *,
        is_threshold: float | str | None = None,
        rs_threshold: float | str | None = None,
    ) -> Any:
        main_key = "rollout_is_threshold" if "rollout_is" in fixed else "rollout_rs_threshold"
        given = [(main_key, threshold), ("rollout_is_threshold", is_threshold), ("rollout_rs_threshold", rs_threshold)]
        return cls(**(fixed | {name: value for name, value in given if value is not None}))

    return classmethod(build)


@dataclass(frozen=True)
class RejectionRule:
    """Accepts what has an estimate of the divergence, in nats, from `low` to `high`."""

    name: str  # seq_mean_k1
    unit: str  # token, seq_sum, seq_mean or seq_max
    estimator: str  # k1 = -log ratio, k2 = (log ratio)^2 / 2, k3 = ratio - 1 - log ratio
    low: float
    high: float


def _rejection_rule(name: str, threshold: str) -> RejectionRule:
    """Bounds of k1 are ratios: lo_hi, or x for 1/x ... x. Those of k2 and k3 are one number above 0, in nats."""
    unit, _, estimator = name.rpartition("_")
    numbers = [float(number) for number in threshold.split("_")]
    where = f"algorithm.rollout_correction.rollout_rs_threshold={threshold} of {name}"
    if estimator != "k1":
        if len(numbers) > 1:
            raise ConfigError(f"{where} must be one number, the largest estimate that is kept, in nats; such as 0.01")
        return RejectionRule(name, unit, estimator, -math.inf, numbers[0])
    low, high = numbers if len(numbers) > 1 else (1 / numbers[0], numbers[0])
    if low > high:
        raise ConfigError(f"{where} keeps ratios from {low:g} to {high:g}, so none; give lo_hi, or a number above 1")
    return RejectionRule(name, unit, estimator, -math.log(high), -math.log(low) if low > 0 else math.inf)


_GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_PG = {"bypass_mode": True, "loss_type": "reinforce"}


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig(Section):
    """Importance weights and rejection for the gap between rollout and training log-probs."""

    rollout_is: str | None = key(None, "Importance weights; null is off.", choices=("token", "sequence"))
    rollout_is_threshold: float | str | None = key(
        2.0, "Larger weights are cut to this; 'lo_hi' zeroes weights outside. null only without rollout_is."
    )
    rollout_rs: str | None = key(
        None, "Comma list of rejection rules: token_, seq_sum_, seq_mean_, seq_max_ with k1, k2, k3."
    )
    rollout_rs_threshold: float | str | None = key(
        None, "One for all rules, or a comma list: ratios lo_hi (or x for 1/x ... x) for k1, nats for k2 and k3."
    )
    bypass_mode: bool = key(False, "Use the rollout's log-probs as the old ones; loss_mode is bypass_mode then.")
    loss_type: str = key(
        "ppo_clip",
        "Loss in bypass mode: PPO's, or the policy gradient times the weights.",
        choices=("ppo_clip", "reinforce"),
    )
    rollout_is_batch_normalize: bool = key(False, "Scale the weights of a batch to mean 1.")

    decoupled_token_is = _preset(rollout_is="token")
    decoupled_seq_is = _preset(rollout_is="sequence")
    decoupled_token_icepop = _preset(rollout_is="token", rollout_is_threshold="0.5_5.0")
    decoupled_seq_is_rs = _preset(rollout_is="sequence", rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0")
    decoupled_geo_rs = _preset(**_GEO)
    decoupled_geo_rs_seq_tis = _preset(rollout_is="sequence", **_GEO)
    decoupled_geo_rs_token_tis = _preset(rollout_is="token", **_GEO)
    decoupled_k3_rs = _preset(**_K3)
    decoupled_k3_rs_seq_tis = _preset(rollout_is="sequence", **_K3)
    decoupled_k3_rs_token_tis = _preset(rollout_is="token", **_K3)
    bypass_ppo_clip = _preset(bypass_mode=True)
    bypass_ppo_clip_geo_rs = _preset(bypass_mode=True, **_GEO)
    bypass_ppo_clip_k3_rs = _preset(bypass_mode=True, **_K3)
    bypass_pg_is = _preset(rollout_is="sequence", **_PG)
    bypass_pg_geo_rs = _preset(**_PG, **_GEO)
    bypass_pg_geo_rs_seq_tis = _preset(rollout_is="sequence", **_PG, **_GEO)
    bypass_pg_geo_rs_token_tis = _preset(rollout_is="token", **_PG, **_GEO)
    disabled = _preset()

    @property
    def weighs_loss(self) -> bool:
        """Whether losses are multiplied by importance weights; in bypass mode the ratio of PPO's loss is one."""
        return self.rollout_is is not None and not (self.bypass_mode and self.loss_type == "ppo_clip")

    @property
    def corrects(self) -> bool:
        """Whether a batch must be compared with the policy before it is trained on."""
        return self.weighs_loss or self.rollout_rs is not None

    def check_thresholds(self) -> None:
        """ConfigError where a threshold does not fit what it is for."""
        self.rejection_rules()
        if self.rollout_is is not None and self.rollout_is_threshold is None:
            raise ConfigError(
                f"algorithm.rollout_correction.rollout_is={self.rollout_is} needs rollout_is_threshold, which is null: "
                "leave it out (2.0), or give the largest weight"
            )

    def rejection_rules(self) -> list[RejectionRule]:
        """The rules of `rollout_rs` with their bounds; ConfigError where these do not fit."""
        if self.rollout_rs is None:
            return []
        if self.rollout_rs_threshold is None:
            raise ConfigError(
                f"algorithm.rollout_correction.rollout_rs={self.rollout_rs} needs rollout_rs_threshold: bounds of the "
                "ratio for k1, such as 0.999_1.001, and the largest estimate in nats for k2 and k3, such as 0.01"
            )
        names = [name.strip() for name in self.rollout_rs.split(",")]
        bounds = [bound.strip() for bound in str(self.rollout_rs_threshold).split(",")]
        if len(bounds) not in (1, len(names)):
            raise ConfigError(
                f"algorithm.rollout_correction.rollout_rs_threshold={self.rollout_rs_threshold} has {len(bounds)} "
                f"bounds for the {len(names)} rules of rollout_rs={self.rollout_rs}; give one for all, or one for each"
            )
        bounds = bounds * len(names) if len(bounds) == 1 else bounds
        return [_rejection_rule(*pair) for pair in zip(names, bounds, strict=True)]


def correction_presets() -> dict[str, dict[str, Any]]:
    """The keys that each preset of `RolloutCorrectionConfig` sets, by its name."""
    plain = RolloutCorrectionConfig()
    names = [name for name, member in vars(RolloutCorrectionConfig).items() if isinstance(member, classmethod)]
    made = {name: getattr(RolloutCorrectionConfig, name)() for name in names}
    return {
        name: {field.name: preset[field.name] for field in fields(preset) if preset[field.name] != plain[field.name]}
        for name, preset in made.items()
    }


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(Section):
    """Advantage estimation and the KL penalty."""

    adv_estimator: str = key("gae", f"Advantage estimator: {', '.join(ESTIMATORS)}, or your own.")
    gamma: float = key(1.0, "Discount per token.", minimum=0, maximum=1)
    lam: float = key(1.0, "Lambda of generalised advantage estimation.", minimum=0, maximum=1)
    norm_adv_by_std_in_grpo: bool = key(True, "Divide GRPO advantages by the group's standard deviation.")
    gdpo_reward_keys: list[str] | None = key(
        None, "Parts of the reward, which gdpo normalises one by one; the names of reward.weights."
    )
    gdpo_reward_weights: list[float] | None = key(
        None, "Weight of each of these parts, as in reward.weights; null is 1 for each."
    )
    use_kl_in_reward: bool = key(False, "Subtract kl_coef x KL(policy, reference) from each token's reward.")
    kl_penalty: str = key("kl", "KL estimator used in the reward.", choices=KL_CHOICES)
    kl_ctrl: KLControlConfig = section(KLControlConfig)
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
    use_pf_ppo: bool = key(
        False,
        "With gae: draw the answers of a step again, with replacement, by weights from their scores, and train on "
        "those (policy filtration, PF-PPO).",
    )
    pf_ppo: PFPPOConfig = section(PFPPOConfig)
    extra: dict[str, Any] = key({}, "Any keys of your own, for an advantage estimator that you registered.")
