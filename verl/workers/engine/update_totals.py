"""Sums of loss and token metrics over the micro-batches of one update."""

import torch
from torch import Tensor

from verl.data.metrics import Metrics
from verl.workers.engine.micro_batch_forward import MicroBatch

LOSSES = ("_loss", "/loss")  # metrics whose names end like this are sums with the loss weights


class TokenMetricSums:
    """Sums of token metrics over micro-batches; they stay on the device until `metrics`, to avoid synchronisation."""

    def __init__(self) -> None:
        self.sums: dict[str, list[Tensor]] = {}
        self.extremes: dict[str, list[Tensor]] = {}  # of the metrics _max and _min, the latter negated
        self.tokens = {"trained": 0, "computed": 0}

    def add(self, loss_sum: Tensor, token_metrics: dict[str, Tensor], micro_batch: MicroBatch) -> None:
        """Names decide: `_max` and `_min` are extremes of sampled tokens, losses are summed with the loss weights,
        all else plainly. A dummy adds nothing."""
        if micro_batch.is_dummy:
            return
        self.tokens["trained"] += micro_batch.batch.num_tokens
        self.tokens["computed"] += micro_batch.num_computed
        self.sums.setdefault("loss", []).append(loss_sum.detach())
        weights = micro_batch.batch["loss_weights"]
        sampled = micro_batch.batch["loss_mask"]
        for name, values in token_metrics.items():
            if name.endswith(("_max", "_min")):
                signed = values if name.endswith("_max") else -values
                self.extremes.setdefault(name, []).append(signed.masked_fill(~sampled, float("-inf")).amax())
                continue
            total = (values * weights).sum() if name.endswith(LOSSES) else values.sum()
            self.sums.setdefault(name, []).append(total.detach())

    def metrics(self, num_tokens: int, updates: int) -> Metrics:
        """Sums with counts: losses per update, everything else per token.

        `updates` is 1 on one rank and 0 on the others, whose losses are parts of the same sum.
        """
        out = Metrics()
        for name, totals in self.sums.items():
            total = sum(torch.stack(totals).tolist())
            out.mean(name, total, updates if name == "loss" or name.endswith(LOSSES) else num_tokens)
        for name, parts in self.extremes.items():
            largest = float(torch.stack(parts).max())
            if largest == float("-inf"):
                continue  # no sampled token
            if name.endswith("_max"):
                out.max(name, largest)
            else:
                out.min(name, -largest)
        for name, count in self.tokens.items() if self.tokens["computed"] < self.tokens["trained"] else ():
            out.sum(f"perf/{name}_tokens", count)
        return out
