"""Trackers of SwanLab, Trackio and ClearML, each by its own library. A start of a run is a run of its own there."""

import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from verl.observe.trackers import SAMPLE_COLUMNS, SAMPLE_TABLE, RunInfo, Sample

# the signals whose handlers the libraries replace by their own
_TAKEN = (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
# What ClearML connects by itself. It looks for a repository in a thread that starts git while it forks its reporter,
# which may keep the pipe of that git open: the thread never ends, and closing the task waits for it for minutes.
_CLEARML_CONNECTS = (
    "detect_repository", "hydra", "scikit", "joblib", "matplotlib", "tensorflow", "tensorboard", "tfdefines", "pytorch",
    "megengine", "xgboost", "catboost", "fastai", "lightgbm", "gradio",
)  # fmt: skip


class SwanLabBackend:
    """SwanLab at $SWANLAB_API_HOST with $SWANLAB_API_KEY; SWANLAB_MODE=offline or local needs no account.

    After its start SwanLab prints what it could not send and raises nothing.
    """

    def __init__(self, run: RunInfo):
        import swanlab

        self._swanlab = swanlab
        terminal = swanlab.Settings.Terminal(proxy_type="none")
        with _signals_kept():
            self._run = swanlab.init(
                project=run.project,
                name=run.experiment,
                config=run.config,
                settings=swanlab.Settings(terminal=terminal),
            )

    def log(self, data: dict[str, float], step: int) -> None:
        self._run.log(data, step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        rows = [[step, *sample] for sample in samples]
        self._run.log({SAMPLE_TABLE: self._swanlab.echarts.Table().add(["step", *SAMPLE_COLUMNS], rows)}, step=step)

    def rewind(self, step: int) -> None:
        """Does nothing: a new run has no later steps."""

    def finish(self, exit_code: int) -> None:
        with _signals_kept():
            self._run.finish(
                state="success" if exit_code == 0 else "crashed", error=f"exit code {exit_code}" if exit_code else None
            )


class TrackioBackend:
    """Trackio: a database in $TRACKIO_DIR, else in its cache folder; $TRACKIO_SERVER_URL or $TRACKIO_SPACE_ID sends."""

    def __init__(self, run: RunInfo):
        import trackio

        self._trackio = trackio
        # its samplers of the machine would log steps of their own beside those of the run
        self._run = trackio.init(
            run.project, name=run.experiment, config=run.config, embed=False, auto_log_gpu=False, auto_log_cpu=False
        )

    def log(self, data: dict[str, float], step: int) -> None:
        self._run.log(data, step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        rows = [[step, *sample] for sample in samples]
        self._run.log({SAMPLE_TABLE: self._trackio.Table(columns=["step", *SAMPLE_COLUMNS], data=rows)}, step=step)

    def rewind(self, step: int) -> None:
        """Does nothing: a new run has no later steps."""

    def finish(self, exit_code: int) -> None:
        if exit_code:
            self._run.alert("the run failed", text=f"exit code {exit_code}", level=self._trackio.AlertLevel.ERROR)
        self._run.finish()


class ClearMLBackend:
    """ClearML at $CLEARML_API_HOST with its two keys, or clearml.conf; CLEARML_OFFLINE_MODE=1 needs no server.

    A metric `a/b/c` is the series c of the plot a/b.
    """

    def __init__(self, run: RunInfo):
        import clearml

        with _signals_kept():
            self._task: Any = clearml.Task.init(
                project_name=run.project,
                task_name=run.experiment,
                reuse_last_task_id=False,
                auto_connect_arg_parser=False,
                auto_connect_frameworks=dict.fromkeys(_CLEARML_CONNECTS, False),
                auto_connect_streams=False,
                auto_resource_monitoring=False,
                output_uri=False,
            )
        self._logger: Any = self._task.get_logger()
        if run.config:
            self._task.connect_configuration(run.config, name="config")

    def log(self, data: dict[str, float], step: int) -> None:
        """ClearML would draw a value that is not finite as 0: it becomes a line of the task's log."""
        for name, value in data.items():
            if math.isfinite(value):
                title, _, series = name.rpartition("/")
                self._logger.report_scalar(title or name, series, value, step)
            else:
                self._logger.report_text(f"step {step}: {name} is {value}", print_console=False)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        rows = [list(SAMPLE_COLUMNS), *(list(sample) for sample in samples)]
        self._logger.report_table(SAMPLE_TABLE, "samples", iteration=step, table_plot=rows)

    def rewind(self, step: int) -> None:
        """Does nothing: a new task has no later steps."""

    def finish(self, exit_code: int) -> None:
        if exit_code:
            self._task.mark_failed(status_reason=f"exit code {exit_code}", force=True)
        with _signals_kept():
            self._task.close()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keeps the handlers of Ctrl-C and other signals: the run decides, and closes its trackers itself."""
    before = {number: signal.getsignal(number) for number in _TAKEN}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)
