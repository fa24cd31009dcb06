"""A whole run: training steps in a loop, with validation, checkpoints, ledger and logging."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from verl.algorithms.losses import aggregation_mode
from verl.checks.config import unread_before_steps, unread_by_a_step
from verl.config import RunConfig
from verl.config.base import add_reads, record_own_reads
from verl.config.run_name import same_command
from verl.config.user_keys import unread_user_keys
from verl.data.prompts import PromptDataset
from verl.data.trajectory import FIRST_VALIDATION_GROUP, Trajectory, conversations_of
from verl.observe.ledger import Ledger, size_line
from verl.observe.memory_metrics import memory_metrics
from verl.observe.progress import Progress
from verl.observe.rollout_dumps import dump_rollouts, remove_dumps_after
from verl.observe.run_record import NUM_VALIDATION_SAMPLES, RUN_FILE, VALIDATION_SAMPLES, write_run_record
from verl.observe.run_summary import RunSummary
from verl.observe.step_records import drop_records_after, note_profile
from verl.observe.timers import StageTimer, throughput_metrics
from verl.plugin.platform import get_platform
from verl.runtime.pools import describe_pools
from verl.trainer.ppo.batch_metrics import prompt_and_response_lengths, whole_score
from verl.trainer.ppo.efficiency import forward_memory_metrics, mfu_metrics, published_memory_metrics
from verl.trainer.ppo.health import HealthCheck, setup_lines
from verl.trainer.ppo.observers import Observers
from verl.trainer.ppo.profiled_steps import ReplicaProfiles, step_profiler
from verl.trainer.ppo.sources.trajectory_source import RolloutBatch, RolloutCollector
from verl.trainer.ppo.trainer import PPOTrainer, StepRecord
from verl.trainer.ppo.validation_metrics import process_validation_metrics
from verl.trainer.run.capacity_block import CapacityBlock
from verl.trainer.run.checkpoints import Checkpoints, folder_of_copies, read_state, step_folder
from verl.trainer.run.files import LEDGER
from verl.trainer.run.folder import metrics_of
from verl.trainer.run.header import when_validated
from verl.trainer.run.interrupt import Interrupt, interrupted
from verl.trainer.run.restarts import restart_line
from verl.trainer.run.resume import find_resume
from verl.workers.engine import rng
from verl.workers.rollout.base import RolloutEngine, SamplingParams
from verl.workers.rollout.settings_advice import tuning_advice


@dataclass
class Validation:
    """Prompts held out from training, and how their answers are sampled."""

    prompts: PromptDataset
    collector: RolloutCollector
    sampling: SamplingParams

    async def run(self) -> tuple[dict[str, float], RolloutBatch]:
        """val-core/… and val-aux/… over all held-out prompts."""
        rows = list(self.prompts)
        request_ids = [FIRST_VALIDATION_GROUP + i for i in range(len(rows))]
        rollouts = await self.collector.collect(rows, request_ids, self.sampling)
        return validation_metrics(rollouts), rollouts


def validation_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Metrics of all conversations; those without a reward are counted as unscored, not scored as zero."""
    answers = rollouts.trajectories
    conversations = conversations_of(answers)
    scores = [whole_score(outputs) for outputs in conversations]
    named = [set(parts) for reward, parts in scores if reward is not None]
    infos: dict[str, list[Any]] = {"reward": [reward for reward, _ in scores]}
    infos |= {n: [parts.get(n) for _, parts in scores] for n in sorted(set.intersection(*named) if named else ())}
    sources, uids = zip(*((outputs[0].data_source, str(outputs[0].group_id)) for outputs in conversations), strict=True)
    out = process_validation_metrics(sources, uids, infos)
    turns = [t.num_turns for t in answers]
    out.update({"val-aux/num_turns/min": min(turns), "val-aux/num_turns/max": max(turns)})
    out["val-aux/num_turns/mean"] = sum(turns) / len(turns)
    if rollouts.num_reward_errors:
        out["val-aux/reward_errors"] = float(rollouts.num_reward_errors)
    if rollouts.num_reward_retries:
        out["val-aux/reward_retries"] = float(rollouts.num_reward_retries)
    return out


def left_out_lines(step: int, rollouts: RolloutBatch) -> list[str]:
    """Says that scores of a validation leave answers out, because their reward failed (`reward.on_error=count`)."""
    failed, answers = rollouts.num_reward_errors, len(rollouts.trajectories)
    line = f"validation at step {step}: {failed} of {answers} answers without a reward, left out of its scores"
    return [line] * (failed > 0)


class PlannedRun(NamedTuple):
    """Facts of a run from before its first step."""

    num_devices: int  # with those of a rollout apart
    memory: dict[str, float]  # metrics of every step
    num_prompts: int
    answer_ends: str  # where answers end, in words


