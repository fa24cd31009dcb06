"""Exceptions for user errors; the message has the problem, the value, the allowed values and what to do next."""

from collections.abc import Sequence


class VerlError(Exception):
    """Root of every error this library raises on purpose; commands print it without a traceback."""

    exit_code = 2  # of the command


class ConfigError(VerlError):
    """A configuration key, value or combination that cannot be used."""


class RegistryError(ConfigError, ValueError):
    """A name that is not registered, or registered already."""


class DataError(VerlError):
    """A data file or row that cannot be used; names file and row."""


class Interrupted(VerlError):
    """A run that Ctrl-C or SIGTERM ended before its last step; it has saved what it has done."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class PluginError(VerlError):
    """A plug-in that cannot be loaded or registered; names it."""


class RewardError(VerlError):
    """A reward function that failed where failures stop the run."""


class CheckpointError(VerlError):
    """A checkpoint that is missing, incomplete or does not match the run."""


class TransportError(VerlError):
    """The other endpoint of a weight transfer failed, disconnected or did not answer in time."""


class WorkerError(VerlError):
    """A failed call on one rank of a worker group: its remote traceback, the message of an error of this module, how
    its process ended (`is_death`), or where it no longer moved (`is_stall`)."""

    def __init__(self, rank: int, method: str, remote_traceback: str, is_death: bool = False, is_stall: bool = False):
        separator = "\n" if "\n" in remote_traceback else " "
        super().__init__(f"rank {rank} failed in {method}():{separator}{remote_traceback}")
        self.rank, self.method, self.remote_traceback = rank, method, remote_traceback
        self.is_death, self.is_stall = is_death, is_stall


class ReplicaError(WorkerError):
    """A failed call of a rollout replica, whose number is `rank`; the text names it. It loses no rank."""

    def __str__(self) -> str:
        return self.remote_traceback


MISTAKES = "mistakes in the configuration"


class SeveralErrors(ConfigError):
    """Several independent errors, numbered in one message."""

    def __init__(self, what: str, errors: Sequence[VerlError]):
        lines = "".join(f"\n  {number}. {error}" for number, error in enumerate(errors, start=1))
        super().__init__(f"{len(errors)} {what}:{lines}")
        self.errors = errors


class Mistakes:
    """Errors of independent checks, raised together: `with mistakes: check()`, then `mistakes.raise_if_any(...)`."""

    def __init__(self) -> None:
        self.errors: list[VerlError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, VerlError):
            return False
        self.add(error)
        return True

    def add(self, error: VerlError) -> None:
        """Keep an error, once; each of several."""
        for one in error.errors if isinstance(error, SeveralErrors) else [error]:
            if str(one) not in map(str, self.errors):
                self.errors.append(one)

    def raise_if_any(self, what: str) -> None:
        """Raise the error, or SeveralErrors ("3 {what}: ...")."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise SeveralErrors(what, self.errors)
