"""The model, its tokenizer and its adapters."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import Section, key, section


@dataclass(frozen=True, kw_only=True)
class FusedKernelConfig(Section):
    """Kernels of the fused head."""

    impl_backend: str = key("torch", "Kernels of the fused head: torch, or triton (GPUs).", choices=("torch", "triton"))


@dataclass(frozen=True, kw_only=True)
class HFModelConfig(Section):
    """A Hugging Face model folder and how it is run."""

    path: str | None = key(None, "Folder of the model (config.json, safetensors, tokenizer). Required.")
    model_type: str = key("language_model", "Head of the model.", choices=("language_model", "value_model"))
    hf_config_path: str | None = key(None, "Folder of another config.json; null is path.")
    tokenizer_path: str | None = key(None, "Folder of another tokenizer; null is path.")
    custom_chat_template: str | None = key(None, "Jinja chat template that replaces the tokenizer's.")
    external_lib: str | list[str] | None = key(None, "Modules, or Python files, imported before the model is built.")
    override_config: dict[str, Any] = key({}, "Values that replace those of config.json, e.g. attn_implementation.")
    enable_gradient_checkpointing: bool = key(True, "Recompute activations in the backward pass.")
    enable_activation_offload: bool = key(False, "Keep saved activations in CPU memory.")
    use_remove_padding: bool = key(True, "Pack sequences without padding; false pads them.")
    use_liger: bool = key(False, "Liger kernels for norm, MLP and rotary embedding (GPU).")
    compile_layers: str = key(
        "auto",
        "Compile the decoder layers: inductor generates kernels, aot_eager none (a test); auto is inductor on one "
        "GPU for Llama-like models, without use_liger and enable_activation_offload.",
        choices=("auto", "off", "inductor", "aot_eager"),
    )
    use_fused_kernels: bool = key(False, "Use the fused head (head_mode auto).")
    fused_kernel_options: FusedKernelConfig = section(FusedKernelConfig)
    lora_rank: int = key(0, "Rank of LoRA adapters; 0 trains the whole model.", minimum=0)
    lora_alpha: int = key(16, "LoRA scale: updates are multiplied by lora_alpha / lora_rank.", greater_than=0)
    target_modules: str | list[str] = key("all-linear", "Modules that get adapters: all-linear, a pattern, or names.")
    exclude_modules: str | list[str] | None = key(None, "Modules that get none: a pattern or names.")
    lora_adapter_path: str | None = key(None, "Folder of adapters to start from.")


@dataclass(frozen=True, kw_only=True)
class PublishedAdaptersConfig(Section):
    """How LoRA adapters get to the rollout engine."""

    merge: bool | None = key(
        None, "Publish whole weights, adapters merged in; false: the adapters alone (vllm). null is false with vllm."
    )
    fully_sharded_loras: bool = key(False, "Let vLLM shard both matrices of an adapter over its tensor-parallel ranks.")


@dataclass(frozen=True, kw_only=True)
class PolicyModelConfig(HFModelConfig):
    """The model that a rollout engine samples from."""

    lora: PublishedAdaptersConfig = section(PublishedAdaptersConfig)
