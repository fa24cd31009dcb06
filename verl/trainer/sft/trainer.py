"""Supervised fine-tuning and preference training: a batch of rows a step, on the same engine as the policy."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from verl.checks.findings import Findings
from verl.checks.machine import early_findings
from verl.config import HFModelConfig, SFTConfig
from verl.config.base import add_reads
from verl.config.load import pop_unread_keys, unread_keys
from verl.config.run_name import same_command
from verl.data.batch import Batch
from verl.data.conversations import Conversations
from verl.data.metrics import Metrics
from verl.data.prompt_sampler import warn_about_unused_rows
from verl.models.fastest import keep_choices_in
from verl.models.load import describe_ends
from verl.observe.exporter import NAME, Exporter
from verl.observe.profiling.step_profiler import StepProfiler
from verl.observe.progress import Progress
from verl.observe.run_record import write_run_record
from verl.observe.run_summary import RunSummary
from verl.observe.step_records import drop_records_after, note_profile
from verl.observe.timers import StageTimer
from verl.observe.trackers import RunInfo
from verl.observe.tracking import Tracking
from verl.plugin.platform import get_platform
from verl.runtime.group import WorkerGroup
from verl.trainer.run.checkpoints import Checkpoints, folder_of_copies, read_state, step_folder
from verl.trainer.run.folder import metrics_of
from verl.trainer.run.interrupt import Interrupt, interrupted
from verl.trainer.run.resume import find_resume
from verl.trainer.sft.objectives import objective_of
from verl.trainer.sft.preparation import prepare_sft
from verl.trainer.sft.ranks import start_ranks
from verl.utils.errors import DataError
from verl.utils.seeds import derive_seed
from verl.workers.batch_dispatch import ShardDispatcher


class SFTTrainer:
    """Steps over epochs of shuffled rows; a checkpoint restores the order exactly."""

    def __init__(
        self,
        config: SFTConfig,
        train: Conversations,
        validation: Conversations | None,
        tracking: Tracking,
        note: Callable[[str], None] = print,
        answer_ends: str = "",
    ):
        self.config, self.train_set, self.validation_set = config, train, validation
        self.tracking, self.note, self.ranks = tracking, note, ExitStack()
        self.objective = objective_of(config)
        self.group: WorkerGroup
        self.trained: ShardDispatcher
        self.reference: ShardDispatcher | None = None
        self.answer_ends = answer_ends  # for header_lines
        self.global_step = self.first_step = self.trained_tokens = 0
        self.stop_requested = self.saved_step = 0  # the number of a signal; the last step that is saved
        self.counted, self.to_count = 0, 0  # sequences before those of the pass in progress, and of the stage
        self.root = Path(config.trainer.default_local_dir)
        keep_choices_in(self.root)
        data, settings = config.data, config.trainer
        self.steps_per_epoch = len(train) // data.train_batch_size
        if self.steps_per_epoch == 0:
            raise DataError(
                f"data.train_batch_size={data.train_batch_size} is more than the {len(train)} training rows; "
                f"lower it to at most {len(train)}"
            )
        warn_about_unused_rows(len(train), data.train_batch_size, data.shuffle)
        limit = settings.total_training_steps
        self.total_steps = limit if limit is not None else settings.total_epochs * self.steps_per_epoch
        self.seed = settings.seed if data.seed is None else data.seed
        self.save_freq, self.test_freq = settings.save_freq, settings.test_freq
        self.checkpoints = Checkpoints(self.root, {".": settings.max_ckpt_to_keep}, note, folder_of_copies(settings))
        self.progress, self.summary = Progress.silent(), RunSummary()
        first, last = settings.profile_interval
        steps = list(range(first, last + 1)) if first > 0 and config.profiler.enable else []
        self.profiler = StepProfiler(steps, True, self.broadcast, note, on_written=note_profile(self.root))
        self.micro = self.objective.micro_batching(config.training_engine.ranks_per_sequence)

    def start_ranks(self, model: HFModelConfig, progress: Progress) -> None:
        """Start the ranks, which hold `model`; `ranks.close()` ends them."""
        self.progress, balanced = progress, self.config.trainer.balance_batch
        with ExitStack() as ending:
            self.group = start_ranks(self.config, model, self.total_steps, ending)
            self.ranks = ending.pop_all()
        of_role = lambda name: ShardDispatcher(self.group.for_role(name), balanced, on_sequences=self.count)  # noqa: E731
        self.trained = of_role("trained")
        if "ref_logprobs" in self.objective.loss.columns:
            self.reference = of_role("reference")

    def broadcast(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every rank's `SFTRank`."""
        return self.group.broadcast(method, *args)

    @property
    def complete(self) -> bool:
        """Whether every step is done."""
        return self.global_step >= self.total_steps

    def fit(self) -> dict[str, float]:
        """Train to the last step; returns the metrics of the last one.

        Ctrl-C and SIGTERM finish the step in progress, save, and raise Interrupted.
        """
        self.resume()
        self.report_unread(lambda: [key for key in unread_keys(self.config) if not is_read_by_steps(key)])
        write_run_record(self.root, self.config, self.total_steps)
        metrics: dict[str, float] = {}
        self.progress.begin(self.total_steps, self.global_step)
        with Interrupt(self):
            while self.global_step < self.total_steps and not self.stop_requested:
                metrics = self.one_step(self.progress)
            self.profiler.finish()
            if self.stop_requested and self.first_step <= self.global_step != self.saved_step:
                self.save()  # the signal came after the step had passed its own save
            self.checkpoints.finish_all()
        if self.stop_requested and self.global_step < self.total_steps:
            folder, command = step_folder(self.root, self.global_step), same_command(self.config)
            raise interrupted(self.stop_requested, self.global_step, self.total_steps, folder, command)
        return metrics

    def one_step(self, progress: Progress) -> dict[str, float]:
        """One optimiser step, with validation and a checkpoint when they are due."""
        is_local = self.group.local_worker is not None
        timer = StageTimer(get_platform().synchronize if is_local else None, on_enter=progress.stage)
        with self.profiler.recorded(self.global_step + 1, timer), timer("step"):
            batch = self.next_batch()
            with timer("update"):
                metrics = self.update(batch).values()
            self.global_step += 1
            self.trained_tokens += batch.num_tokens
            last = self.global_step >= self.total_steps or self.stop_requested > 0
            if self.validation_set and (last or self.is_due(self.test_freq)):
                with timer("testing"):
                    metrics.update(self.validate(self.validation_set))
            if last or self.is_due(self.save_freq):
                with timer("save_checkpoint"):
                    self.save()
        metrics["train/global_tokens"] = float(batch.num_tokens)
        metrics["train/total_tokens(B)"] = self.trained_tokens / 1e9
        metrics["train/perf/throughput"] = batch.num_tokens / (timer.seconds["update"] * self.group.layout.world_size)
        metrics.update(self.mfu(batch, timer.seconds["update"]))
        metrics.update(timer.metrics())
        self.checkpoints.log_and_finish_pending(partial(self.tracking.log, metrics, self.global_step))
        progress.step(self.global_step, metrics)
        self.summary.add(self.global_step, metrics)
        if self.global_step == self.first_step:
            told = self.told_unread
            self.report_unread(lambda: [key for key in pop_unread_keys(self.config) if key not in told])
        return metrics

    def report_unread(self, unread: Callable[[], list[str]]) -> None:
        """Name the keys that were set but that nothing reads, on any rank."""
        for reads in self.broadcast("config_keys_read"):
            add_reads({(where, name) for where, name in reads})
        self.told_unread = unread()
        for key in self.told_unread:
            self.note(f"warning: {key} was set, but nothing reads it in this run")

    def header_lines(self) -> list[str]:
        """Lines that are known once everything is loaded: devices, rows, steps."""
        ranks = self.group.layout.world_size
        held_out = f"{len(self.validation_set):,} held out" if self.validation_set else "no validation"
        return [
            f"device       {get_platform().device_name}, {ranks} rank{'s' if ranks > 1 else ''}",
            f"rows         {len(self.train_set):,} {self.objective.row_name}, {held_out}",
            *([f"answers end  {self.answer_ends}"] if self.objective.model_type == "language_model" else []),
            f"steps        {self.total_steps:,} of {self.config.data.train_batch_size} {self.objective.row_name}",
        ]

    def mfu(self, batch: Batch, seconds: float) -> dict[str, float]:
        """train/mfu: FLOPs of this batch's update over the peak FLOPs of all ranks in the same time."""
        speed = self.trained.speed()
        if speed is None:
            return {}
        needed = speed.counts.update(batch.lengths.tolist(), int(batch["loss_mask"].sum()))
        return {"train/mfu": speed.mfu(needed, seconds)}

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
        batch = self.prepared(batch)
        self.trained.begin_update(batch.num_sequences)
        metrics, outputs = self.trained.update(batch, self.micro, 1.0)
        self.trained.group.broadcast("advance_schedule")
        return metrics.merge(self.objective.metrics(outputs, batch)).with_prefix("train/")

    def prepared(self, batch: Batch) -> Batch:
        """The batch with the columns that the loss reads."""
        batch = self.objective.prepare(batch)
        if self.reference is None:
            return batch
        return batch.with_columns(
            ref_logprobs=self.reference.forward(batch, ("logprobs",), self.micro, 1.0)["logprobs"]
        )

    def count(self, done: int, of: int) -> None:
        """Show how many sequences of the stage are computed, given those of a pass."""
        of = self.to_count or of
        self.progress.count(f"{min(self.counted + done, of):,} of {of:,} sequences")

    def validate(self, rows: Conversations) -> dict[str, float]:
        """`val/loss` and the objective's other metrics over all validation rows."""
        metrics, per_row = Metrics(), self.objective.sequences_per_row
        self.to_count = per_row * len(rows)
        for batch in batches(rows, self.config.data.train_batch_size):
            batch = self.prepared(batch)
            outputs = self.trained.forward(batch, self.objective.loss.outputs, self.micro, 1.0)
            metrics.merge(self.objective.validate(outputs, batch))
            self.counted += per_row * self.config.data.train_batch_size
        self.counted = self.to_count = 0
        return metrics.with_prefix("val/").values()

    def is_due(self, frequency: int | str) -> bool:
        """Every `frequency` steps, or `after_each_epoch`; never for 0 or less."""
        every = self.steps_per_epoch if frequency == "after_each_epoch" else int(frequency)
        return every > 0 and self.global_step % every == 0

    def save(self) -> None:
        """Save the engine's files and the trainer's state in global_step_N, or start to."""
        state = {"global_step": self.global_step, "trained_tokens": self.trained_tokens, "data": self.data_state()}
        self.checkpoints.save(self.global_step, state, {".": self.trained})
        self.saved_step = self.global_step

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
        self.trained.load(folder)
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
    progress: Progress | None = None,
    found: Findings | None = None,
) -> SFTTrainer:
    """The trainer with its ranks, rows and trackers.

    `found` holds the early findings, if somebody has looked.
    """
    progress, settings, found = progress or Progress.silent(), config.trainer, found or early_findings(config)
    say = lambda line: note(f"warning: {line}")  # noqa: E731
    progress.stage("reading and filtering rows")
    prepared = prepare_sft(config, found)
    found.refuse(say)
    assert prepared is not None  # without a refusal, all of it is there
    train, held_out = prepared.train, prepared.held_out
    for rows in (train, held_out):
        for line in rows.notes if rows else ():
            note(line)
    trackers = list(settings.logger)
    tracking = Tracking(settings.project_name, settings.experiment_name, trackers, config, settings.tracker_errors, say)
    if settings.prometheus_port is not None:
        run = RunInfo(settings.project_name, settings.experiment_name)
        exporter = Exporter(run, settings.prometheus_port, settings.prometheus_address)
        tracking.backends[NAME] = exporter
        note(f"metrics for Prometheus: {exporter.url}")
    answer_ends = describe_ends(config.model, prepared.tokenizer)
    trainer = SFTTrainer(config, train, held_out, tracking, note, answer_ends)
    progress.stage("loading the model")
    trainer.start_ranks(trainer.objective.model(prepared.tokenizer), progress)
    return trainer