class TrainingRun:
    """Drives a trainer from its start, or from a checkpoint, to the last step."""

    def __init__(
        self,
        config: RunConfig,
        trainer: PPOTrainer,
        validation: Validation | None,
        total_steps: int,
        observers: Observers,
        engine: RolloutEngine,
        plan: PlannedRun,
    ):
        self.config, self.trainer, self.validation = config, trainer, validation
        self.observers, self.tracking, self.progress = observers, observers.tracking, observers.progress
        self.total_steps, self.engine, self.plan, self.note = total_steps, engine, plan, observers.note
        self.root, settings = Path(config.trainer.default_local_dir), config.trainer
        self.roles = {"actor": trainer.actor.dispatcher}
        if trainer.critic is not None:
            self.roles["critic"] = trainer.critic.dispatcher
        keep = {"actor": settings.max_actor_ckpt_to_keep, "critic": settings.max_critic_ckpt_to_keep}
        self.checkpoints = Checkpoints(self.root, keep, self.note, folder_of_copies(settings))
        self.block = CapacityBlock.from_environment(settings.esi_redundant_time)
        self.ledger = Ledger(self.root / LEDGER, settings.ledger_keep_steps) if config.trainer.ledger else None
        self.stop_requested = self.saved_step = 0  # the number of a signal; the last step that is saved
        self.last_validation: dict[str, float] = {}
        self.advice_given: set[str] = set()
        servers = ReplicaProfiles(engine, config.actor_rollout_ref.rollout.profiler, trainer.wait_for)
        self.profiler = step_profiler(config, trainer.pools, self.note, servers, note_profile(self.root))
        self.health = HealthCheck(aggregation_mode(config.actor_rollout_ref.actor))
        self.summary = RunSummary()

    @property
    def complete(self) -> bool:
        """Whether every step is done; validation alone has none."""
        return self.config.trainer.val_only or self.trainer.global_step >= self.total_steps

    def fit(self, on_begin: Callable[[int], object] = lambda step: None) -> dict[str, float]:
        """Train to the last step; returns the last validation's metrics. `on_begin` gets the last step before.

        Ctrl-C and SIGTERM finish the step in progress, save, and raise Interrupted.
        """
        self.resume()
        on_begin(self.trainer.global_step)
        if not (self.config.trainer.val_only and (self.root / RUN_FILE).exists()):
            write_run_record(self.root, self.config, self.total_steps)
        for line in setup_lines(self.config.algorithm.adv_estimator, self.config.actor_rollout_ref.rollout.n):
            self.note(f"health: {line}")
        warning = self.trainer.publish().warning()
        if warning:
            self.note(warning)
        settings = self.config.trainer
        if self.validation and (settings.val_only or (settings.val_before_train and self.trainer.global_step == 0)):
            self.progress.stage("testing")
            first = self.validate()
            self.tracking.log(first, self.trainer.global_step)
            self.summary.add(self.trainer.global_step, first)
        if settings.val_only:
            return self.last_validation
        self.report_unread_keys(unread_before_steps)
        self.progress.begin(self.total_steps, self.trainer.global_step)
        with Interrupt(self):
            while self.trainer.global_step < self.total_steps and not self.stop_requested:
                self.one_step(self.progress)
            self.profiler.finish()
            step = self.trainer.global_step
            if self.stop_requested and self.trainer.first_step <= step != self.saved_step:
                self.save()  # the signal came after the step had passed its own save
            self.checkpoints.finish_all()
            self.report_unread_keys(unread_user_keys)
        if self.stop_requested and step < self.total_steps:
            folder, command = step_folder(self.root, step), same_command(self.config)
            raise interrupted(self.stop_requested, step, self.total_steps, folder, command)
        return self.last_validation

    def one_step(self, progress: Progress) -> None:
        """One training step with its records, validation, checkpoint and metrics."""
        is_local = self.trainer.actor.group.local_worker is not None
        timer = StageTimer(get_platform().synchronize if is_local else None, on_enter=progress.stage)
        with self.profiler.recorded(self.trainer.global_step + 1, timer), timer("step"):
            record = self.trainer.step(timer)
            self.write_records(record, timer)
            metrics = record.metrics
            metrics.update(self.plan.memory | published_memory_metrics(self.trainer))
            last = record.step >= self.total_steps or self.stop_requested > 0
            if self.validation and is_due(record.step, self.config.trainer.test_freq, last):
                with timer("testing"):
                    metrics.update(self.validate())
            if ends_soon := self.block.save_is_due(self.checkpoints.seconds_to_save()):
                self.note(f"the capacity block ends in {self.block.seconds_left:.0f} s: saving after this step")
            if ends_soon or self.stop_requested or is_due(record.step, self.config.trainer.save_freq, last):
                with timer("save_checkpoint"):
                    self.save()
        self.trainer.source.note_stages(timer.spans)
        self.block.add_step(timer.seconds["step"] - timer.seconds.get("save_checkpoint", 0.0))
        metrics.update(timer.metrics())
        _, response = prompt_and_response_lengths(record.batch)
        num_tokens, num_answered = record.batch.num_tokens, int(response.sum())
        metrics.update(throughput_metrics(timer.seconds, num_tokens, num_answered, self.plan.num_devices))
        metrics.update(mfu_metrics(self.trainer, record.batch, record.trained, timer.seconds))
        metrics.update(forward_memory_metrics(self.trainer, timer.seconds))
        metrics.update(memory_metrics())
        replicas = list(self.trainer.wait_for(self.engine.stats()))
        self.observers.step_done(record.step, replicas, len(self.engine.lost_replicas))
        self.checkpoints.log_and_finish_pending(partial(self.tracking.log, metrics, record.step))
        if ends_soon:
            self.checkpoints.finish_all()
        progress.step(record.step, metrics)
        self.summary.add(record.step, metrics)
        self.note_advice(record.rollouts.engine_stats)
        for line in self.health.look(metrics):
            self.note(f"health: step {record.step}: {line}")
        if record.step == self.trainer.first_step:
            self.report_unread_keys(unread_by_a_step)
            record_own_reads()

    def note_advice(self, stats: dict[str, float]) -> None:
        """Print each tuning advice from the rollout engine's statistics once."""
        for topic, sentence in tuning_advice(stats).items():
            if topic not in self.advice_given:
                self.advice_given.add(topic)
                self.note(f"advice: {sentence}")

    def write_records(self, record: StepRecord, timer: StageTimer) -> None:
        """The ledger unless `trainer.ledger` is off; a readable dump when `trainer.rollout_data_dir` is set."""
        if self.ledger is not None:
            with timer("ledger"):
                scored = scored_only(record.rollouts)
                errors = [[f"{name}: {why}" for name, why in t.tool_errors] for t in scored]
                path = self.ledger.append(record.step, record.batch, [t.stop_reason for t in scored], errors)
            if record.step == self.trainer.first_step:
                self.note(size_line(path.stat().st_size, self.total_steps, self.ledger.keep_steps))
        if self.config.trainer.rollout_data_dir:
            with timer("dump_rollout_generations"):
                dump_rollout_batch(self.config.trainer.rollout_data_dir, record.step, record.rollouts)

    def validate(self) -> dict[str, float]:
        """Sample the held-out prompts with the published weights and score them; logs, prints and dumps answers."""
        assert self.validation is not None
        with self.observers.validation():
            metrics, rollouts = self.trainer.wait_for(self.validation.run())
        step = self.trainer.global_step
        if self.config.trainer.validation_data_dir:
            dump_rollout_batch(self.config.trainer.validation_data_dir, step, rollouts)
        dump_rollout_batch(str(self.root / VALIDATION_SAMPLES), step, first_prompts(rollouts, NUM_VALIDATION_SAMPLES))
        self.last_validation = metrics
        for line in left_out_lines(step, rollouts):
            self.note(line)
        shown = rollouts.trajectories[: self.config.trainer.log_val_generations]
        for trajectory in shown:
            self.note(format_answer(step, trajectory))
        rows = {row.index: row for row in rollouts.rows}
        samples = [(rows[t.row].text, str(rows[t.row].ground_truth), t.response_text, t.reward) for t in shown]
        self.tracking.log_samples(samples, step)
        return metrics

    def header_lines(self) -> list[str]:
        """Lines that are known once everything is loaded: devices, rows, steps."""
        data = self.config.data
        none = f"no validation ({'trainer.test_freq=N' if data.val_files else 'data.val_files is not set'})"
        held_out = f"{len(self.validation.prompts):,} held out" if self.validation else none
        every = when_validated(self.config) if self.validation else ""
        return [
            f"device       {get_platform().device_name}, {describe_pools(self.trainer.pools.groups)}",
            f"rows         {self.plan.num_prompts:,} prompts, {held_out}",
            f"answers end  {self.plan.answer_ends}",
            f"steps        {self.total_steps:,} of {data.train_batch_size} prompts x "
            f"{self.config.actor_rollout_ref.rollout.n} answers{every}",
            *self.shared_prompts_line(),
            *restart_line(self.config, self.trainer.actor.group.local_worker is not None),
        ]

    def shared_prompts_line(self) -> list[str]:
        """Says whether a prompt of several answers is computed once."""
        wanted = self.trainer.actor.dispatcher.share_prompts
        if not wanted or self.config.actor_rollout_ref.rollout.n == 1:
            return []
        where = " where that is faster" if wanted == "auto" else ""
        return [f"prompts      of a group are computed once{where}; */perf/computed_tokens of trained_tokens"]

    def save(self) -> None:
        """Save the roles and the trainer's state in global_step_N, or start to."""
        if self.ledger is not None:
            self.ledger.sync()  # a checkpoint that survives a power cut has the records of its steps
        state = {**self.trainer.state_dict(), "driver_generators": rng.states_as_json()}
        self.checkpoints.save(self.trainer.global_step, state, self.roles)
        self.saved_step = self.trainer.global_step

    def resume(self) -> None:
        """Restore the checkpoint that trainer.resume_mode selects, if any; drop records of steps that run again."""
        folder = find_resume(self.config.trainer, list(self.roles))
        if self.config.trainer.del_local_ckpt_after_load and folder is not None and folder.parent == self.root:
            self.checkpoints.replace_next(folder)
        if folder is not None:
            for name, role in self.roles.items():
                role.load(folder / name)
            self.trainer.load_state_dict(state := read_state(folder))
            if "driver_generators" in state:  # earlier versions saved those of the ranks alone
                rng.restore_from_json(state["driver_generators"])
            self.note(f"resumed from {folder}: step {self.trainer.global_step} of {self.total_steps} is done")
            if self.trainer.global_step >= self.total_steps and not self.config.trainer.val_only:
                self.note("nothing is left to train; raise trainer.total_training_steps or total_epochs to go on")
        step = self.trainer.global_step
        if self.config.trainer.val_only:  # no step will be run again
            return
        if self.ledger is not None:
            self.ledger.rewind(step)
        drop_records_after(self.root, step)
        self.tracking.rewind(-1 if folder is None else step)  # a run from the start logs step 0 as well
        self.summary.add_earlier(metrics_of(self.config))
        samples = str(self.root / VALIDATION_SAMPLES)
        for dumps in (self.config.trainer.rollout_data_dir, self.config.trainer.validation_data_dir, samples):
            if dumps:
                remove_dumps_after(dumps, step)

    def report_unread_keys(self, unread: Callable[[RunConfig], list[str]]) -> None:
        """Name the keys that were set but that nothing reads in this mode, on any rank."""
        for reads in self.trainer.pools.broadcast("config_keys_read"):
            add_reads({(where, name) for where, name in reads})
        for key in unread(self.config):
            self.note(f"warning: {key} was set, but nothing reads it in this run")


