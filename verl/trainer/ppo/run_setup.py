"""Builds a run from its configuration: engines, data, reward and weight sync."""

import asyncio
import logging
from contextlib import ExitStack
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from verl.checks.findings import Findings
from verl.checks.machine import early_findings
from verl.config import RunConfig
from verl.config.asynchronous import SEPARATE, SYNC
from verl.config.check import replaces_groups, uses_critic, uses_reference
from verl.data.prompt_sampler import PromptSampler, warn_about_unused_rows
from verl.models.fastest import keep_choices_in
from verl.models.load import describe_ends, limit_threads
from verl.observe.events import EVENTS_FILE, EventLog
from verl.observe.progress import Progress
from verl.placement.plan import Plan
from verl.placement.pools import announce_plan, start_pools
from verl.rewards.canary import canary_of
from verl.runtime.group import WorkerGroup
from verl.runtime.pools import WorkerPools
from verl.trainer.ppo.efficiency import planned_memory_metrics
from verl.trainer.ppo.facts import RunFacts
from verl.trainer.ppo.observers import Observers
from verl.trainer.ppo.parking_setup import with_parking
from verl.trainer.ppo.preparation import Preparation, prepare_run
from verl.trainer.ppo.reward_model_setup import start_reward_model
from verl.trainer.ppo.rollout_setup import (
    build_rollout_engine,
    build_weight_sync,
    rollout_of_run,
    training_sampling,
    validation_sampling,
)
from verl.trainer.ppo.sources.admission import AdmissionRules
from verl.trainer.ppo.sources.async_source import AsyncSource
from verl.trainer.ppo.sources.group_filter import GroupRules
from verl.trainer.ppo.sources.trajectory_source import (
    RewardModelServing,
    RolloutCollector,
    SyncSource,
    Told,
    TrajectorySource,
)
from verl.trainer.ppo.trainer import Models, PPOTrainer, RunReward
from verl.trainer.ppo.training_run import PlannedRun, TrainingRun, Validation
from verl.trainer.run.header import say
from verl.weight_sync.base import WeightSync
from verl.weight_sync.gather_sync import GatherSync
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from verl.workers.ranks_engine import MultiRankRolloutEngine
from verl.workers.reference import Reference
from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.engines import rollout_engine_of
from verl.workers.rollout.registry import Weights
from verl.workers.teacher import Teachers

logger = logging.getLogger(__name__)


def build_run(config: RunConfig, progress: Progress | None = None, found: Findings | None = None) -> TrainingRun:
    """The run, loaded and connected. Mistakes in the configuration raise ConfigError here, before any step.

    `found` holds the early findings, if somebody has looked.
    """
    progress, found = progress or Progress.silent(), found or early_findings(config)
    progress.stage("reading and filtering prompts")
    prepared = prepare_run(config, found)
    found.refuse()
    assert prepared is not None  # without a refusal, all of it is there
    rows = prepared.prompts
    prompts = PromptSampler(rows, config.data.shuffle, config.data.seed)
    together = 1 if replaces_groups(config) else config.data.gen_batch_size or config.data.train_batch_size
    warn_about_unused_rows(len(rows), together, config.data.shuffle)
    total_steps = count_steps(config, prompts)
    keep_choices_in(Path(config.trainer.default_local_dir))
    limit_threads()  # the driver's, which computes also where its models are in other processes
    progress.stage("loading the model")
    plan = prepared.facts.placement
    memory, ends = planned_memory_metrics(plan, announce_plan(config, plan, say)), config.actor_rollout_ref.model
    planned = PlannedRun(plan.num_devices, memory, len(rows), describe_ends(ends, prepared.tokenizer))
    pools, started = start_pools(config, total_steps, plan, say), ExitStack()
    started.callback(pools.close)
    try:
        observers = Observers(config, prepared.tokenizer, progress)
        started.callback(observers.tracking.finish, 1)
        return assemble_run(config, pools, prepared, prompts, total_steps, started, observers, planned)
    except BaseException:
        try:
            started.close()
        except Exception as error:  # it does not take the place of the first one
            logger.warning("what had started could not all be closed: %s", error)
        raise


