"""How the rollout engine of a run keeps unfinished answers over a publish (asynchronous training)."""

from verl.config import RunConfig
from verl.config.asynchronous import COLOCATED, SEPARATE, is_asynchronous, keeps_cache, staleness
from verl.plugin.platform import get_platform
from verl.rewards.model_setup import takes_turns
from verl.utils.errors import ConfigError
from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.engines import rollout_engine_of
from verl.workers.rollout.parking import ASK_AGAIN, NO, PAUSE, ParkingEngine


def parks(config: RunConfig) -> str:
    """How unfinished answers are parked while the policy is trained or, with devices of its own for the rollout, while
    an engine gets weights that cannot do so beside the sampling.

    no: they are not. ask_again: they are aborted, and asked for again under the new weights. pause: they go on with
    their KV cache.
    """
    mode = config.trainer.v1.trainer_mode
    apart = mode == SEPARATE and not rollout_engine_of(config.actor_rollout_ref).is_apart
    if not (mode == COLOCATED or apart) or not staleness(config):
        return NO
    return PAUSE if keeps_cache(config) else ASK_AGAIN


def check_parking(config: RunConfig) -> None:
    """ConfigError for what cannot be beside unfinished answers, or beside answers that are parked."""
    if not is_asynchronous(config) or not staleness(config):
        return
    rollout = config.actor_rollout_ref.rollout
    what = f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode} with a staleness of {staleness(config):g}"
    if config.reward.reward_model.enable and takes_turns(config.reward, get_platform().device_name != "cpu"):
        raise ConfigError(
            f"{what} samples while answers are scored, and a reward model on the rollout's devices scores while "
            "nothing is sampled; give it devices of its own (reward.reward_model.enable_resource_pool=True), or set "
            "async_training.staleness_threshold=0"
        )
    if (parked := parks(config)) == NO:
        return
    registered = rollout_engine_of(config.actor_rollout_ref)
    if parked == PAUSE and not registered.traits.keeps_cache:
        raise ConfigError(
            f"actor_rollout_ref.rollout.kv_cache_on_publish={rollout.kv_cache_on_publish} needs an engine that keeps "
            f"the KV cache of unfinished answers over a publish: rollout.name=native or vllm; rollout.name="
            f"{rollout.name} aborts them, and is asked again with their tokens. Set "
            "actor_rollout_ref.rollout.kv_cache_on_publish=recompute"
        )
    if rollout.stop and not registered.traits.continues:
        raise ConfigError(
            f"actor_rollout_ref.rollout.stop={list(rollout.stop)} with {what} and rollout.name={rollout.name}: an "
            "answer that was parked, or saved by a checkpoint, goes on as a new prompt, in which the engine does not "
            "look for a stop string; use stop_token_ids, rollout.name=native, or async_training.staleness_threshold=0"
        )


def with_parking(config: RunConfig, parked: str, engine: RolloutEngine) -> RolloutEngine:
    """The engine that answers prompts: where some are unfinished at a publish, it keeps what was sampled of them."""
    if not is_asynchronous(config) or not staleness(config):
        return engine
    return ParkingEngine(engine, parked, rollout_engine_of(config.actor_rollout_ref).traits.continues)
