"""The models that a configuration trains, each with its loss, and small random replacements for them."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedConfig, Qwen3Config

from verl.algorithms.likelihood import LikelihoodLoss
from verl.algorithms.losses import ActorLoss, TokenLoss, aggregation_mode, make_value_loss
from verl.commands.certify import plain_gradient
from verl.commands.certify.float64 import keep_float64
from verl.config import FSDPEngineConfig, HFModelConfig, PreferenceConfig, RunConfig, SFTConfig
from verl.config.actor import PPO_BATCHING_KEYS, SFT_BATCHING_KEYS
from verl.config.check import trained_actor
from verl.config.engine import EngineConfig
from verl.data.micro_batches import MicroBatching
from verl.models import lora
from verl.models.load import build_config, load_causal_lm, load_value_model, no_progress_bars
from verl.models.performance import has_dropout
from verl.models.tensor_file import write_tensors
from verl.utils.errors import ConfigError
from verl.utils.external_code import import_external
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.torch_engine import TorchEngine
from verl.workers.engine_worker import micro_batching

TINY_LORA_RANK = 4
TINY_SIZES: dict[str, int] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}


@dataclass(frozen=True)
class Subject:
    """One trained model: the settings of its engine, its loss, and the definition of that loss."""

    role: str
    strategy: str
    model: HFModelConfig
    engine: FSDPEngineConfig
    optim: Any
    micro: MicroBatching
    loss: TokenLoss
    reference_loss: plain_gradient.ReferenceLoss
    loss_agg_mode: str
    scale: float | None  # the constant length of seq-mean-token-sum-norm
    temperature: float = 1.0
    value_head: bool = False

    @property
    def model_type(self) -> str:
        return "value_model" if self.value_head else "language_model"


def build_engine(subject: Subject) -> TorchEngine:
    """The subject's engine, initialised as in training; ConfigError if its forward pass is random."""
    new = EngineRegistry.new(subject.model_type, subject.strategy, subject.model, subject.engine, subject.optim)
    engine = cast(TorchEngine, new)
    engine.initialize()
    if engine.compute_dtype == torch.float64:
        keep_float64(engine.model)
    if has_dropout(engine.model):
        raise ConfigError(
            "dropout or router jitter gives a different gradient each time; set it to 0 in model.override_config "
            "to certify"
        )
    return engine


def subjects(config: RunConfig | SFTConfig) -> list[Subject]:
    """The policy and, if enabled, the critic; or the model of fine-tuning. external_lib is imported before."""
    model = config.actor_rollout_ref.model if isinstance(config, RunConfig) else config.model
    import_external(model.external_lib)
    if isinstance(config, PreferenceConfig):
        raise ConfigError("verl certify checks losses of tokens, not of pairs; name another preset")
    if isinstance(config, SFTConfig):
        return [sft_subject(config)]
    critic = config.critic.enable
    if critic is None:
        critic = config.algorithm.adv_estimator == "gae"
    return [actor_subject(config), critic_subject(config)] if critic else [actor_subject(config)]


def actor_subject(config: RunConfig) -> Subject:
    part, rollout = trained_actor(config), config.actor_rollout_ref.rollout
    loss = ActorLoss(part, correction=config.algorithm.rollout_correction)
    scale = part.loss_scale_factor or config.data.max_response_length
    return Subject(
        role="actor",
        strategy=part.strategy,
        model=config.actor_rollout_ref.model,
        engine=fsdp_settings(part.engine, part.strategy),
        optim=part.optim,
        micro=micro_batching(part, PPO_BATCHING_KEYS),
        loss=loss,
        reference_loss=plain_gradient.actor_loss(part, loss, scale),
        loss_agg_mode=aggregation_mode(part),
        scale=scale,
        temperature=rollout.temperature if rollout.do_sample and rollout.temperature > 0 else 1.0,
    )


