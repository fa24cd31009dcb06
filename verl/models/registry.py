"""Traits of each model family: whether it runs packed, why not, and what else sets it apart.

A family is `config.model_type`. To add one, write one line here (or call `register_family` in the module that
`model.external_lib` names) and one in tests/models/test_transformer.py, which then compares logits and gradients of
packed and padded runs with those of each sequence alone.
"""

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from verl.models.attention.packed import use_packed_attention
from verl.models.attention.recurrent_layers import run_mixers_per_sequence
from verl.plugin.library_versions import falcon_h1_padded_because
from verl.utils.errors import ConfigError, PluginError

TRAITS = {
    "window": "layers that see the last tokens only",
    "soft-cap": "attention scores bounded by tanh",
    "sinks": "a trained score that takes attention from every token",
    "head sizes": "keys and values of different sizes (MLA)",
    "experts": "a router over experts",
    "state": "layers that carry a state from token to token",
}


@dataclass(frozen=True)
class Family:
    """How one family of models runs. `padded_because` is empty when it may run packed."""

    name: str  # config.model_type
    covers: str = ""  # the models of the family that people know
    traits: tuple[str, ...] = ()  # of TRAITS
    mixers: tuple[str, ...] = ()  # names of the submodules that carry a state
    padded_because: str = ""


FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Add a family, for the module that `model.external_lib` names."""
    unknown = sorted(set(family.traits) - TRAITS.keys())
    if unknown:
        raise PluginError(f"family {family.name!r} has the trait {unknown[0]!r}; known: {', '.join(TRAITS)}")
    if FAMILIES.setdefault(family.name, family) != family:
        raise PluginError(
            f"model family {family.name!r} is registered already, differently; drop your register_family call"
        )


_STATE = ("linear_attn",)
for _family in (
    Family("llama", "Llama 1 to 3.3, SmolLM2, TinyLlama"),
    Family("mistral", "Mistral 7B, Nemo", ("window",)),
    Family("qwen2", "Qwen2, Qwen2.5", ("window",)),
    Family("qwen3", "Qwen3"),
    Family("qwen2_moe", "Qwen1.5-MoE, Qwen2-MoE", ("experts",)),
    Family("qwen3_moe", "Qwen3-MoE", ("experts",)),
    Family("qwen3_next", "Qwen3-Next", ("experts", "state"), _STATE),
    Family("qwen3_5_text", "Qwen3.5, its text part", ("state",), _STATE),
    Family("qwen3_5_moe_text", "Qwen3.5-MoE, its text part", ("experts", "state"), _STATE),
    Family("gemma", "Gemma 1"),
    Family("gemma2", "Gemma 2", ("window", "soft-cap")),
    Family("gemma3_text", "Gemma 3, its text part", ("window",)),
    Family("phi", "Phi-1, Phi-1.5, Phi-2"),
    Family("phi3", "Phi-3, Phi-3.5, Phi-4", ("window",)),
    Family("phimoe", "Phi-3.5-MoE", ("experts",)),
    Family("deepseek_v2", "DeepSeek-V2", ("head sizes", "experts")),
    Family("deepseek_v3", "DeepSeek-V3, R1, Moonlight, Kimi-K2", ("head sizes", "experts")),
    Family("gpt_oss", "GPT-OSS", ("window", "sinks", "experts")),
    Family("mixtral", "Mixtral", ("experts",)),
    Family("olmo2", "OLMo 2"),
    Family("olmo3", "OLMo 3", ("window",)),
    Family("olmoe", "OLMoE", ("experts",)),
    Family("glm4", "GLM-4-0414"),
    Family("glm4_moe", "GLM-4.5, GLM-4.6", ("experts",)),
    Family("cohere2", "Command R7B, Command A", ("window",)),
    Family("granite", "Granite 3"),
    Family("starcoder2", "StarCoder2"),
    Family("smollm3", "SmolLM3"),
    Family("falcon_h1", "Falcon-H1", ("state",), ("mamba",), falcon_h1_padded_because()),
    Family("jamba", "Jamba", ("experts", "state"), padded_because="its Mamba layers take no sequence boundaries"),
    Family("bloom", "BLOOM", padded_because="its attention does not go through the library's attention interface"),
):
    register_family(_family)


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a model; an untested family runs padded and gives that as the reason."""
    known = FAMILIES.get(config.model_type)
    return known or Family(config.model_type, padded_because="nobody has tested it packed")


def runs_packed(config: PreTrainedConfig, wanted: bool) -> bool:
    """Whether to pack sequences; False when not `wanted` (model.use_remove_padding) or not possible."""
    return wanted and not family_of(config).padded_because


def has_full_attention(config: PreTrainedConfig) -> bool:
    """Whether every layer attends to the whole sequence, so that a prompt of several sequences can be computed once."""
    kinds = getattr(config, "layer_types", None) or []
    limited = getattr(config, "sliding_window", None) is not None and not kinds
    return not family_of(config).mixers and not limited and all("full" in kind for kind in kinds)


