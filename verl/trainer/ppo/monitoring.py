"""The exporter of a run, and the targets of the Prometheus that reads it."""

from collections.abc import Callable
from pathlib import Path

from verl.config import RunConfig
from verl.observe.exporter import NAME, Exporter
from verl.observe.prometheus_targets import DRIVER_JOB, ROLLOUT_JOB, reload_server, write_targets
from verl.observe.step_records import REPLICAS_FILE, append_record
from verl.observe.trackers import RunInfo
from verl.trainer.ppo.sources.trajectory_source import CollectCounts
from verl.trainer.ppo.training_run import TrainingRun
from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.engine_stats import EngineStats


def export_metrics(config: RunConfig, run: TrainingRun, engine: RolloutEngine) -> Exporter | None:
    """Export what `run` logs and does, if it is asked for; with `rollout.prometheus.enable` a server learns where."""
    settings, server = config.trainer, config.actor_rollout_ref.rollout.prometheus
    if settings.prometheus_port is None and not server.enable:
        run.after_step = lambda: _record_replicas(run, engine)
        return None
    info = RunInfo(settings.project_name, settings.experiment_name)
    exporter = Exporter(info, settings.prometheus_port or 0, settings.prometheus_address)
    run.tracking.backends[NAME] = exporter
    run.note(f"metrics for Prometheus: {exporter.url}")
    run.after_step = lambda: _export_replicas(_record_replicas(run, engine), engine, exporter)
    run.on_counts = _export_counts(exporter)
    if server.enable:
        model = server.served_model_name or Path(config.actor_rollout_ref.model.path or "").name
        write_targets(
            Path(server.file).expanduser(),
            {
                DRIVER_JOB: ([exporter.address], {"experiment": settings.experiment_name}),
                ROLLOUT_JOB: (list(engine.metrics_addresses), {"served_model_name": model}),
            },
        )
        if warning := reload_server(server.port):
            run.note(f"warning: {warning}")
    return exporter


def _export_counts(exporter: Exporter) -> Callable[[CollectCounts], None]:
    def export(counts: CollectCounts) -> None:
        for state, count in (("asked", counts.total), ("answered", counts.answered), ("scored", counts.scored)):
            exporter.gauge("verl_answers", count, state=state)
        exporter.gauge("verl_sampled_tokens", counts.tokens)

    return export


def _record_replicas(run: TrainingRun, engine: RolloutEngine) -> list[EngineStats]:
    """Records what each replica or rank has counted, also as a line of the run's folder, for its report."""
    found = list(run.trainer.wait_for(engine.stats()))
    replicas = [
        {"counts": {**stats.totals, **stats.steps}, "gauges": dict(stats.gauges), "decode_times": dict(stats.sums)}
        for stats in found
    ]
    record = {"step": run.trainer.global_step, "lost": len(engine.lost_replicas), "replicas": replicas}
    append_record(run.root / REPLICAS_FILE, record)
    return found


def _export_replicas(found: list[EngineStats], engine: RolloutEngine, exporter: Exporter) -> None:
    """Exports what each replica or rank has counted, and which replicas are lost."""
    for number, stats in enumerate(found):
        for name, count in (*stats.totals.items(), *stats.steps.items()):
            exporter.gauge("verl_replica_count_total", count, replica=str(number), count=name)
        for name, value in stats.gauges.items():
            exporter.gauge("verl_replica_value", value, replica=str(number), what=name)
    exporter.gauge("verl_replicas_lost", len(engine.lost_replicas))
