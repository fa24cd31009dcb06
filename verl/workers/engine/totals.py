"""What the micro-batches of one update add up to."""

import torch
from torch import Tensor

from verl.data.metrics import Metrics
from verl.workers.engine.forwards import MicroBatch


class Totals:
    """Sums of token metrics over micro-batches, kept on the device until the end so that nothing waits for it."""

    def __init__(self) -> None:
        self.sums: dict[str, list[Tensor]] = {}

    def add(self, loss_sum: Tensor, token_metrics: dict[str, Tensor], part: MicroBatch) -> None:
        if part.is_dummy:
            return
        self.sums.setdefault("loss", []).append(loss_sum.detach())
        weights = part.batch["loss_weights"]
        for name, values in token_metrics.items():
            total = (values * weights).sum() if name.endswith("_loss") else values.sum()
            self.sums.setdefault(name, []).append(total.detach())

    def metrics(self, num_tokens: int, updates: int) -> Metrics:
        """Sums with counts: losses per update, everything else per token.

        `updates` is 1 on one rank and 0 on the others, whose losses are parts of the same sum.
        """
        out = Metrics()
        for name, parts in self.sums.items():
            total = sum(torch.stack(parts).tolist())
            out.mean(name, total, updates if name == "loss" or name.endswith("_loss") else num_tokens)
        return out
