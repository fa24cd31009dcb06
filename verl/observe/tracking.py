"""Metrics of one run, sent to every tracker in `trainer.logger`."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, is_dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from verl.config import RunConfig
from verl.config.foreign_keys import load_foreign_keys
from verl.observe import hosted_trackers, trackers
from verl.observe.exporter import NAME, Exporter
from verl.utils.errors import ConfigError, VerlError
from verl.utils.suggest import did_you_mean

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """A tracker. It receives numbers only, and each step once."""

    def log(self, data: dict[str, float], step: int) -> None: ...
    def log_samples(self, samples: Sequence[trackers.Sample], step: int) -> None: ...
    def rewind(self, step: int) -> None: ...
    def finish(self, exit_code: int) -> None: ...


BACKENDS: dict[str, Callable[[trackers.RunInfo], Backend]] = {
    "console": trackers.ConsoleBackend,
    "file": trackers.FileBackend,
    "tensorboard": trackers.TensorboardBackend,
    "wandb": trackers.WandbBackend,
    "mlflow": trackers.MlflowBackend,
    "swanlab": hosted_trackers.SwanLabBackend,
    "trackio": hosted_trackers.TrackioBackend,
    "clearml": hosted_trackers.ClearMLBackend,
}
INSTALL = dict.fromkeys(("tensorboard", "wandb", "mlflow", "trackio", "clearml"), "pip install -e '.[trackers]'")
INSTALL["swanlab"] = "pip install -e '.[swanlab]'"


class TrackingError(VerlError):
    """A tracker failed; the message names it and says how to run without it."""


class Tracking:
    """Sends `log(data, step)` to the backends named in `default_backend`.

    If a tracker fails, TrackingError names it, after the others have received the step; with `errors="warn"` `warn`
    is told the first failure of each tracker, and how many there were at the end. `config` (the resolved run config,
    dataclass or plain dict) is stored by trackers that support it.

    >>> with Tracking("verl_examples", "gsm8k", ["console", "file"]) as tracking:
    ...     tracking.log({"critic/score/mean": 0.5}, step=1)
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Iterable[str] = "console",
        config: Any = None,
        errors: str = "raise",
        warn: Callable[[str], None] = logger.warning,
    ):
        self.errors, self.warn = errors, warn
        self.failed: dict[str, int] = {}  # calls that failed, of each tracker, where they only warn
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        check_backend_names(names)
        config_dict = asdict(config) if is_dataclass(config) and not isinstance(config, type) else config or {}
        run = trackers.RunInfo(project_name, experiment_name, config_dict)
        self.backends: dict[str, Backend] = {}
        for name in dict.fromkeys(names):
            try:
                self.backends[name] = BACKENDS[name](run)
            except ImportError as error:
                self._refuse_start(
                    ConfigError(
                        f"trainer.logger={name!r} needs a package that is not installed ({error}); "
                        f"{INSTALL.get(name, 'install it')} or take {name!r} out of trainer.logger"
                    ),
                    error,
                )
            except Exception as error:
                self._refuse_start(TrackingError(f"tracker {name!r} could not start: {error}"), error)

    def _refuse_start(self, refusal: VerlError, cause: Exception) -> None:
        if self.errors == "warn":
            self.warn(f"{refusal}; the run goes on without it")
            return
        self.finish(1)
        raise refusal from cause

    def log(self, data: dict[str, Any], step: int, backend: str | Iterable[str] | None = None) -> None:
        """Send the numbers in `data` for `step` to all backends, or only to `backend`."""
        numbers = {name: as_number(name, value) for name, value in data.items()}
        self._call_backends("log", self._select_backends(backend), lambda target: target.log(numbers, step))

    def log_samples(self, samples: Sequence[trackers.Sample], step: int) -> None:
        """Send answers as a table, val/generations, to every backend that has tables; without samples do nothing."""
        if samples:
            self._call_backends("log samples", list(self.backends), lambda target: target.log_samples(samples, step))

    def gauge(self, family: str, value: float) -> None:
        """Set one value of the exporter, where the run has one."""
        exporter = self.backends.get(NAME)
        if isinstance(exporter, Exporter):
            exporter.gauge(family, value)

    def rewind(self, step: int) -> None:
        """Delete what was logged for later steps, if the tracker can, for a run that resumes after `step`."""
        self._call_backends("rewind", list(self.backends), lambda target: target.rewind(step))

    def finish(self, exit_code: int = 0) -> None:
        """Flush and close every tracker. A second call does nothing."""
        backends, self.backends = self.backends, {}
        failures = []
        for name, backend in backends.items():
            try:
                backend.finish(exit_code)
            except Exception as error:
                failures.append((name, error))
        self._report("finish", failures)
        for name, count in self.failed.items():
            if count > 1:
                self.warn(f"tracker {name!r} failed {count} times in this run")

    def _select_backends(self, backend: str | Iterable[str] | None) -> list[str]:
        if backend is None:
            return list(self.backends)
        names = [backend] if isinstance(backend, str) else list(backend)
        missing = [name for name in names if name not in self.backends]
        if missing:
            raise ConfigError(
                f"tracker {missing[0]!r} is not part of this run; {did_you_mean(missing[0], self.backends)}"
            )
        return names

    def _call_backends(self, verb: str, names: list[str], call: Callable[[Backend], None]) -> None:
        failures = []
        for name in names:
            try:
                call(self.backends[name])
            except Exception as error:
                failures.append((name, error))
        self._report(verb, failures)

    def _report(self, verb: str, failures: list[tuple[str, Exception]]) -> None:
        """TrackingError with all failures, or a warning for each tracker that has not failed before."""
        if failures and self.errors == "raise":
            what = "; ".join(f"tracker {name!r} failed to {verb}: {error}" for name, error in failures)
            raise TrackingError(
                f"{what} (remove it from trainer.logger, or set trainer.tracker_errors=warn, to go on without it)"
            ) from failures[0][1]
        for name, error in failures:
            self.failed[name] = self.failed.get(name, 0) + 1
            if self.failed[name] == 1:
                self.warn(f"tracker {name!r} failed to {verb}: {error}; the run goes on")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.finish(0 if error is None else 1)


def check_backend_names(names: Iterable[str]) -> None:
    """ConfigError when a name in trainer.logger is unknown, or refused for good."""
    refused = load_foreign_keys(RunConfig).refused_values["trainer.logger"]
    for name in names:
        if name in refused:
            raise ConfigError(f"trainer.logger={name} is refused: {refused[name]}")
        if name not in BACKENDS:
            raise ConfigError(f"unknown tracker {name!r} in trainer.logger; {did_you_mean(name, BACKENDS)}")


def as_number(name: str, value: Any) -> float:
    """`value` as a float or int; also accepts a 0-d tensor or numpy scalar."""
    if isinstance(value, (bool, int, float)):
        return value
    if not isinstance(value, str):
        try:
            return value.item() if hasattr(value, "item") else float(value)
        except (TypeError, ValueError, RuntimeError):
            pass
    raise TypeError(f"metric {name!r} is {value!r} ({type(value).__name__}); trackers take single numbers")
