"""Training engines: how a model is sharded, offloaded and computed."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import LARGEST_SEED, Section, key, section

STRATEGIES = ("fsdp", "fsdp2")  # the engines that are not a plug-in's


@dataclass(frozen=True, kw_only=True)
class WrapPolicyConfig(Section):
    """Which modules become FSDP units."""

    transformer_layer_cls_to_wrap: list[str] | None = key(
        None, "Classes of the modules that become units; null is the decoder layers of the model's family."
    )
    min_num_params: int = key(0, "Smallest number of parameters of a unit; 0 wraps by class.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class FSDPEngineConfig(Section):
    """The FSDP engine, from one device to many."""

    strategy: str = key("fsdp2", "fsdp2, or fsdp for the original FSDP; no difference on one rank.")
    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig)
    param_offload: bool = key(False, "Keep parameters in CPU memory while the engine is idle.")
    optimizer_offload: bool = key(False, "Keep optimiser state in CPU memory while the engine is idle.")
    offload_policy: bool = key(False, "FSDP2's own CPU offload, during training too; needs several ranks.")
    reshard_after_forward: bool = key(True, "Reshard parameters after the forward pass (ZeRO-3); false is ZeRO-2.")
    fsdp_size: int = key(-1, "Ranks that shard one copy of the parameters; -1 is all of them, fewer is HSDP.")
    forward_prefetch: bool = key(False, "All-gather the next layer's parameters while the current one computes.")
    model_dtype: str = key("fp32", "Data type of the parameters.")
    dtype: str = key(
        "auto",
        "Data type of the forward and backward passes; auto is model_dtype on a CPU and bfloat16 on other devices.",
    )
    mixed_precision: dict[str, Any] | None = key(
        None, "param_dtype, reduce_dtype, buffer_dtype of FSDP; null follows dtype."
    )
    seed: int = key(42, "Seed of the engine's random numbers.", minimum=0, maximum=LARGEST_SEED)
    full_determinism: bool = key(False, "Only deterministic kernels; slower.")
    ulysses_sequence_parallel_size: int = key(
        1, "Ranks that split each sequence (Ulysses); needs use_remove_padding.", minimum=1
    )
    use_torch_compile: bool = key(True, "Compile the elementwise operations of the output head on GPUs.")
    head_mode: str = key(
        "auto",
        "How log-probs are computed: eager stores all logits, chunked and fused do not, auto selects.",
        choices=("auto", "eager", "chunked", "fused"),
    )
    entropy_from_logits_with_chunking: bool = key(
        False, "Compute log-probs and entropy in chunks of tokens (head_mode chunked or fused)."
    )
    entropy_from_logits_chunk_size: int = key(2048, "Tokens per chunk of logits in the chunked head.", minimum=1)
    entropy_checkpointing: bool = key(False, "Recompute entropy in the backward pass (head_mode chunked or fused).")
    forward_only: bool = key(False, "No optimiser and no gradients.")


@dataclass(frozen=True, kw_only=True)
class VeOmniEngineConfig(Section):
    """The VeOmni engine (accepted and checked; the engine itself is still to come)."""

    param_offload: bool = key(False, "Keep parameters in CPU memory while the engine is idle.")
    optimizer_offload: bool = key(False, "Keep optimiser state in CPU memory while the engine is idle.")
    fsdp_size: int = key(-1, "Ranks that shard one copy of the parameters; -1 is all of them.")
    ulysses_parallel_size: int = key(1, "Ranks that split each sequence (Ulysses).")
    expert_parallel_size: int = key(1, "Ranks that share one set of experts.")
    attn_implementation: str = key("flash_attention_2", "Attention kernel by VeOmni's name.")
    moe_implementation: str = key("fused", "Expert kernel.", choices=("eager", "fused"))