def critic_subject(config: RunConfig) -> Subject:
    part = config.critic
    scale = part.loss_scale_factor or config.data.max_response_length
    return Subject(
        role="critic",
        strategy=part.strategy,
        model=part.model,
        engine=fsdp_settings(part.engine, part.strategy),
        optim=part.optim,
        micro=micro_batching(part, PPO_BATCHING_KEYS),
        loss=make_value_loss(part),
        reference_loss=plain_gradient.value_loss(part, scale),
        loss_agg_mode=part.loss_agg_mode,
        scale=scale,
        value_head=True,
    )


def fsdp_settings(engine: EngineConfig, strategy: str) -> FSDPEngineConfig:
    """`engine`, the section of `strategy`; ConfigError for another one than FSDP's, whose variants are unknown here."""
    if not isinstance(engine, FSDPEngineConfig):
        raise ConfigError(f"strategy={strategy} cannot be certified; certify with strategy=fsdp2 or fsdp")
    return engine


def sft_subject(config: SFTConfig) -> Subject:
    data = config.data
    return Subject(
        role="model",
        strategy=config.engine.strategy,
        model=config.model,
        engine=fsdp_settings(config.training_engine, config.engine.strategy),
        optim=config.optim,
        micro=micro_batching(data, SFT_BATCHING_KEYS),
        loss=LikelihoodLoss(),
        reference_loss=plain_gradient.likelihood_loss,
        loss_agg_mode="token-mean",
        scale=None,
    )


def with_tiny_model(subject: Subject, folder: Path, seed: int) -> Subject:
    """The subject on a random two-layer model of the same family (Qwen3 without a model.path), saved in `folder`."""
    config = Qwen3Config(tie_word_embeddings=True) if subject.model.path is None else build_config(subject.model)[0]
    config = shrink_config(config)
    auto_class: Any = AutoModelForCausalLM
    if subject.value_head:
        auto_class, config.num_labels = AutoModelForTokenClassification, 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():  # large enough that so small a model distinguishes its inputs
            parameter.data += 0.05 * torch.randn(parameter.shape)
    with no_progress_bars():
        model.save_pretrained(folder)
    settings = dataclasses.replace(subject.model, path=str(folder), hf_config_path=None, override_config={})
    if settings.lora_adapter_path is not None:  # the adapter belongs to the full-size model
        settings = dataclasses.replace(settings, lora_adapter_path=None, lora_rank=settings.lora_rank or TINY_LORA_RANK)
    return dataclasses.replace(subject, model=settings)


def with_random_adapters(subject: Subject, folder: Path, seed: int) -> Subject:
    """The subject with random LoRA adapters, saved in `folder`; new ones have B = 0, so A would get no gradient."""
    settings = subject.model
    assert settings.path is not None
    load = load_value_model if subject.value_head else load_causal_lm
    model: Any = load(settings.path, torch.float32, build_config(settings)[0])
    lora.add_adapters(model, settings, subject.engine.seed)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            noise = 0.05 * torch.randn(parameter.shape, generator=generator)
            tensors[lora.adapter_key(name)] = parameter.detach() + noise
    lora.write_adapter_config(model, folder)
    write_tensors(folder / lora.ADAPTER_WEIGHTS, tensors)
    return dataclasses.replace(subject, model=dataclasses.replace(settings, lora_adapter_path=str(folder)))


def shrink_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """`config` itself, changed to a few thousand parameters; keeps the kind of query grouping and the layer types."""
    queries_per_key = config.num_attention_heads // (
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    )
    kinds = getattr(config, "layer_types", None)
    for name, value in TINY_SIZES.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    if getattr(config, "qk_rope_head_dim", None) is not None and hasattr(config, "head_dim"):
        config.head_dim = config.qk_rope_head_dim  # the size of the rotary embedding tables
    config.num_attention_heads = 4
    if getattr(config, "num_key_value_heads", None) is not None:
        config.num_key_value_heads = {1: 4}.get(queries_per_key, 2)
    if kinds:
        config.layer_types = (list(dict.fromkeys(kinds)) * 2)[: max(2, len(set(kinds)))]
        config.num_hidden_layers = len(config.layer_types)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, None)
    return config
