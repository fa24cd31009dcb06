"""Who hears what a run does: progress, trackers, traces, the exporter. Made first, and handed to whoever reports."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from verl.config import RunConfig
from verl.observe.exporter import NAME, Exporter
from verl.observe.progress import Progress
from verl.observe.prometheus_targets import DRIVER_JOB, ROLLOUT_JOB, reload_server, write_targets
from verl.observe.step_records import REPLICAS_FILE, append_record
from verl.observe.trackers import RunInfo
from verl.observe.tracking import Tracking
from verl.trainer.ppo.sources.trajectory_source import CollectCounts
from verl.trainer.ppo.traces import record_traces
from verl.trainer.run.header import say
from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.engine_stats import EngineStats


class Observers:
    """The observers that the configuration asks for. `note` gets lines for the user."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        progress: Progress,
        note: Callable[[str], None] = say,
    ):
        settings = config.trainer
        self.config, self.note, self.progress = config, note, progress
        self.root, self.is_validating = Path(settings.default_local_dir), False
        run, warn = RunInfo(settings.project_name, settings.experiment_name), lambda line: note(f"warning: {line}")
        names, errors = list(settings.logger), settings.tracker_errors
        self.tracking = Tracking(run.project, run.experiment, names, config, errors, warn)
        self.traces = record_traces(config, tokenizer, note)
        self.after_step: list[Callable[[], object]] = []  # called when a step is done
        self.exporter: Exporter | None = None
        if settings.prometheus_port is not None or config.actor_rollout_ref.rollout.prometheus.enable:
            self.exporter = Exporter(run, settings.prometheus_port or 0, settings.prometheus_address)
            self.tracking.backends[NAME] = self.exporter
            note(f"metrics for Prometheus: {self.exporter.url}")

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Inside, answers are of a validation: they begin no stage."""
        self.is_validating = True
        yield
        self.is_validating = False

    def close_traces(self) -> None:
        """Send the traces that are still here."""
        if self.traces is not None:
            self.traces.close()

    def tell_prometheus(self, engine: RolloutEngine) -> None:
        """With `rollout.prometheus.enable`, write where the server finds this run and its rollout."""
        rollout, settings = self.config.actor_rollout_ref.rollout, self.config.trainer
        if self.exporter is None or not rollout.prometheus.enable:
            return
        model = rollout.prometheus.served_model_name or Path(self.config.actor_rollout_ref.model.path or "").name
        write_targets(
            Path(rollout.prometheus.file).expanduser(),
            {
                DRIVER_JOB: ([self.exporter.address], {"experiment": settings.experiment_name}),
                ROLLOUT_JOB: (list(engine.metrics_addresses), {"served_model_name": model}),
            },
        )
        if warning := reload_server(rollout.prometheus.port):
            self.note(f"warning: {warning}")

    def count_answers(self, counts: CollectCounts) -> None:
        """Show how far sampling and scoring are; the first call begins the stage."""
        if not counts.answered and not counts.tokens and not self.is_validating:
            self.progress.stage("gen")
        self.progress.count(counts.text())
        if self.exporter is not None:
            for state, count in (("asked", counts.total), ("answered", counts.answered), ("scored", counts.scored)):
                self.exporter.gauge("verl_answers", count, state=state)
            self.exporter.gauge("verl_sampled_tokens", counts.tokens)

    def count_sequences(self, done: int, of: int) -> None:
        """Show how far a pass of a model over the batch is."""
        self.progress.count(f"{done:,} of {of:,} sequences")

    def step_done(self, step: int, replicas: Sequence[EngineStats], num_lost: int) -> None:
        """Record what each replica or rank has counted, for the report of the run, and export it."""
        counted = [
            {"counts": {**stats.totals, **stats.steps}, "gauges": dict(stats.gauges), "decode_times": dict(stats.sums)}
            for stats in replicas
        ]
        append_record(self.root / REPLICAS_FILE, {"step": step, "lost": num_lost, "replicas": counted})
        if self.exporter is not None:
            for number, stats in enumerate(replicas):
                for name, count in (*stats.totals.items(), *stats.steps.items()):
                    self.exporter.gauge("verl_replica_count_total", count, replica=str(number), count=name)
                for name, value in stats.gauges.items():
                    self.exporter.gauge("verl_replica_value", value, replica=str(number), what=name)
            self.exporter.gauge("verl_replicas_lost", num_lost)
        for hear in self.after_step:
            hear()