def assemble_run(
    config: RunConfig,
    pools: WorkerPools,
    prepared: Preparation,
    prompts: PromptSampler,
    total_steps: int,
    started: ExitStack,
    observers: Observers,
    planned: PlannedRun,
) -> TrainingRun:
    """The driver's side of a run, on ranks that have started; `started` closes, the newest first, what starts here."""
    tokenizer, facts, told = prepared.tokenizer, prepared.facts, observers.count_sequences
    actor = Actor(config, pools.for_role("actor"), told)
    # On devices where the rollout is not yet:
    servers = started.enter_context(ExitStack())
    reward_model, reward_of_run = start_reward_model(config, prepared, pools, servers)
    group = pools.group_of("actor")
    engine, weight_sync = build_engine_and_weight_sync(config, facts.placement, group, actor, tokenizer, started)
    free_cache = rollout_of_run(config).free_cache_engine
    canary = canary_of(config.reward, reward_of_run)
    reward = canary or reward_of_run
    waits = is_synchronous(config, facts, reward_model)
    collector = RolloutCollector(
        with_parking(config, facts.parks, engine),
        reward,
        tokenizer,
        prepared.agent_runner,
        free_cache,
        reward_model,
        goes_on=facts.mode == SEPARATE and not waits,
        told=Told(observers.traces, observers.count_answers),
    )
    reference, critic, teachers = None, None, None
    if uses_reference(config):
        reference = Reference(config, pools.for_role("reference"), told)
    if uses_critic(config):
        critic = Critic(config, pools.for_role("critic"), told)
    if config.distillation.enabled:
        teachers = Teachers(config, pools, prepared.teacher_of_row, told)
    source = build_source(config, facts, prompts, collector, waits)
    models, reward_parts = Models(actor, reference, critic, teachers), RunReward(reward_of_run, canary, servers)
    trainer = PPOTrainer(config, facts, source, models, weight_sync, pools, reward_parts)
    started.callback(trainer.loop.close)
    if trainer.source.goes_on:
        trainer.loop.start(asyncio.Event().wait())  # so that it runs beside the training
    observers.tell_prometheus(engine)
    validation = build_validation(config, prepared, collector)
    return TrainingRun(config, trainer, validation, total_steps, observers, engine, planned)


def is_synchronous(config: RunConfig, facts: RunFacts, reward_model: RewardModelServing | None) -> bool:
    """Whether the synchronous source is taken.

    Without staleness all sources do the same; it alone replaces groups, lets a reward model take turns with the
    rollout on its devices, and waits for devices of the rollout's own.
    """
    takes_turns = reward_model is not None and reward_model.shares_devices
    needs = GroupRules.of(config).replace_groups or takes_turns or facts.mode == SEPARATE
    return facts.mode == SYNC or (facts.staleness == 0 and needs)


def build_source(
    config: RunConfig, facts: RunFacts, prompts: PromptSampler, collector: RolloutCollector, waits: bool
) -> TrajectorySource:
    """The source of `trainer.v1.trainer_mode`; the synchronous one if it `waits`."""
    sampling, rules = training_sampling(config.actor_rollout_ref.rollout), GroupRules.of(config)
    if waits:
        return SyncSource(prompts, collector, sampling, facts.baselines, rules)
    settings = config.trainer.v1.sampler
    largest, strategy = settings.max_off_policy_threshold, settings.max_off_policy_strategy
    admission = AdmissionRules(config.data.train_batch_size, facts.staleness, largest, strategy)
    events = EventLog(Path(config.trainer.default_local_dir) / EVENTS_FILE)
    goes_on = collector.goes_on and not config.trainer.val_only
    return AsyncSource(prompts, collector, sampling, admission, rules, events, facts, goes_on)


def count_steps(config: RunConfig, prompts: PromptSampler) -> int:
    """trainer.total_training_steps, or epochs times the whole batches in one."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return config.trainer.total_epochs * prompts.steps_per_epoch(config.data.train_batch_size)


def build_engine_and_weight_sync(
    config: RunConfig,
    plan: Plan,
    group: WorkerGroup,
    actor: Actor,
    tokenizer: PreTrainedTokenizerBase,
    started: ExitStack,
) -> tuple[RolloutEngine, WeightSync]:
    """The rollout engine, which `started` closes, and its weight sync; in place on several ranks, one per rank.

    `group`: the whole workers of the actor's ranks, which hold the rollouts.
    """
    registered = rollout_engine_of(config.actor_rollout_ref)
    if group.local_worker is None and registered.weights is Weights.IN_PLACE:
        ranks = MultiRankRolloutEngine(group)
        return ranks, GatherSync(ranks)
    engine = build_rollout_engine(config, plan, actor, tokenizer)
    started.callback(engine.close)
    return engine, build_weight_sync(config, plan, actor, engine)


def build_validation(config: RunConfig, prepared: Preparation, collector: RolloutCollector) -> Validation | None:
    """Validation on the held-out prompts; None if it would never run."""
    if prepared.validation is None:
        return None
    return Validation(prepared.validation, collector, validation_sampling(config.actor_rollout_ref.rollout))
