"""Builds a run from its configuration: engines, data, reward and weight sync."""

import logging
import os
from functools import partial

from transformers import PreTrainedTokenizerBase

from verl.agent.agent_runner import AgentRunner
from verl.algorithms.advantages import check_advantage
from verl.algorithms.kl import get_kl_controller
from verl.config import RunConfig
from verl.config.check import check_ranks, check_supported, uses_critic, uses_reference
from verl.data.prompt_sampler import PromptSampler, warn_about_unused_rows
from verl.data.prompts import train_prompts, validation_prompts
from verl.models.folder_checks import check_model_for_run
from verl.models.load import build_config, load_tokenizer, model_folder
from verl.observe.tracking import Tracking
from verl.plugin.platform import choose_platform, get_platform
from verl.rewards.reward_setup import build_reward
from verl.runtime.group import Layout, WorkerGroup
from verl.runtime.inline import InlineGroup
from verl.runtime.processes import ProcessGroup
from verl.trainer.ppo.rollout_setup import build_rollout, build_weight_sync, training_sampling, validation_sampling
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.ppo.training_run import TrainingRun, Validation
from verl.trainer.ppo.trajectory_source import RolloutCollector, SyncSource
from verl.utils.errors import ConfigError
from verl.utils.external_code import import_external
from verl.utils.paths import make_writable_folder
from verl.weight_sync.base import WeightSync
from verl.weight_sync.gather_sync import GatherSync
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from verl.workers.engine.rng import seed_generators
from verl.workers.rank_workers import RankWorkers, build_rank_workers
from verl.workers.ranks_engine import MultiRankRolloutEngine
from verl.workers.reference import Reference
from verl.workers.rollout.base import RolloutEngine

logger = logging.getLogger(__name__)


def build_run(config: RunConfig) -> TrainingRun:
    """The run, loaded and connected. Mistakes in the configuration raise ConfigError here, before any step."""
    check_supported(config)
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"torchrun started this program {os.environ['WORLD_SIZE']} times, and each would be a run of its own in "
            "the same folder: main_ppo starts its ranks itself; start it once, with trainer.n_gpus_per_node=N"
        )
    dumps = {"rollout": config.trainer.rollout_data_dir, "validation": config.trainer.validation_data_dir}
    for name, folder in dumps.items():
        if folder:
            make_writable_folder(folder, f"trainer.{name}_data_dir")
    choose_platform(config.trainer.device)
    seed_generators(config.actor_rollout_ref.actor.fsdp_config.seed)  # of the driver, where rewards and agents run
    import_external(config.actor_rollout_ref.model.external_lib)
    check_advantage(config.algorithm)  # after external_lib, which may register one
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    check_model(config, tokenizer)
    agent_runner = AgentRunner(config, tokenizer)
    rows = train_prompts(config.data, tokenizer, agent_runner.tool_prompt_tokens)
    prompts = PromptSampler(rows, config.data.shuffle, config.data.seed)
    warn_about_unused_rows(len(rows), config.data.train_batch_size, config.data.shuffle)
    total_steps = count_steps(config, prompts)
    group = build_group(config, total_steps)
    try:
        return assemble_run(config, group, agent_runner, prompts, total_steps)
    except BaseException:
        group.close()
        raise


def check_model(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """ConfigError, or warnings, where model, tokenizer and lengths do not go together."""
    model, data = config.actor_rollout_ref.model, config.data
    longest = data.max_prompt_length + data.max_response_length
    keys = "data.max_prompt_length + data.max_response_length"
    for line in check_model_for_run(build_config(model)[0], model_folder(model.path), tokenizer, longest, keys):
        logger.warning("%s", line)


def assemble_run(
    config: RunConfig,
    group: WorkerGroup,
    agent_runner: AgentRunner,
    prompts: PromptSampler,
    total_steps: int,
) -> TrainingRun:
    """The driver's side of a run, on ranks that have started."""
    arr, tokenizer = config.actor_rollout_ref, agent_runner.tokenizer
    actor = Actor(config, group.for_role("actor"))
    engine, weight_sync = build_engine_and_weight_sync(config, group, actor, tokenizer)
    collector = RolloutCollector(
        engine, build_reward(config, tokenizer), tokenizer, agent_runner, arr.rollout.free_cache_engine
    )
    reference, critic = None, None
    if uses_reference(config):
        reference = Reference(config, group.for_role("reference"))
    if uses_critic(config):
        critic = Critic(config, group.for_role("critic"))
    trainer = PPOTrainer(
        config,
        SyncSource(prompts, collector, training_sampling(arr.rollout)),
        actor,
        weight_sync,
        get_kl_controller(config.algorithm.kl_ctrl),
        reference,
        critic,
        group,
    )
    return TrainingRun(
        config, trainer, build_validation(config, tokenizer, collector), total_steps, build_tracking(config)
    )


def build_group(config: RunConfig, total_steps: int) -> WorkerGroup:
    """The ranks with their engines: this process, or one process each."""
    ranks = count_ranks(config)
    if config.trainer.runtime == "processes" or ranks > 1:
        return ProcessGroup(partial(build_rank_workers, config, total_steps), Layout.data_parallel(ranks))
    return InlineGroup(RankWorkers(config, total_steps))


def count_ranks(config: RunConfig) -> int:
    """One per device: as many as `trainer.n_gpus_per_node` says, or as are available; one on a CPU."""
    platform, configured = get_platform(), config.trainer.n_gpus_per_node
    available = 1 if platform.device_name == "cpu" else max(platform.device_count(), 1)
    if config.trainer.runtime == "inline":
        if (configured or 1) > 1:
            raise ConfigError(
                f"trainer.runtime=inline is one process, but trainer.n_gpus_per_node={configured}; use "
                "trainer.runtime=processes, or one device"
            )
        return 1
    if configured is not None and configured > available and platform.device_name != "cpu":
        raise ConfigError(
            f"trainer.n_gpus_per_node={configured}, but {available} {platform.device_name} devices are visible; "
            f"lower it to at most {available}"
        )
    ranks = configured or available
    check_ranks(config, ranks)
    return ranks


def count_steps(config: RunConfig, prompts: PromptSampler) -> int:
    """trainer.total_training_steps, or epochs times the whole batches in one."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return config.trainer.total_epochs * prompts.steps_per_epoch(config.data.train_batch_size)


def build_engine_and_weight_sync(
    config: RunConfig, group: WorkerGroup, actor: Actor, tokenizer: PreTrainedTokenizerBase
) -> tuple[RolloutEngine, WeightSync]:
    """The rollout engine and its weight sync; for `native` on several ranks, one engine per rank."""
    if group.local_worker is None and config.actor_rollout_ref.rollout.name in ("native", "hf"):
        ranks = MultiRankRolloutEngine(group)
        return ranks, GatherSync(ranks)
    engine = build_rollout(config, actor, tokenizer)
    return engine, build_weight_sync(config, actor, engine)


def build_validation(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, collector: RolloutCollector
) -> Validation | None:
    """Validation on the held-out prompts; None if it would never run."""
    settings = config.trainer
    if not config.data.val_files or not (settings.val_before_train or settings.val_only or settings.test_freq > 0):
        return None
    sampling = validation_sampling(config.actor_rollout_ref.rollout)
    return Validation(
        validation_prompts(config.data, tokenizer, collector.agent_runner.tool_prompt_tokens), collector, sampling
    )


def build_tracking(config: RunConfig) -> Tracking:
    """The trackers of trainer.logger."""
    settings = config.trainer
    return Tracking(settings.project_name, settings.experiment_name, list(settings.logger), config)