def num_experts(config: PreTrainedConfig) -> int:
    """Experts of a layer; 0 where the model has none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(count) for name in names if (count := getattr(config, name, None))), 0)


def check_prefix_sharing(config: PreTrainedConfig, packed: bool) -> None:
    """Refuses prefix sharing where each row is one sequence: padded models, and layers that carry a state."""
    family = family_of(config)
    if packed and family.mixers:
        raise ConfigError(
            f"actor.use_prefix_grouper=True cannot be used with model family {config.model_type!r}: its layers "
            f"{', '.join(family.mixers)} carry a state from token to token. Set actor.use_prefix_grouper=False"
        )
    if not packed:
        reason = family.padded_because or "model.use_remove_padding=False asks for it"
        raise ConfigError(
            f"actor.use_prefix_grouper=True cannot be used with model family {config.model_type!r}, which runs "
            f"padded: {reason}. Set actor.use_prefix_grouper=False"
        )


_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")  # rotary embeddings whose frequencies depend on the longest position


def check_sequence_parallel(config: PreTrainedConfig, packed: bool, size: int, num_ranks: int) -> None:
    """Refuses models whose sequences `size` of `num_ranks` cannot split; key/value heads may be fewer or not divide."""
    if size == 1:
        return
    key = f"ulysses_sequence_parallel_size={size}"
    if not packed:
        reason = family_of(config).padded_because or "model.use_remove_padding=False asks for it"
        raise ConfigError(
            f"{key} cannot be used with model family {config.model_type!r}, which runs padded: {reason}. "
            "Only ulysses_sequence_parallel_size=1 works"
        )
    text = config.get_text_config()
    heads = text.num_attention_heads
    if heads % size:
        sizes = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0 == num_ranks % n)
        raise ConfigError(
            f"{key} does not divide the model's {heads} attention heads; with {num_ranks} ranks use one of {sizes}"
        )


def check_sequences(config: PreTrainedConfig, longest: int, largest_token_id: int) -> None:
    """Refuses tokens without an embedding, and sequences so long that they change the rotary frequencies of others."""
    text = config.get_text_config()
    if largest_token_id >= text.vocab_size:
        raise ConfigError(
            f"token {largest_token_id} is not among the {text.vocab_size} that the model has embeddings for: the "
            "tokenizer (model.tokenizer_path) is of another model, or tokens were added to it alone"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (part for part in (rope, *rope.values()) if isinstance(part, dict)):
        positions = getattr(text, "max_position_embeddings", None) or longest
        limit = min(part.get("original_max_position_embeddings") or longest, positions)
        if part.get("rope_type") in _LENGTH_DEPENDENT_ROPE and longest > limit:
            raise ConfigError(
                f"a sequence has {longest} tokens, but rope_type={part['rope_type']} takes other frequencies for all "
                f"sequences of a forward with one of more than {limit}, so results would depend on how a batch is cut; "
                f"keep data.max_prompt_length + max_response_length (or data.max_length) at {limit} or less"
            )


def make_packed(model: nn.Module) -> None:
    """Keep sequences apart in every layer of a model whose family runs packed."""
    use_packed_attention(model)
    mixers = family_of(model.config).mixers
    if mixers:
        run_mixers_per_sequence(model, mixers)


class _GivenHidden(SimpleNamespace):
    """The output of a backbone, with None for all but the hidden states."""

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int) -> Any:
        return self.last_hidden_state if place == 0 else None


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Refuses a model whose logits are more than its head times the hidden states, over `logit_divisor`.

    Families scale and bound their logits under many names, so the model's own forward is asked what it makes of given
    hidden states. They are large, so that a bound shows.
    """
    head, backbone = model.get_output_embeddings(), model.base_model
    hidden = torch.linspace(-1, 1, 2 * head.weight.shape[1]).view(1, 2, -1).to(head.weight)
    hidden *= 100 / float(head(hidden).abs().max())
    backbone.forward = lambda *args, **kwargs: _GivenHidden(last_hidden_state=hidden)
    try:
        found = model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=hidden.device), use_cache=False).logits
    finally:
        del backbone.forward
    expected = head(hidden).float() / logit_divisor(model.config)
    if (found.float() - expected).abs().max() > 0.02 * expected.abs().max():
        caps = [name for name, cap in model.config.to_dict().items() if re.search("logits?_soft_?cap", name) and cap]
        advice = "train another"
        if "final_logit_softcapping" in caps:  # of the others, the forward needs a number
            advice = "set model.override_config.final_logit_softcapping=null to train the model without the bound"
        raise ConfigError(
            f"model family {model.config.model_type!r} scales or bounds its logits beyond hidden states times a matrix "
            f"({', '.join(f'{n}={getattr(model.config, n)}' for n in caps) or 'see its forward'}), which the head does "
            f"not do yet; {advice}"
        )


def check_router(config: PreTrainedConfig) -> None:
    """Refuses the auxiliary loss of routers: a product of means over a micro-batch, not a sum over micro-batches."""
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            f"model family {config.model_type!r} with output_router_logits=True asks for the router's auxiliary loss, "
            "whose value depends on how a batch is cut into micro-batches, so it is never added; set "
            "model.override_config.output_router_logits=false"
        )


def logit_divisor(config: PreTrainedConfig) -> float:
    """The divisor of the family's logits, besides the temperature."""
    if getattr(config, "logits_scaling", None) is not None:  # Granite
        return float(config.logits_scaling)
    if getattr(config, "logit_scale", None) is not None:  # Cohere
        return 1.0 / float(config.logit_scale)
    if getattr(config, "lm_head_multiplier", None) is not None:  # Falcon-H1
        return 1.0 / float(config.lm_head_multiplier)
    return 1.0


def capability_table() -> str:
    """Markdown: a row per family, a column per trait."""
    head = ["model_type", "models", "runs", *TRAITS]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for family in FAMILIES.values():
        runs = f"padded: {family.padded_because}" if family.padded_because else "packed"
        marks = ("yes" if trait in family.traits else "" for trait in TRAITS)
        lines.append(" | ".join((f"`{family.name}`", family.covers, runs, *marks)))
    return "\n".join(f"| {line} |" for line in lines) + "\n"
