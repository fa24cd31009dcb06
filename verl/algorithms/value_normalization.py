"""The scale on which a critic is trained: a running mean and deviation of the returns.

Shapes: T packed tokens. The critic predicts (return - mean) / deviation; its values are scaled back for all else.
Source: arXiv 1602.07714, §2.1 (adaptive rescaling of targets). The last layer is not rescaled when the scale changes
(§2.2 of it): the critic follows the scale, which moves slowly, by its own gradient.
"""

import math

import torch
from torch import Tensor

from verl.data.batch import Batch

RATE = 0.05  # weight of a step's returns in the scale: about the last 20 steps count
SMALLEST_DEVIATION = 1e-4


class ReturnScale:
    """mean = m / w and deviation = sqrt(s / w - mean^2), computed in float64 on the driver, so equal on any ranks.

    Each step moves m to the mean of its returns, s to the mean of their squares and w to 1, by the share RATE; w undoes
    the start at 0. Before the first step the scale is 0 and 1.
    """

    def __init__(self) -> None:
        self.weight = self.first = self.second = 0.0

    @property
    def mean(self) -> float:
        return self.first / self.weight if self.weight else 0.0

    @property
    def deviation(self) -> float:
        variance = self.second / self.weight - self.mean**2 if self.weight else 1.0
        return max(math.sqrt(max(variance, 0.0)), SMALLEST_DEVIATION)

    def observe(self, batch: Batch) -> None:
        """Count the `returns` of the sampled tokens of a step."""
        returns = batch.require("returns", "compute_advantages")[batch["loss_mask"]].double()
        if len(returns):
            self.weight += RATE * (1.0 - self.weight)
            self.first += RATE * (float(returns.mean()) - self.first)
            self.second += RATE * (float(returns.square().mean()) - self.second)

    def normalize(self, column: Tensor, batch: Batch) -> Tensor:
        """(T,) returns or values as the critic predicts them, 0 on tokens that were not sampled."""
        scaled = (column.double() - self.mean) / self.deviation
        return torch.where(batch["loss_mask"], scaled, 0.0).to(column.dtype)

    def restore(self, column: Tensor, batch: Batch) -> Tensor:
        """(T,) what the critic predicts, in the unit of the rewards; 0 on tokens that were not sampled."""
        raw = column.double() * self.deviation + self.mean
        return torch.where(batch["loss_mask"], raw, 0.0).to(column.dtype)

    def update_and_normalize(self, batch: Batch) -> Batch:
        """The batch with `values` as they were predicted, and `returns`, which are counted first, on the new scale."""
        predicted = self.normalize(batch.require("values", "Critic.values"), batch)
        self.observe(batch)
        return batch.with_columns(values=predicted, returns=self.normalize(batch["returns"], batch))

    def state_dict(self) -> dict[str, float]:
        """JSON values from which `load_state_dict` goes on exactly."""
        return {"weight": self.weight, "first": self.first, "second": self.second}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.weight, self.first, self.second = state["weight"], state["first"], state["second"]
