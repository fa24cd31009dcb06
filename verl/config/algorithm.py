"""The algorithm: advantages, KL, group filtering, and rollout correction (rollout versus training log-probs)."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import Section, key, section

PADDED_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOSS_AGG_MODES = (*PADDED_AGG_MODES, "prompt-mean-token-mean")  # the last needs groups, which padded rows do not say
KL_NAMES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_CHOICES = KL_NAMES + tuple(name + "+" for name in KL_NAMES)


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


_GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_PG = {"bypass_mode": True, "loss_type": "reinforce"}


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig(Section):
    """Importance weights and rejection for the gap between rollout and training log-probs."""

    rollout_is: str | None = key(None, "Importance weights; null is off.", choices=("token", "sequence"))
    rollout_is_threshold: float | str = key(2.0, "Upper limit of the weights; 'lo_hi' zeroes weights outside.")
    rollout_rs: str | None = key(None, "Comma list of rejection rules; null is off.")
    rollout_rs_threshold: float | str | None = key(None, "Bound of the rejection: one for all rules, or one per rule.")
    bypass_mode: bool = key(False, "Use the rollout's log-probs as the old ones.")
    loss_type: str = key("ppo_clip", "Loss in bypass mode.", choices=("ppo_clip", "reinforce"))
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


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(Section):
    """Advantage estimation and the KL penalty."""

    adv_estimator: str = key(
        "gae",
        "Advantage estimator: gae, grpo, grpo_passk, gdpo, rloo, opo, gpg, remax, reinforce_plus_plus, "
        "reinforce_plus_plus_baseline, optimal_token_baseline, tir_optimal_token_baseline, or your own.",
    )
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
    extra: dict[str, Any] = key({}, "Any keys of your own, for an advantage estimator that you registered.")
