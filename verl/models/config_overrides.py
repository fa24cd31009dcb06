"""A model's configuration with `model.override_config` on top, as `transformers` reads both from one config.json."""

import copy
from typing import Any

from transformers import PreTrainedConfig

from verl.utils.errors import ConfigError
from verl.utils.suggest import did_you_mean

Values = dict[str, Any]  # of a config.json
ROPE = ("rope_scaling", "rope_parameters")  # the old and the new name
# Parts of the new dictionary that stay when another replaces it, and the names that config.json has for them beside it.
KEPT = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
}
LAYER_THETAS = {
    "full_attention": ("rope_theta", "global_rope_theta"),
    "sliding_attention": ("rope_local_base_freq", "local_rope_theta"),
}
ROPE_NAMES = {*ROPE, *(name for names in (*KEPT.values(), *LAYER_THETAS.values()) for name in names)}


def overridden(config: PreTrainedConfig, values: Values, override: Values) -> PreTrainedConfig:
    """`config`, which was read from `values`, as it is read with `override` among them; ConfigError if it cannot be."""
    merged = _merged(config, copy.deepcopy(values), override)
    given = ", ".join(f"{name}={value!r}" for name, value in override.items())
    try:
        result = type(config).from_dict(merged)
    except Exception as error:  # the library checks values in its own ways
        raise ConfigError(f"model.override_config.{given:.200}: {' '.join(str(error).split())[:300]}") from error
    if _by_layer(config.get_text_config()) and not _by_layer(result.get_text_config()):
        raise ConfigError(
            f"model.override_config.{given:.200}: {type(config).__name__} has rope parameters for each kind of layer; "
            f"give one dictionary for each of {', '.join(config.get_text_config().rope_parameters)}"
        )
    return result


def difference(config: PreTrainedConfig, other: PreTrainedConfig) -> Values:
    """The values of `other` that `config` has not, parts with a configuration of their own by theirs."""
    old, new = ({n: v for n, v in c.to_dict().items() if n[0] != "_"} for c in (config, other))
    changed = {name: value for name, value in new.items() if name not in old or old[name] != value}
    for name in changed.keys() & other.sub_configs.keys():
        if type(getattr(config, name)) is type(part := getattr(other, name)):
            changed[name] = difference(getattr(config, name), part)
    return {name: value for name, value in changed.items() if value != {} or name in ROPE}


def _merged(config: PreTrainedConfig, values: Values, override: Values, where: str = "") -> Values:
    names = config.attribute_map
    values, override = ({names.get(n, n): v for n, v in given.items()} for given in (values, override))
    if override.keys() & ROPE_NAMES and hasattr(config, "rope_parameters"):
        values, override = _with_rope(config, values, override)
    for name, value in override.items():
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig) and isinstance(value, dict):
            value = _merged(part, values.get(name) or part.to_dict(), value, f"{where}{name}.")
        elif not hasattr(config, name) and not (name in ROPE_NAMES and hasattr(config, "rope_parameters")):
            raise ConfigError(
                f"model.override_config.{where}{name}={value!r}: {type(config).__name__} has no such value; "
                f"{did_you_mean(name, config.to_dict())}"
            )
        values[name] = value
    return values


def _by_layer(config: PreTrainedConfig) -> bool:
    """Whether each kind of layer has rotary embeddings of its own."""
    return any(isinstance(part, dict) for part in (getattr(config, "rope_parameters", None) or {}).values())


def _with_rope(config: PreTrainedConfig, values: Values, override: Values) -> tuple[Values, Values]:
    """Both with what `override` says of rotary embeddings in `values`: what it leaves out of KEPT stays the model's."""
    override = dict(override)
    given = [override.pop(name) for name in ROPE if name in override]
    values = {name: value for name, value in values.items() if name not in ROPE}
    new, old = given[0] if given else None, copy.deepcopy(config.rope_parameters or {})
    if not isinstance(new, dict | None):
        raise ConfigError(
            f"model.override_config.{ROPE[1]}={new!r} must be a dictionary, such as {{rope_type:yarn,factor:4}}"
        )
    if not _by_layer(config):
        rope = _kept(old) | (new or {}) if given else old
        for name, spellings in KEPT.items():
            for spelling in spellings:
                if spelling in override and name not in (new or {}):
                    rope[name] = override.pop(spelling)
        return values | {"rope_parameters": rope}, override
    for layer, spellings in LAYER_THETAS.items():
        for spelling in spellings:
            if spelling in override and layer in old:
                old[layer]["rope_theta"] = override.pop(spelling)
    for layer in old if given else ():
        if new is None or isinstance(new.get(layer), dict):
            old[layer] = _kept(old[layer]) | (new or {}).get(layer, {"rope_type": "default"})
    values |= {"rope_parameters": old}
    flat = new and not any(isinstance(part, dict) for part in new.values())
    return values | ({"rope_scaling": new} if flat else {}), override  # the class knows whose layers a flat one is


def _kept(rope: Values) -> Values:
    return {name: rope[name] for name in KEPT if name in rope}
