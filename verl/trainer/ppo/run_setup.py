"""Builds a run from its configuration: engines, data, reward and weight sync."""

import asyncio
import logging
from contextlib import ExitStack
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from verl.config import RunConfig
from verl.config.asynchronous import SEPARATE, SYNC
from verl.config.check import replaces_groups, uses_critic, uses_reference
from verl.data.prompt_sampler import PromptSampler, warn_about_unused_rows
from verl.models.fastest import keep_choices_in
from verl.models.load import describe_ends, limit_threads
from verl.observe.events import EVENTS_FILE, EventLog
from verl.observe.progress import Progress
from verl.observe.tracking import Tracking
from verl.placement.plan import Plan
from verl.placement.pools import announce_plan, start_pools
from verl.rewards.canary import canary_of
from verl.runtime.group import WorkerGroup
from verl.runtime.pools import WorkerPools
from verl.trainer.ppo.efficiency import planned_memory_metrics
from verl.trainer.ppo.facts import RunFacts
from verl.trainer.ppo.monitoring import export_metrics
from verl.trainer.ppo.parking_setup import with_parking
from verl.trainer.ppo.preparation import Preparation, prepare_run
from verl.trainer.ppo.profiled_steps import ReplicaProfiles
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
from verl.trainer.ppo.sources.trajectory_source import RolloutCollector, SyncSource, TrajectorySource
from verl.trainer.ppo.traces import record_traces
from verl.trainer.ppo.trainer import Models, PPOTrainer
from verl.trainer.ppo.training_run import TrainingRun, Validation
from verl.trainer.preflight import Findings
from verl.trainer.run.header import say
from verl.weight_sync.base import WeightSync
from verl.weight_sync.gather_sync import GatherSync
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from verl.workers.ranks_engine import MultiRankRolloutEngine
from verl.workers.reference import Reference
from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.registry import Weights, rollout_engine_of
from verl.workers.teacher import Teachers

logger = logging.getLogger(__name__)


def build_run(config: RunConfig, progress: Progress | None = None) -> TrainingRun:
    """The run, loaded and connected. Mistakes in the configuration raise ConfigError here, before any step."""
    progress, found = progress or Progress.silent(), Findings()
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
    planned = planned_memory_metrics(plan, announce_plan(config, plan, say))
    pools, started = start_pools(config, total_steps, plan, say), ExitStack()
    started.callback(pools.close)
    try:
        run = assemble_run(config, pools, prepared, prompts, total_steps, started)
    except BaseException:
        try:
            started.close()
        except Exception as error:  # it does not take the place of the first one
            logger.warning("what had started could not all be closed: %s", error)
        raise
    run.progress, run.planned_memory, run.num_devices = progress, planned, plan.num_devices
    return run


def assemble_run(
    config: RunConfig,
    pools: WorkerPools,
    prepared: Preparation,
    prompts: PromptSampler,
    total_steps: int,
    started: ExitStack,
) -> TrainingRun:
    """The driver's side of a run, on ranks that have started; `started` closes, the newest first, what starts here."""
    tokenizer, facts = prepared.tokenizer, prepared.facts
    actor = Actor(config, pools.for_role("actor"))
    # On devices where the rollout is not yet:
    servers = started.enter_context(ExitStack())
    reward_model, reward_of_run = start_reward_model(config, prepared, pools, servers)
    group = pools.group_of("actor")
    engine, weight_sync = build_engine_and_weight_sync(config, facts.placement, group, actor, tokenizer, started)
    free_cache = rollout_of_run(config).free_cache_engine
    canary = canary_of(config.reward, reward_of_run)
    reward = canary or reward_of_run
    answering = with_parking(facts.parks, engine)
    collector = RolloutCollector(answering, reward, tokenizer, prepared.agent_runner, free_cache, reward_model)
    reference, critic = None, None
    if uses_reference(config):
        reference = Reference(config, pools.for_role("reference"))
    if uses_critic(config):
        critic = Critic(config, pools.for_role("critic"))
    teachers = Teachers(config, pools, prepared.teacher_of_row) if config.distillation.enabled else None
    source = build_source(config, facts, prompts, collector)
    trainer = PPOTrainer(config, facts, source, Models(actor, reference, critic, teachers), weight_sync, pools)
    trainer.reward, trainer.canary, trainer.reward_servers = reward_of_run, canary, servers
    started.callback(trainer.loop.close)
    if trainer.source.goes_on:
        trainer.loop.start(asyncio.Event().wait())  # so that it runs beside the training
    tracking = build_tracking(config)
    started.callback(tracking.finish, 1)
    run = TrainingRun(config, trainer, build_validation(config, prepared, collector), total_steps, tracking)
    export_metrics(config, run, engine)
    run.traces = prepared.agent_runner.traces = collector.traces = record_traces(config, tokenizer, run.note)
    run.profiler.servers = ReplicaProfiles(engine, config.actor_rollout_ref.rollout.profiler, trainer.wait_for)
    collector.on_answers, run.num_prompts = run.count_answers, len(prepared.prompts)
    run.answer_ends = describe_ends(config.actor_rollout_ref.model, tokenizer)
    dispatchers = [role.dispatcher for role in (actor, reference, critic) if role is not None]
    for dispatcher in (*dispatchers, *(teachers.dispatchers if teachers else ())):
        dispatcher.on_sequences = run.count_sequences
    return run


def build_source(
    config: RunConfig, facts: RunFacts, prompts: PromptSampler, collector: RolloutCollector
) -> TrajectorySource:
    """The source of `trainer.v1.trainer_mode`. Without staleness all do the same: the synchronous one is taken where
    it alone replaces groups, lets a reward model take turns with the rollout on its devices, or waits for devices of
    the rollout's own."""
    sampling, rules = training_sampling(config.actor_rollout_ref.rollout), GroupRules.of(config)
    splits = facts.mode == SEPARATE
    takes_turns = collector.reward_model is not None and collector.reward_model.shares_devices
    if facts.mode == SYNC or (facts.staleness == 0 and (rules.replace_groups or takes_turns or splits)):
        return SyncSource(prompts, collector, sampling, facts.baselines, rules)
    settings = config.trainer.v1.sampler
    largest, strategy = settings.max_off_policy_threshold, settings.max_off_policy_strategy
    admission = AdmissionRules(config.data.train_batch_size, facts.staleness, largest, strategy)
    collector.goes_on = splits
    events = EventLog(Path(config.trainer.default_local_dir) / EVENTS_FILE)
    goes_on = splits and not config.trainer.val_only
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


def build_tracking(config: RunConfig) -> Tracking:
    """The trackers of trainer.logger."""
    settings = config.trainer
    names, say = list(settings.logger), lambda line: print(f"warning: {line}", flush=True)
    return Tracking(settings.project_name, settings.experiment_name, names, config, settings.tracker_errors, say)
