"""Supervised fine-tuning and preference training: a batch of rows a step, on the same engine as the policy.

Under torchrun every rank runs this program: each builds the whole batch and trains on its shard of it; rank 0 logs and
saves.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from verl.checks.findings import Findings
from verl.checks.machine import early_findings
from verl.config import SFTConfig
from verl.config.load import pop_unread_keys, unread_keys
from verl.config.run_name import same_command
from verl.data.balance import assign_shards
from verl.data.batch import Batch
from verl.data.conversations import Conversations
from verl.data.metrics import Metrics
from verl.data.micro_batches import MicroBatching
from verl.data.prompt_sampler import warn_about_unused_rows
from verl.models.fastest import keep_choices_in
from verl.models.load import describe_ends
from verl.observe.exporter import NAME, Exporter
from verl.observe.profiling.nsys import check_nsys
from verl.observe.profiling.rank_profiler import RankProfiler
from verl.observe.profiling.step_profiler import StepProfiler
from verl.observe.progress import Progress
from verl.observe.run_record import write_run_record
from verl.observe.run_summary import RunSummary
from verl.observe.step_records import drop_records_after, note_profile
from verl.observe.timers import StageTimer
from verl.observe.trackers import RunInfo
from verl.observe.tracking import Tracking
from verl.plugin.platform import get_platform
from verl.runtime.collectives import Collectives
from verl.runtime.group import Layout
from verl.trainer.run.checkpoints import Checkpoints, folder_of_copies, read_state, step_folder
from verl.trainer.run.folder import metrics_of
from verl.trainer.run.interrupt import Interrupt, interrupted
from verl.trainer.run.resume import find_resume
from verl.trainer.sft.lost_ranks import report_when_ended
from verl.trainer.sft.objectives import objective_of
from verl.trainer.sft.preparation import prepare_sft
from verl.utils.errors import DataError
from verl.utils.seeds import derive_seed
from verl.workers.engine.rng import seed_generators
from verl.workers.engine_worker import EngineWorker


class SFTTrainer:
    """Steps over epochs of shuffled rows; a checkpoint restores the order exactly."""

    def __init__(
        self,
        config: SFTConfig,
        train: Conversations,
        validation: Conversations | None,
        tracking: Tracking,
        note: Callable[[str], None] = print,
        collectives: Collectives | None = None,
        progress: Progress | None = None,
        answer_ends: str = "",
    ):
        self.config, self.train_set, self.validation_set = config, train, validation
        self.tracking, self.note, self.collectives = tracking, note, collectives or Collectives()
        self.objective = objective_of(config)
        self.worker: EngineWorker
        self.answer_ends = answer_ends  # for header_lines
        self.global_step = self.first_step = self.trained_tokens = 0
        self.stop_requested = self.stop_agreed = 0  # numbers of signals: on this rank, on any rank
        self.root = Path(config.trainer.default_local_dir)
        keep_choices_in(self.root)
        data, settings = config.data, config.trainer
        self.steps_per_epoch = len(train) // data.train_batch_size
        if self.steps_per_epoch == 0:
            raise DataError(
                f"data.train_batch_size={data.train_batch_size} is more than the {len(train)} training rows; "
                f"lower it to at most {len(train)}"
            )
        if self.collectives.is_rank_zero:
            warn_about_unused_rows(len(train), data.train_batch_size, data.shuffle)
        limit = settings.total_training_steps
        self.total_steps = limit if limit is not None else settings.total_epochs * self.steps_per_epoch
        self.seed = settings.seed if data.seed is None else data.seed
        self.save_freq, self.test_freq = settings.save_freq, settings.test_freq
        self.checkpoints = Checkpoints(self.root, {".": settings.max_ckpt_to_keep}, note, folder_of_copies(settings))
        self.progress, self.summary = progress or Progress.silent(), RunSummary()
        first, last = settings.profile_interval
        if first > 0 and config.profiler.enable and config.profiler.tool == "nsys":
            check_nsys(is_rank=True)
        rank_profiler = RankProfiler(config.profiler, "sft", self.collectives.rank)
        steps = list(range(first, last + 1)) if first > 0 and config.profiler.enable else []
        self.profiler = StepProfiler(steps, True, rank_profiler.call, note, on_written=note_profile(self.root))
        self.micro = self.objective.micro_batching(config.training_engine.ranks_per_sequence)

    @property
    def complete(self) -> bool:
        """Whether every step is done."""
        return self.global_step >= self.total_steps

    def fit(self) -> dict[str, float]:
        """Train to the last step; returns the metrics of the last one.

        Ctrl-C and SIGTERM finish the step in progress, save, and raise Interrupted.
        """
        self.resume()
        self.report_unread([key for key in unread_keys(self.config) if not is_read_by_steps(key)])
        if self.collectives.is_rank_zero:
            write_run_record(self.root, self.config, self.total_steps)
        metrics: dict[str, float] = {}
        self.progress.begin(self.total_steps, self.global_step)
        with Interrupt(self), report_when_ended(self.collectives.rank):
            while self.global_step < self.total_steps and not self.stop_agreed:
                metrics = self.one_step(self.progress)
            self.profiler.finish()
            self.checkpoints.finish_all()
        if self.stop_agreed and self.global_step < self.total_steps:
            folder = step_folder(self.root, self.global_step)
            raise interrupted(self.stop_agreed, self.global_step, self.total_steps, folder, same_command(self.config))
        return metrics

    def one_step(self, progress: Progress) -> dict[str, float]:
        """One optimiser step, with validation and a checkpoint when they are due."""
        timer = StageTimer(get_platform().synchronize, on_enter=progress.stage)
        with self.profiler.recorded(self.global_step + 1, timer), timer("step"):
            batch = self.next_batch()
            with timer("update"):
                metrics = self.update(batch).values()
            self.stop_agreed = max(self.collectives.all_gather(self.stop_requested))
            self.global_step += 1
            self.trained_tokens += batch.num_tokens
            last = self.global_step >= self.total_steps or self.stop_agreed > 0
            if self.validation_set and (last or self.is_due(self.test_freq)):
                with timer("testing"):
                    metrics.update(self.validate(self.validation_set))
            if last or self.is_due(self.save_freq):
                with timer("save_checkpoint"):
                    self.save()
        metrics["train/global_tokens"] = float(batch.num_tokens)
        metrics["train/total_tokens(B)"] = self.trained_tokens / 1e9
        metrics["train/perf/throughput"] = batch.num_tokens / (timer.seconds["update"] * self.collectives.world_size)
        metrics.update(self.mfu(batch, timer.seconds["update"]))
        metrics.update(timer.metrics())
        self.checkpoints.log_and_finish_pending(partial(self.tracking.log, metrics, self.global_step))
        progress.step(self.global_step, metrics)
        self.summary.add(self.global_step, metrics)
        if self.global_step == self.first_step:
            self.report_unread([key for key in pop_unread_keys(self.config) if key not in self.told_unread])
        return metrics

    def report_unread(self, keys: list[str]) -> None:
        """Name the keys that were set but that nothing reads."""
        self.told_unread = keys
        for key in keys:
            self.note(f"warning: {key} was set, but nothing reads it in this run")

    def header_lines(self) -> list[str]:
        """Lines that are known once everything is loaded: devices, rows, steps."""
        ranks = self.collectives.world_size
        held_out = f"{len(self.validation_set):,} held out" if self.validation_set else "no validation"
        return [
            f"device       {get_platform().device_name}, {ranks} rank{'s' if ranks > 1 else ''}",
            f"rows         {len(self.train_set):,} {self.objective.row_name}, {held_out}",
            *([f"answers end  {self.answer_ends}"] if self.objective.model_type == "language_model" else []),
            f"steps        {self.total_steps:,} of {self.config.data.train_batch_size} {self.objective.row_name}",
        ]

    def mfu(self, batch: Batch, seconds: float) -> dict[str, float]:
        """train/mfu: FLOPs of this batch's update over the peak FLOPs of all ranks in the same time."""
        speed = self.worker.speed()
        if speed is None:
            return {}
        needed = speed.counts.update(batch.lengths.tolist(), int(batch["loss_mask"].sum()))
        return {"train/mfu": speed.mfu(needed, seconds) / self.collectives.world_size}

    def next_batch(self) -> Batch:
        """The rows of the next step; the order of an epoch depends on the seed alone."""
        epoch, place = divmod(self.global_step, self.steps_per_epoch)
        size = self.config.data.train_batch_size
        rows = self.epoch_order(epoch)[place * size : (place + 1) * size]
        return Batch.pack([sequence for row in rows for sequence in self.train_set[row]])

    def epoch_order(self, epoch: int) -> list[int]:
        """Row numbers in training order: a permutation per epoch, or file order without data.shuffle."""
        count = len(self.train_set)
        if not self.config.data.shuffle:
            return list(range(count))
        keys = np.random.PCG64(derive_seed(self.seed, "sft order", epoch)).random_raw(count)
        return np.argsort(keys, kind="stable").tolist()

    def update(self, batch: Batch) -> Metrics:
        """One optimiser step on the whole batch."""
        shard = self.rank_shard(self.objective.prepare(batch))
        self.count(0, shard[0].num_sequences)
        local_metrics = self.objective.update(shard)
        self.worker.advance_schedule()
        return self.over_groups(local_metrics).with_prefix("train/")

    def count(self, done: int, of: int) -> None:
        """Show how far the stage is: `done` of `of` sequences, and those that the engine's next call computes."""

        def show(inside: int) -> None:
            self.progress.count(f"{min(done + inside, of):,} of {of:,} sequences")

        show(0)
        self.worker.engine.on_sequences = show

    def rank_shard(self, batch: Batch) -> tuple[Batch, MicroBatching]:
        """This rank's shard of a batch, and its micro-batch limits; ranks of one data-parallel group get the same."""
        if self.layout.dp == 1:
            return batch, self.micro
        balanced = self.config.trainer.balance_batch
        shards = assign_shards(batch, self.layout.dp, self.micro, self.worker.attention_length(), balanced)
        shard = shards[self.worker.place().data_group]
        return batch.select(shard.indices), shard.micro

    @cached_property
    def layout(self) -> Layout:
        """Which rank sees which shard; all ranks ask for it first at the same time."""
        return Layout(tuple(self.collectives.all_gather(self.worker.place())))

    def over_groups(self, local_metrics: Metrics) -> Metrics:
        """The metrics of one rank of each data-parallel group together, on every rank."""
        metrics, parts = Metrics(), self.collectives.all_gather(local_metrics)
        for rank in self.layout.output_ranks:
            metrics.merge(parts[rank])
        return metrics

    def validate(self, rows: Conversations) -> dict[str, float]:
        """`val/loss` and the objective's other metrics over all validation rows."""
        metrics, done, per_row = Metrics(), 0, self.objective.sequences_per_row
        for batch in batches(rows, self.config.data.train_batch_size):
            shard = self.rank_shard(self.objective.prepare(batch))
            self.count(done, per_row * len(rows))
            done += per_row * self.config.data.train_batch_size
            metrics.merge(self.objective.validate(shard))
        return self.over_groups(metrics).with_prefix("val/").values()

    def is_due(self, frequency: int | str) -> bool:
        """Every `frequency` steps, or `after_each_epoch`; never for 0 or less."""
        every = self.steps_per_epoch if frequency == "after_each_epoch" else int(frequency)
        return every > 0 and self.global_step % every == 0

    def save(self) -> None:
        """Save the engine's files and the trainer's state in global_step_N, or start to."""
        state = {"global_step": self.global_step, "trained_tokens": self.trained_tokens, "data": self.data_state()}
        self.checkpoints.save(self.global_step, state, {".": self.worker.engine})

    def data_state(self) -> dict[str, Any]:
        """The settings that determine which rows a step trains on."""
        data = self.config.data
        return {
            "rows": self.train_set.digest,
            "data.train_batch_size": data.train_batch_size,
            "data.shuffle": data.shuffle,
            "data.seed": self.seed,
        }

    def resume(self) -> None:
        """Restore the checkpoint that trainer.resume_mode selects, if any; drop logged metrics of later steps."""
        settings = self.config.trainer
        if settings.resume_mode == "auto" and settings.resume_from_path:
            settings = dataclasses.replace(settings, resume_mode="resume_path")
        folder = find_resume(settings, ["."])
        if folder is not None:
            self.restore(folder)
        self.first_step = self.global_step + 1
        if self.collectives.is_rank_zero:
            drop_records_after(self.root, self.global_step)
        self.tracking.rewind(self.global_step)
        self.summary.add_earlier(metrics_of(self.config))

    def restore(self, folder: Path) -> None:
        """Restore weights, optimiser state and data position; DataError if the steps would train on other rows."""
        state, expected = read_state(folder), self.data_state()
        for name, value in expected.items():
            if state["data"][name] != value:
                raise DataError(
                    f"{folder} was trained with other {name} ({state['data'][name]}, now {value}), so the rows already "
                    f"used are unknown; restore it, or start anew from model.path={folder / 'huggingface'} under "
                    "another trainer.experiment_name"
                )
        self.worker.engine.load(folder)
        self.global_step, self.trained_tokens = state["global_step"], state["trained_tokens"]
        self.note(f"resumed from {folder}: step {self.global_step} of {self.total_steps} is done")
        if self.global_step >= self.total_steps:
            self.note("nothing is left to train; raise trainer.total_training_steps or total_epochs to go on")


