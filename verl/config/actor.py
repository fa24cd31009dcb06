"""Configuration of the actor and of the reference policy."""

import math
from dataclasses import dataclass
from typing import Any

from verl.config.algorithm import KL_CHOICES, LOSS_AGG_MODES, POLICY_LOSSES
from verl.config.base import LARGEST_SEED, Section, accepts_keywords, key, section
from verl.config.checkpoint import CheckpointConfig
from verl.config.engine import FSDPEngineConfig, RoleConfig, VeOmniEngineConfig
from verl.config.optim import FSDPOptimizerConfig
from verl.config.profiler import ProfilerConfig

# keys that set the micro-batches of a pass: use a token budget, number of sequences, number of tokens
PPO_BATCHING_KEYS = ("use_dynamic_bsz", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu")
FORWARD_BATCHING_KEYS = ("use_dynamic_bsz", "forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu")
LOG_PROB_BATCHING_KEYS = (
    "log_prob_use_dynamic_bsz",
    "log_prob_micro_batch_size_per_gpu",
    "log_prob_max_token_len_per_gpu",
)
SFT_BATCHING_KEYS = ("use_dynamic_bsz", "micro_batch_size_per_gpu", "max_token_len_per_gpu")


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig(Section):
    """The policy loss and its constants."""

    loss_mode: str = key(
        "vanilla", f"Policy loss: {', '.join(POLICY_LOSSES)}, or your own; vanilla is PPO with dual clipping."
    )
    clip_cov_ratio: float = key(0.0002, "clip_cov: share of tokens without gradient.", minimum=0, maximum=1)
    clip_cov_lb: float = key(1.0, "clip_cov: lower bound of the covariance.")
    clip_cov_ub: float = key(5.0, "clip_cov: upper bound of the covariance.", maximum=math.inf)
    kl_cov_ratio: float = key(0.0002, "kl_cov: share of tokens penalised.", minimum=0, maximum=1)
    ppo_kl_coef: float = key(0.1, "kl_cov: coefficient.", minimum=0)
    dro_beta: float | None = key(None, "dro: penalty, > 0.")
    extra: dict[str, Any] = key({}, "Any keys of your own, for a policy loss that you registered.")


@dataclass(frozen=True, kw_only=True)
class RouterReplayConfig(Section):
    """Router replay: use the expert choice of another forward pass."""

    mode: str = key("disabled", "Where the expert choice comes from.", choices=("disabled", "R2", "R3"))


@accepts_keywords(rollout_n="")
@dataclass(frozen=True, kw_only=True)
class ActorConfig(RoleConfig):
    """Training of the policy."""

    strategy: str = key("fsdp2", "Training engine: fsdp2, fsdp, or one registered by name.")
    ppo_mini_batch_size: int = key(
        256, "Prompts per optimiser step, over all devices (each with rollout.n answers).", minimum=1
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "Sequences per forward and backward pass on one device.", minimum=1
    )
    use_dynamic_bsz: bool = key(False, "Fill micro-batches up to a token budget instead of a number of sequences.")
    ppo_max_token_len_per_gpu: int = key(16384, "Tokens per forward and backward pass on one device.", minimum=1)
    ppo_epochs: int = key(1, "Passes over each batch.", minimum=1)
    shuffle: bool = key(False, "Shuffle sequences before they are cut into mini-batches.")
    data_loader_seed: int = key(42, "Seed of that shuffle.", minimum=0, maximum=LARGEST_SEED)
    clip_ratio: float = key(0.2, "PPO clip range below and above 1.", minimum=0)
    clip_ratio_low: float = key(None, "Clip range below 1.", sibling="clip_ratio", minimum=0)
    clip_ratio_high: float = key(None, "Clip range above 1.", sibling="clip_ratio", minimum=0)
    clip_ratio_c: float = key(3.0, "Dual-clip bound of the ratio where the advantage is negative; > 1.", greater_than=1)
    tau_pos: float = key(1.0, "sapo: temperature where the advantage is positive.", greater_than=0)
    tau_neg: float = key(1.05, "sapo: temperature where the advantage is not positive.", greater_than=0)
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    loss_agg_mode: str = key("token-mean", "How token losses are aggregated.", choices=LOSS_AGG_MODES)
    loss_scale_factor: float | None = key(
        None, "Divisor of seq-mean-token-sum-norm; null is data.max_response_length.", greater_than=0
    )
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus.", minimum=-1e6, maximum=1e6)
    calculate_entropy: bool = key(
        False,
        "Report actor/entropy_loss, the entropy in the mini-batches of the update, even when its weight is 0; "
        "actor/entropy, before the update, is always reported.",
    )
    calculate_sum_pi_squared: bool = key(
        False,
        "Compute the column sum_pi_squared before the update also where no advantage estimator asks for it.",
    )
    use_kl_loss: bool = key(False, "Add kl_loss_coef x KL(policy, reference) to the loss.")
    kl_loss_coef: float = key(0.001, "Weight of the KL loss.", minimum=0, maximum=1e6)
    kl_loss_type: str = key("low_var_kl", "KL estimator of the loss.", choices=KL_CHOICES)
    use_prefix_grouper: bool | str = key(
        "auto",
        "Compute the shared prompt of a group once; auto does where layers have full attention, on GPUs if a first "
        "measurement says so.",
        choices=(True, False, "auto"),
    )
    use_torch_compile: bool = key(True, "Compile the elementwise operations of the output head on GPUs.")
    ulysses_sequence_parallel_size: int = key(
        1, "Short spelling of fsdp_config.ulysses_sequence_parallel_size.", minimum=1
    )
    entropy_from_logits_with_chunking: bool = key(False, "Short spelling of the key in fsdp_config.")
    entropy_from_logits_chunk_size: int = key(2048, "Short spelling of the key in fsdp_config.", minimum=1)
    entropy_checkpointing: bool = key(False, "Short spelling of the key in fsdp_config.")
    router_replay: RouterReplayConfig = section(RouterReplayConfig)
    optim: FSDPOptimizerConfig = section(FSDPOptimizerConfig, lr=1e-6)
    fsdp_config: FSDPEngineConfig = section(FSDPEngineConfig)
    veomni: VeOmniEngineConfig = section(VeOmniEngineConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    profiler: ProfilerConfig = section(ProfilerConfig)


@dataclass(frozen=True, kw_only=True)
class RefConfig(RoleConfig):
    """Forward passes of the reference policy."""

    n_gpus_per_node: int | None = key(
        None, "Devices per machine for the reference alone, one rank on each; null shares the actor's ranks.", minimum=1
    )
    strategy: str = key("fsdp2", "Engine of the reference.")
    log_prob_micro_batch_size_per_gpu: int | None = key(None, "Sequences per forward pass on one device.", minimum=1)
    log_prob_use_dynamic_bsz: bool = key(False, "Fill micro-batches up to a token budget.")
    log_prob_max_token_len_per_gpu: int = key(16384, "Tokens per forward pass on one device.", minimum=1)
    use_torch_compile: bool = key(True, "Compile the elementwise operations of the output head on GPUs.")
    ulysses_sequence_parallel_size: int = key(
        1, "Short spelling of fsdp_config.ulysses_sequence_parallel_size.", minimum=1
    )
    entropy_from_logits_with_chunking: bool = key(False, "Short spelling of the key in fsdp_config.")
    entropy_from_logits_chunk_size: int = key(2048, "Short spelling of the key in fsdp_config.", minimum=1)
    entropy_checkpointing: bool = key(False, "Short spelling of the key in fsdp_config.")
    router_replay: RouterReplayConfig = section(RouterReplayConfig)
    fsdp_config: FSDPEngineConfig = section(FSDPEngineConfig, forward_only=True)
    veomni: VeOmniEngineConfig = section(VeOmniEngineConfig, forward_only=True)
    profiler: ProfilerConfig = section(ProfilerConfig)


FSDPActorConfig = ActorConfig