def is_due(step: int, frequency: int | None, last: bool) -> bool:
    """Every `frequency` steps and at the last one; only there for None, never for 0 or less."""
    return last if frequency is None else frequency > 0 and (last or step % frequency == 0)


def format_answer(step: int, trajectory: Trajectory) -> str:
    """One validation answer as text for the console."""
    return (
        f"validation at step {step}, {trajectory.data_source} row {trajectory.row}, reward {trajectory.reward}:\n"
        f"  {trajectory.response_text!r}"
    )


def scored_only(rollouts: RolloutBatch) -> list[Trajectory]:
    """The trajectories that were scored; a batch is packed from these."""
    return [t for t in rollouts.trajectories if t.reward is not None]


def first_prompts(rollouts: RolloutBatch, count: int) -> RolloutBatch:
    """The first answer to each of the first `count` prompts, which are the same at every validation."""
    wanted = {row.index: row for row in rollouts.rows[:count]}
    firsts = {t.row: t for t in reversed(rollouts.trajectories) if t.row in wanted}
    return RolloutBatch(rows=list(wanted.values()), trajectories=[firsts[row] for row in wanted if row in firsts])


def dump_rollout_batch(folder: str, step: int, rollouts: RolloutBatch) -> None:
    """Prompts, answers, ground truths, scores and the parts of the scores, as JSONL."""
    by_row = {row.index: row for row in rollouts.rows}
    rows = [by_row[t.row] for t in rollouts.trajectories]
    columns = [{**t.told(), **t.score_parts, "data_source": t.data_source} for t in rollouts.trajectories]
    names = sorted({name for column in columns for name in column} - {"response_text"})
    dump_rollouts(
        folder,
        step,
        inputs=[row.text for row in rows],
        outputs=[t.response_text for t in rollouts.trajectories],
        ground_truths=[row.ground_truth for row in rows],
        scores=[t.reward for t in rollouts.trajectories],
        extras={name: [column.get(name) for column in columns] for name in names},
    )
