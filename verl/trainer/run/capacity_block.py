"""Saves before the end of a capacity block: rented machines that are taken away at a known time."""

import math
import os
import time
from collections.abc import Callable

from verl.utils.errors import ConfigError

# Unix seconds at which the block ends; set by the provider of the machines.
VARIABLES = ("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP")


class CapacityBlock:
    """When the block ends, and how long a step has taken at most; `lead_s` more seconds are kept free."""

    def __init__(self, ends_at: float = math.inf, lead_s: float = 0.0, clock: Callable[[], float] = time.time):
        self.ends_at, self.lead_s, self.clock = ends_at, lead_s, clock
        self.longest_step_s = 0.0

    @classmethod
    def from_environment(cls, lead_s: float) -> "CapacityBlock":
        """From the first of VARIABLES that is set; without one the block never ends. ConfigError unless a number."""
        name = next((name for name in VARIABLES if os.environ.get(name)), None)
        if name is None:
            return cls()
        try:
            ends_at = float(os.environ[name])
        except ValueError:
            ends_at = math.nan
        if not math.isfinite(ends_at):
            raise ConfigError(
                f"{name}={os.environ[name]!r} is no time; set it to the Unix seconds at which the machines are taken "
                "away, or unset it"
            )
        return cls(ends_at, lead_s)

    def add_step(self, step_s: float) -> None:
        """A step took `step_s` seconds without its checkpoint."""
        self.longest_step_s = max(self.longest_step_s, step_s)

    @property
    def seconds_left(self) -> float:
        return self.ends_at - self.clock()

    def save_is_due(self, save_s: float) -> bool:
        """Whether there may be no time for another step and its checkpoint, which takes `save_s` seconds.

        Never once the end has passed: the machines are still there, so the variable is of another block.
        """
        return 0 <= self.seconds_left <= self.longest_step_s + save_s + self.lead_s
