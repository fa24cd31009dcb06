"""The whole configuration of a run, and the keys whose default is the value of another key."""

from dataclasses import dataclass

from verl.config.actor import ActorConfig, RefConfig
from verl.config.algorithm import AlgorithmConfig
from verl.config.asynchronous import AsyncTrainingConfig, RolloutOfRunConfig
from verl.config.base import Section, key, section
from verl.config.critic import CriticConfig
from verl.config.data import DataConfig
from verl.config.distillation import DistillationConfig
from verl.config.model import PolicyModelConfig
from verl.config.profiler import GlobalProfilerConfig
from verl.config.reward import RewardConfig
from verl.config.rollout import RolloutConfig
from verl.config.trainer import RayKwargsConfig, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class ActorRolloutRefConfig(Section):
    """Policy, rollout engine and reference."""

    hybrid_engine: bool = key(True, "Rollout on the actor's devices; False gives it devices of its own.")
    model: PolicyModelConfig = section(PolicyModelConfig)
    actor: ActorConfig = section(ActorConfig)
    ref: RefConfig = section(RefConfig)
    rollout: RolloutConfig = section(RolloutConfig)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Configuration of `python3 -m verl.trainer.main_ppo`."""

    model_engine: str = key("dp", "Family of training engines.", choices=("dp", "megatron", "veomni", "torchtitan"))
    trainer: TrainerConfig = section(TrainerConfig)
    data: DataConfig = section(DataConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig)
    reward: RewardConfig = section(RewardConfig)
    distillation: DistillationConfig = section(DistillationConfig)
    async_training: AsyncTrainingConfig = section(AsyncTrainingConfig)
    rollout: RolloutOfRunConfig = section(RolloutOfRunConfig)
    global_profiler: GlobalProfilerConfig = section(GlobalProfilerConfig)
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig)


_PROFILER_OF_RUN = (
    "tool", "save_path", "relocate_results", "finish_hook_cmd", "finish_hook_all_ranks", "finish_hook_ranks",
)  # fmt: skip


def _follows() -> dict[str, str]:
    arr = "actor_rollout_ref"
    table = {
        f"{arr}.ref.strategy": f"{arr}.actor.strategy",
        "critic.strategy": f"{arr}.actor.strategy",
        f"{arr}.ref.use_torch_compile": f"{arr}.actor.use_torch_compile",
        f"{arr}.ref.ulysses_sequence_parallel_size": f"{arr}.actor.fsdp_config.ulysses_sequence_parallel_size",
        f"{arr}.rollout.prompt_length": "data.max_prompt_length",
        f"{arr}.rollout.response_length": "data.max_response_length",
        f"{arr}.rollout.n_gpus_per_node": "trainer.n_gpus_per_node",
        "data.tool_config_path": f"{arr}.rollout.multi_turn.tool_config_path",
        "data.function_tool_path": f"{arr}.rollout.multi_turn.function_tool_path",
        "critic.model.path": f"{arr}.model.path",
        f"{arr}.model.tokenizer_path": "data.tokenizer",
        "critic.fsdp.strategy": "critic.strategy",
        "critic.fsdp.ulysses_sequence_parallel_size": "critic.ulysses_sequence_parallel_size",
    }
    for name in ("use_dynamic_bsz", "max_token_len_per_gpu"):
        source = f"{arr}.actor.{name}" if name == "use_dynamic_bsz" else f"{arr}.actor.ppo_{name}"
        for role in ("ref", "rollout"):
            table[f"{arr}.{role}.log_prob_{name}"] = source
    for name in (
        "ppo_mini_batch_size",
        "use_dynamic_bsz",
        "ppo_epochs",
        "shuffle",
        "loss_agg_mode",
        "loss_scale_factor",
    ):
        table[f"critic.{name}"] = f"{arr}.actor.{name}"
    for role in ("actor", "ref"):
        engine = f"{arr}.{role}.fsdp_config"
        for name in (
            "strategy",
            "ulysses_sequence_parallel_size",
            "use_torch_compile",
            "entropy_from_logits_with_chunking",
            "entropy_from_logits_chunk_size",
            "entropy_checkpointing",
        ):
            table[f"{engine}.{name}"] = f"{arr}.{role}.{name}"
    for name in ("strategy", "ulysses_sequence_parallel_size"):
        table[f"reward.reward_model.fsdp_config.{name}"] = f"reward.reward_model.{name}"
    for name in ("param_offload", "fsdp_size", "ulysses_parallel_size", "expert_parallel_size", "seed"):
        table[f"{arr}.ref.veomni.{name}"] = f"{arr}.actor.veomni.{name}"
    for role in (f"{arr}.actor", f"{arr}.ref", f"{arr}.rollout", "critic"):
        for name in _PROFILER_OF_RUN:
            table[f"{role}.profiler.{name}"] = f"global_profiler.{name}"
        for name in ("nsys.discrete", "torch_memory.trace_alloc_max_entries", "torch_memory.stack_depth"):
            table[f"{role}.profiler.tool_config.{name}"] = f"global_profiler.global_tool_config.{name}"
    torch, npu = (f"tool_config.{tool}" for tool in ("torch", "npu"))
    contents = (f"{torch}.contents", f"{torch}.discrete", f"{npu}.contents", f"{npu}.level", f"{npu}.discrete")
    for name in ("enable", "all_ranks", "ranks", f"{npu}.analysis", *contents):
        table[f"{arr}.rollout.profiler.{name}"] = f"{arr}.actor.profiler.{name}"
    return table


FOLLOWS: dict[str, str] = _follows()
"""Key -> the key whose value it takes when it is not set. Within one section, `sibling` declares this."""
