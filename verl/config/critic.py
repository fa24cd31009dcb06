"""The value model."""

from dataclasses import dataclass

from verl.config.algorithm import LOSS_AGG_MODES
from verl.config.base import LARGEST_SEED, accepts_keywords, key, section
from verl.config.checkpoint import CheckpointConfig
from verl.config.engine import FSDPEngineConfig, RoleConfig, VeOmniEngineConfig
from verl.config.model import HFModelConfig
from verl.config.optim import FSDPOptimizerConfig
from verl.config.profiler import ProfilerConfig


@accepts_keywords(rollout_n="")
@dataclass(frozen=True, kw_only=True)
class CriticConfig(RoleConfig):
    """Training of the value model."""

    n_gpus_per_node: int | None = key(
        None, "Devices per machine for the critic alone, one rank on each; null shares the actor's ranks.", minimum=1
    )
    enable: bool | None = key(None, "Train a critic; null is true only when adv_estimator is gae.")
    strategy: str = key("fsdp2", "Training engine of the critic.")
    ppo_mini_batch_size: int = key(256, "Prompts per optimiser step, over all devices.", minimum=1)
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "Sequences per forward and backward pass on one device.", minimum=1
    )
    use_dynamic_bsz: bool = key(False, "Fill micro-batches up to a token budget.")
    ppo_max_token_len_per_gpu: int = key(32768, "Tokens per forward and backward pass on one device.", minimum=1)
    forward_micro_batch_size_per_gpu: int | None = key(
        None, "Sequences per forward pass without gradient.", sibling="ppo_micro_batch_size_per_gpu", minimum=1
    )
    forward_max_token_len_per_gpu: int = key(
        None, "Tokens per forward pass without gradient.", sibling="ppo_max_token_len_per_gpu", minimum=1
    )
    ppo_epochs: int = key(1, "Passes over each batch.", minimum=1)
    shuffle: bool = key(False, "Shuffle sequences before they are cut into mini-batches.")
    data_loader_seed: int = key(42, "Seed of that shuffle.", minimum=0, maximum=LARGEST_SEED)
    cliprange_value: float = key(0.5, "Clip range of the value loss.", minimum=0)
    normalize_values: bool = key(
        False,
        "Train the critic on (return - running mean) / running deviation of the returns; its values are scaled back.",
    )
    loss_agg_mode: str = key("token-mean", "How token losses are aggregated.", choices=LOSS_AGG_MODES)
    loss_scale_factor: float | None = key(
        None, "Divisor of seq-mean-token-sum-norm; null is data.max_response_length.", greater_than=0
    )
    ulysses_sequence_parallel_size: int = key(1, "Short spelling of fsdp.ulysses_sequence_parallel_size.", minimum=1)
    model: HFModelConfig = section(HFModelConfig)
    optim: FSDPOptimizerConfig = section(FSDPOptimizerConfig, lr=1e-5)
    fsdp: FSDPEngineConfig = section(FSDPEngineConfig)
    veomni: VeOmniEngineConfig = section(VeOmniEngineConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    profiler: ProfilerConfig = section(ProfilerConfig)


FSDPCriticConfig = CriticConfig
