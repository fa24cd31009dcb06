"""Whether a rollout engine gets LoRA adapters beside its base weights, and what it has to know of them."""

from typing import Any

from verl.config import ActorRolloutRefConfig
from verl.config.check import has_adapters
from verl.models.lora import largest_rank
from verl.utils.errors import ConfigError
from verl.workers.rollout.engines import rollout_engine_of
from verl.workers.rollout.registry import Weights

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that its LoRA kernels are made for
MODEL = "actor_rollout_ref.model"


def publishes_adapters(arr: ActorRolloutRefConfig) -> bool:
    """Whether a publish sends adapters alone, the base weights once; ConfigError where the engine cannot take them."""
    if not has_adapters(arr.model):
        return False
    engine = rollout_engine_of(arr)
    if engine.weights is not Weights.COPIED:
        return False
    merge = arr.model.lora.merge
    if merge is False and not engine.traits.takes_adapters:
        raise ConfigError(
            f"{MODEL}.lora.merge=False sends adapters alone, and rollout.name={arr.rollout.name} takes whole weights "
            f"only; set {MODEL}.lora.merge=True, or rollout.name=vllm"
        )
    return engine.traits.takes_adapters and not merge


def adapter_arguments(arr: ActorRolloutRefConfig) -> dict[str, Any]:
    """vLLM's arguments for adapters; empty where it gets none. ConfigError for a rank that it cannot have."""
    if not publishes_adapters(arr):
        return {}
    rank = largest_rank(arr.model)
    enough = [most for most in VLLM_RANKS if most >= rank]
    if not enough:
        raise ConfigError(
            f"vLLM takes adapters of rank {VLLM_RANKS[-1]} at most, and these have rank {rank}; set {MODEL}.lora.merge="
            f"True, which publishes whole weights, or a lower {MODEL}.lora_rank"
        )
    sharded = arr.model.lora.fully_sharded_loras
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": enough[0], "fully_sharded_loras": sharded}
