"""Exceptions for mistakes a user can repair: what is wrong, the value seen, what is allowed, what to do next."""


class VerlError(Exception):
    """Root of every error this library raises on purpose; commands print it without a traceback."""


class ConfigError(VerlError):
    """A configuration key, value or combination that cannot be used."""


class DataError(VerlError):
    """A data file or row that cannot be used; names file and row."""


class PluginError(VerlError):
    """A plug-in that cannot be loaded or registered; names it."""


class RewardError(VerlError):
    """A reward function that failed where failures stop the run."""


class CheckpointError(VerlError):
    """A checkpoint that is missing, incomplete or does not match the run."""


class TransportError(VerlError):
    """The other end of a transport of weights failed, went away or did not answer in time."""


class WorkerError(VerlError):
    """A failed call on one rank of a worker group: its remote traceback, or the message of an error of this module."""

    def __init__(self, rank: int, method: str, remote_traceback: str):
        separator = "\n" if "\n" in remote_traceback else " "
        super().__init__(f"rank {rank} failed in {method}():{separator}{remote_traceback}")
        self.rank, self.method, self.remote_traceback = rank, method, remote_traceback
