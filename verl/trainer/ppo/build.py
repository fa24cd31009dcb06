"""From a configuration to a run: which engine, which data, which reward, and how weights travel."""

import os
from functools import partial

from transformers import PreTrainedTokenizerBase

from verl.agent.run import Agents
from verl.algorithms.advantages import get_advantage
from verl.algorithms.kl import get_kl_controller
from verl.config import RunConfig
from verl.config.check import check_ranks, check_supported, uses_critic, uses_reference
from verl.data.prompts import train_prompts, validation_prompts
from verl.data.sampler import PromptSampler, warn_of_rows_left_over
from verl.models.load import load_tokenizer
from verl.observe.tracking import Tracking
from verl.plugin.platform import choose_platform, get_platform
from verl.rewards.build import build_reward
from verl.runtime.group import Layout, WorkerGroup
from verl.runtime.inline import InlineGroup
from verl.runtime.processes import ProcessGroup
from verl.trainer.ppo.loop import Run, Validation
from verl.trainer.ppo.rollout import build_rollout, build_weight_sync, training_sampling, validation_sampling
from verl.trainer.ppo.sources import Sampler, SyncSource
from verl.trainer.ppo.trainer import PPOTrainer
from verl.utils.errors import ConfigError
from verl.utils.external_code import import_external
from verl.weight_sync.base import WeightSync
from verl.weight_sync.by_gathering import ByGathering
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from verl.workers.reference import Reference, ranks_per_replica
from verl.workers.roles import Roles, roles_of_a_process
from verl.workers.rollout.base import RolloutEngine
from verl.workers.sampler import RanksEngine


def build_run(config: RunConfig) -> Run:
    """Everything a run needs, loaded and connected. Mistakes in the configuration are found here, before any step."""
    check_supported(config)
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"torchrun started this program {os.environ['WORLD_SIZE']} times, and each would be a run of its own in "
            "the same folder: main_ppo starts its ranks itself; start it once, with trainer.n_gpus_per_node=N"
        )
    choose_platform(config.trainer.device)
    import_external(config.actor_rollout_ref.model.external_lib)
    get_advantage(config.algorithm.adv_estimator)  # after external_lib had its chance to register one
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    agents = Agents(config, tokenizer)
    rows = train_prompts(config.data, tokenizer, agents.reserve)
    prompts = PromptSampler(rows, config.data.shuffle, config.data.seed)
    warn_of_rows_left_over(len(rows), config.data.train_batch_size, config.data.shuffle)
    total_steps = count_steps(config, prompts)
    group = build_group(config, total_steps)
    try:
        return connect(config, group, agents, prompts, total_steps)
    except BaseException:
        group.close()
        raise


def connect(
    config: RunConfig,
    group: WorkerGroup,
    agents: Agents,
    prompts: PromptSampler,
    total_steps: int,
) -> Run:
    """The driver's side of a run, over ranks that are there."""
    arr, tokenizer = config.actor_rollout_ref, agents.tokenizer
    actor = Actor(config, group.part("actor", arr.actor.fsdp_config.ulysses_sequence_parallel_size))
    engine, weight_sync = rollout_over(config, group, actor, tokenizer)
    sampler = Sampler(engine, build_reward(config, tokenizer), tokenizer, agents, arr.rollout.free_cache_engine)
    reference, critic = None, None
    if uses_reference(config):
        reference = Reference(config, group.part("reference", ranks_per_replica(config)))
    if uses_critic(config):
        critic = Critic(config, group.part("critic", config.critic.fsdp.ulysses_sequence_parallel_size))
    trainer = PPOTrainer(
        config,
        SyncSource(prompts, sampler, training_sampling(arr.rollout)),
        actor,
        weight_sync,
        get_kl_controller(config.algorithm.kl_ctrl),
        reference,
        critic,
        group,
    )
    return Run(config, trainer, validation(config, tokenizer, sampler), total_steps, tracking(config))


def build_group(config: RunConfig, total_steps: int) -> WorkerGroup:
    """The ranks with their engines: this process, or one process each."""
    ranks = count_ranks(config)
    if config.trainer.runtime == "processes" or ranks > 1:
        return ProcessGroup(partial(roles_of_a_process, config, total_steps), Layout(dp=ranks))
    return InlineGroup(Roles(config, total_steps))


def count_ranks(config: RunConfig) -> int:
    """One per device: as many as `trainer.n_gpus_per_node` says, or as are found; one on a CPU."""
    platform, wanted = get_platform(), config.trainer.n_gpus_per_node
    found = 1 if platform.device_name == "cpu" else max(platform.device_count(), 1)
    if config.trainer.runtime == "inline":
        if (wanted or 1) > 1:
            raise ConfigError(
                f"trainer.runtime=inline is one process, but trainer.n_gpus_per_node={wanted}; use "
                "trainer.runtime=processes, or one device"
            )
        return 1
    if wanted is not None and wanted > found and platform.device_name != "cpu":
        raise ConfigError(
            f"trainer.n_gpus_per_node={wanted}, but {found} {platform.device_name} devices are visible; lower it to "
            f"at most {found}"
        )
    ranks = wanted or found
    check_ranks(config, ranks)
    return ranks


def count_steps(config: RunConfig, prompts: PromptSampler) -> int:
    """trainer.total_training_steps, or epochs times the whole batches in one."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return config.trainer.total_epochs * prompts.steps_per_epoch(config.data.train_batch_size)


def rollout_over(
    config: RunConfig, group: WorkerGroup, actor: Actor, tokenizer: PreTrainedTokenizerBase
) -> tuple[RolloutEngine, WeightSync]:
    """The rollout engine, and how weights come to it; beside several ranks, a native engine on each."""
    if isinstance(group, ProcessGroup) and config.actor_rollout_ref.rollout.name in ("native", "hf"):
        ranks = RanksEngine(group)
        return ranks, ByGathering(ranks)
    engine = build_rollout(config, actor, tokenizer)
    return engine, build_weight_sync(config, actor, engine)


def validation(config: RunConfig, tokenizer: PreTrainedTokenizerBase, sampler: Sampler) -> Validation | None:
    """Held-out prompts, unless nothing would ever look at them."""
    settings = config.trainer
    if not config.data.val_files or not (settings.val_before_train or settings.val_only or settings.test_freq > 0):
        return None
    sampling = validation_sampling(config.actor_rollout_ref.rollout)
    return Validation(validation_prompts(config.data, tokenizer, sampler.agents.reserve), sampler, sampling)


def tracking(config: RunConfig) -> Tracking:
    """The trackers of trainer.logger."""
    settings = config.trainer
    return Tracking(settings.project_name, settings.experiment_name, list(settings.logger), config)
