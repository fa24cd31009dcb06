"""From a configuration to a run: which engine, which data, which reward, and how weights travel."""

import torch
from transformers import PreTrainedTokenizerBase

from verl.agent.run import Agents
from verl.algorithms.advantages import get_advantage
from verl.algorithms.kl import get_kl_controller
from verl.config import RunConfig
from verl.config.check import check_supported
from verl.data.prompts import train_prompts, validation_prompts
from verl.data.sampler import PromptSampler
from verl.models.load import load_tokenizer
from verl.observe.tracking import Tracking
from verl.rewards.build import build_reward
from verl.trainer.ppo.loop import Run, Validation
from verl.trainer.ppo.rollout import build_rollout, build_weight_sync, training_sampling, validation_sampling
from verl.trainer.ppo.sources import Sampler, SyncSource
from verl.trainer.ppo.trainer import PPOTrainer
from verl.workers.actor import build_actor
from verl.workers.critic import Critic, build_critic
from verl.workers.reference import Reference, build_reference


def build_run(config: RunConfig) -> Run:
    """Everything a run needs, loaded and connected. Mistakes in the configuration are found here, before any step."""
    check_supported(config)
    torch.manual_seed(config.actor_rollout_ref.actor.fsdp_config.seed)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    prompts = PromptSampler(train_prompts(config.data, tokenizer), config.data.shuffle, config.data.seed)
    total_steps = count_steps(config, prompts)
    actor = build_actor(config, total_steps)
    get_advantage(config.algorithm.adv_estimator)  # after external_lib had its chance to register one
    engine = build_rollout(config, actor, tokenizer)
    free_cache = config.actor_rollout_ref.rollout.free_cache_engine
    sampler = Sampler(engine, build_reward(config, tokenizer), tokenizer, Agents(config, tokenizer), free_cache)
    trainer = PPOTrainer(
        config,
        SyncSource(prompts, sampler, training_sampling(config.actor_rollout_ref.rollout)),
        actor,
        build_weight_sync(config, actor, engine),
        get_kl_controller(config.algorithm.kl_ctrl),
        reference(config),
        critic(config, total_steps),
    )
    return Run(config, trainer, validation(config, tokenizer, sampler), total_steps, tracking(config))


def count_steps(config: RunConfig, prompts: PromptSampler) -> int:
    """trainer.total_training_steps, or epochs times the whole batches in one."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return config.trainer.total_epochs * prompts.steps_per_epoch(config.data.train_batch_size)


def reference(config: RunConfig) -> Reference | None:
    """The frozen policy, where a KL term needs it."""
    if config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss:
        return build_reference(config)
    return None


def critic(config: RunConfig, total_steps: int) -> Critic | None:
    """A value model with gae, or where `critic.enable` says so."""
    wanted = config.critic.enable
    if wanted is None:
        wanted = config.algorithm.adv_estimator == "gae"
    return build_critic(config, total_steps) if wanted else None


def validation(config: RunConfig, tokenizer: PreTrainedTokenizerBase, sampler: Sampler) -> Validation | None:
    """Held-out prompts, unless nothing would ever look at them."""
    settings = config.trainer
    if not config.data.val_files or not (settings.val_before_train or settings.val_only or settings.test_freq > 0):
        return None
    sampling = validation_sampling(config.actor_rollout_ref.rollout)
    return Validation(validation_prompts(config.data, tokenizer), sampler, sampling)


def tracking(config: RunConfig) -> Tracking:
    """The trackers of trainer.logger."""
    settings = config.trainer
    return Tracking(settings.project_name, settings.experiment_name, list(settings.logger), config)