def is_read_by_steps(key: str) -> bool:
    """Whether only a step, or code of the user's in it, may read `key`."""
    return key.startswith("loss.") or key.endswith(("_offload", "optim.clip_grad", "trainer.balance_batch"))


def batches(rows: Conversations, size: int) -> Iterator[Batch]:
    """All rows in order, `size` at a time."""
    for start in range(0, len(rows), size):
        stop = min(start + size, len(rows))
        yield Batch.pack([sequence for row in range(start, stop) for sequence in rows[row]])


def build_sft(
    config: SFTConfig,
    note: Callable[[str], None] = print,
    collectives: Collectives | None = None,
    progress: Progress | None = None,
    found: Findings | None = None,
) -> SFTTrainer:
    """The trainer with its model, rows and trackers; only rank 0 prints notes.

    `found` holds the early findings, if somebody has looked.
    """
    collectives, progress = collectives or Collectives(), progress or Progress.silent()
    if not collectives.is_rank_zero:
        note = ignore_note
    settings, found = config.trainer, found or early_findings(config)
    say = lambda line: note(f"warning: {line}")  # noqa: E731
    seed_generators(settings.seed)
    progress.stage("reading and filtering rows")
    prepared = prepare_sft(config, found)
    found.refuse(say)
    assert prepared is not None  # without a refusal, all of it is there
    train, held_out = prepared.train, prepared.held_out
    for rows in (train, held_out):
        for line in rows.notes if rows else ():
            note(line)
    trackers = list(settings.logger) if collectives.is_rank_zero else []
    tracking = Tracking(settings.project_name, settings.experiment_name, trackers, config, settings.tracker_errors, say)
    if collectives.is_rank_zero and settings.prometheus_port is not None:
        run = RunInfo(settings.project_name, settings.experiment_name)
        exporter = Exporter(run, settings.prometheus_port, settings.prometheus_address)
        tracking.backends[NAME] = exporter
        note(f"metrics for Prometheus: {exporter.url}")
    answer_ends = describe_ends(config.model, prepared.tokenizer)
    trainer = SFTTrainer(config, train, held_out, tracking, note, collectives, progress, answer_ends)
    progress.stage("loading the model")
    trainer.worker = trainer.objective.load(prepared.tokenizer, trainer.total_steps)
    return trainer


def ignore_note(line: str) -> None:
    """Drops a note, on all ranks but the first."""
