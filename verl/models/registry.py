"""What each model family can do: who may run packed, who cannot and why.

A family is `config.model_type`. Add one line here and one to tests/models/test_transformer.py; the test then compares
packed with one-sequence-at-a-time logits and gradients.
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from verl.utils.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """How one family of models runs. `padded_because` is empty when it may run packed."""

    name: str
    padded_because: str = ""


_RECURRENT = "its linear-attention layers carry state from token to token across packed sequences"

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama"),
        Family("mistral"),
        Family("qwen2"),
        Family("qwen3"),
        Family("gemma"),
        Family("gemma2"),
        Family("gemma3_text"),
        Family("phi"),
        Family("phi3"),
        Family("olmo2"),
        Family("granite"),
        Family("starcoder2"),
        Family("smollm3"),
        Family("qwen2_moe"),
        Family("qwen3_moe"),
        Family("mixtral"),
        Family("qwen3_next", padded_because=_RECURRENT),
        Family("qwen3_5_text", padded_because=_RECURRENT),
    )
}


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a model; one that nobody has tested runs padded, and says so."""
    known = FAMILIES.get(config.model_type)
    return known or Family(config.model_type, padded_because="nobody has tested it packed")


def runs_packed(config: PreTrainedConfig, wanted: bool) -> bool:
    """Whether to lay sequences end to end; False when not `wanted` (model.use_remove_padding) or not possible."""
    return wanted and not family_of(config).padded_because


def check_prefix_sharing(config: PreTrainedConfig, packed: bool) -> None:
    """Refuses to share prompts in a model that does not run packed: its padded rows hold one sequence each."""
    if not packed:
        reason = family_of(config).padded_because or "model.use_remove_padding=False asks for it"
        raise ConfigError(
            f"actor.use_prefix_grouper=True cannot be used with model family {config.model_type!r}, which runs "
            f"padded: {reason}. Set actor.use_prefix_grouper=False"
        )


def check_head(config: PreTrainedConfig) -> None:
    """Refuses models whose logits are more than hidden states times a matrix, scaled."""
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        raise ConfigError(
            f"model family {config.model_type!r} bounds its logits (final_logit_softcapping={cap}), which the head "
            "does not do yet; train a family without it, or set model.override_config.final_logit_softcapping=null to "
            "train the model without the bound"
        )


def logit_divisor(config: PreTrainedConfig) -> float:
    """What the family divides its logits by, besides the temperature."""
    if getattr(config, "logits_scaling", None) is not None:  # Granite
        return float(config.logits_scaling)
    if getattr(config, "logit_scale", None) is not None:  # Cohere
        return 1.0 / float(config.logit_scale)
    return 1.0


def capability_table() -> list[tuple[str, str]]:
    """(family, how it runs) for documents and `verl doctor`."""
    return [(f.name, f"padded: {f.padded_because}" if f.padded_because else "packed") for f in FAMILIES.values()]
