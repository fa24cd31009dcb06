"""Exceptions for user errors; the message has the problem, the value, the allowed values and what to do next."""


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
    """A failed call on one rank of a worker group: its remote traceback, or the message of an error of this module."""

    def __init__(self, rank: int, method: str, remote_traceback: str):
        separator = "\n" if "\n" in remote_traceback else " "
        super().__init__(f"rank {rank} failed in {method}():{separator}{remote_traceback}")
        self.rank, self.method, self.remote_traceback = rank, method, remote_traceback
