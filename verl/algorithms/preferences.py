"""Losses of preference pairs: DPO and its relatives for a policy, Bradley-Terry for a reward model.

A loss is a function of the reward margin: the reward of the chosen answer minus that of the rejected one. The reward of
a policy is implicit, in its log-probs; a reward model states it.

Shapes: T tokens, N sequences, P = N / 2 pairs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.algorithms.losses import TokenMetrics
from verl.config import PreferenceLossConfig
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.utils.registry import Registry

MarginLoss = Callable[[Tensor, PreferenceLossConfig], Tensor]
PER_SEQUENCE = ("group_ids", "preferred", "rewards")  # columns of all pair losses


@dataclass(frozen=True)
class PreferenceLoss:
    """A registered loss of reward margins, (P,) -> (P,), and the implicit reward that it is for."""

    function: MarginLoss
    uses_reference: bool
    length_normalized: bool


PREFERENCE_LOSSES: Registry[PreferenceLoss] = Registry("preference loss")


def register_preference_loss(
    name: str, uses_reference: bool = True, length_normalized: bool = False
) -> Callable[[MarginLoss], MarginLoss]:
    """Decorator that makes `function(margins, config)`, (P,) -> (P,), selectable as `loss.name=<name>`.

    The reward of an answer y is beta x (log p(y) - log p_ref(y)); beta x log p(y) without `uses_reference`; that
    divided by the number of answer tokens with `length_normalized`.
    """

    def add(function: MarginLoss) -> MarginLoss:
        PREFERENCE_LOSSES.register(name)(PreferenceLoss(function, uses_reference, length_normalized))
        return function

    return add


@register_preference_loss("sigmoid")
def sigmoid(margins: Tensor, config: PreferenceLossConfig) -> Tensor:
    """-log sigmoid(margin): the negative log-likelihood of the preference under the Bradley-Terry model.

    With `label_smoothing` e, that of labels of which the share e is wrong: conservative DPO.
    Source: DPO, arXiv 2305.18290 eq. 7; reward models, 2203.02155 eq. 1; label smoothing, 2305.18290v3 / Mitchell,
    "A note on DPO with noisy preferences" (2023).
    """
    smoothing = config.label_smoothing
    return -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)


@register_preference_loss("ipo")
def ipo(margins: Tensor, config: PreferenceLossConfig) -> Tensor:
    """(h - 1 / (2 beta))^2 with h = margin / beta, the difference of log-ratios: the margin has a target.

    Does not push preferences that are certain without end. Source: IPO, arXiv 2310.12036 eq. 17, with beta for tau.
    """
    return (margins / config.beta - 1 / (2 * config.beta)).square()


@register_preference_loss("hinge")
def hinge(margins: Tensor, config: PreferenceLossConfig) -> Tensor:
    """max(0, 1 - margin): pairs with a margin of 1 teach nothing.

    Source: SLiC, arXiv 2305.10425 eq. 1, with log-ratios for log-probs as in 2309.06657 (hinge-norm).
    """
    return (1 - margins).relu()


@register_preference_loss("simpo", uses_reference=False, length_normalized=True)
def simpo(margins: Tensor, config: PreferenceLossConfig) -> Tensor:
    """-log sigmoid(margin - gamma), with beta x the mean log-prob of an answer's tokens as its reward.

    Needs no reference policy. Source: SimPO, arXiv 2405.14734 eq. 6.
    """
    return -logsigmoid(margins - config.gamma)


def pair_indices(batch: Batch) -> Tensor:
    """(2, P) indices of the chosen and of the rejected sequences, pairs in ascending order of `group_ids`."""
    return torch.argsort(2 * batch["group_ids"] - batch["preferred"].long()).view(-1, 2).T


class PairLoss(ABC):
    """The registered loss of `loss.name`, a mean over pairs: each token carries the loss of its pair.

    `loss_weights` are those of seq-mean-token-mean. A row's margin, the difference of the column `rewards`, is taken
    off the reward margin. Source: reward models, Llama 2, arXiv 2307.09288 eq. 2; policies, ODPO, 2402.10571 eq. 6.
    """

    per_token = False
    outputs: tuple[str, ...]
    columns: tuple[str, ...] = ("loss_mask", "loss_weights", *PER_SEQUENCE)
    optional_columns: tuple[str, ...] = ()

    def __init__(self, config: PreferenceLossConfig):
        self.config, self.loss = config, PREFERENCE_LOSSES.get(config.name)

    @abstractmethod
    def rewards(self, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        """(N,) reward of each answer."""

    def __call__(
        self, outputs: dict[str, Tensor], columns: dict[str, Tensor], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        assert cu_seqlens is not None, "a pair is two whole sequences"
        per_token = {name: column for name, column in columns.items() if name not in PER_SEQUENCE}
        batch = Batch(cu_seqlens, per_token, {name: columns[name][cu_seqlens[:-1]] for name in PER_SEQUENCE})
        losses, pairs = self.pair_losses(outputs, batch), pair_indices(batch)
        per_sequence = losses.new_zeros(batch.num_sequences).index_copy(0, pairs.flatten(), losses.repeat(2))
        return per_sequence[batch.sequence_ids()] * columns["loss_weights"], {}

    def pair_losses(self, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        """(P,) losses."""
        rewards, wanted = (r[pair_indices(batch)] for r in (self.rewards(outputs, batch), batch["rewards"]))
        return self.loss.function(rewards[0] - rewards[1] - (wanted[0] - wanted[1]), self.config)

    def metrics(self, outputs: dict[str, Tensor], batch: Batch) -> Metrics:
        """Means over pairs: rewards of both answers, their margin, and the share of pairs with a margin above 0."""
        chosen, rejected = self.rewards(outputs, batch).double()[pair_indices(batch)]
        margins, out = chosen - rejected, Metrics()
        means = {"chosen": chosen, "rejected": rejected, "margins": margins, "accuracies": margins > 0}
        for name, values in means.items():
            out.mean(f"rewards/{name}", float(values.sum()), len(values))
        return out


class DPOLoss(PairLoss):
    """On the implicit rewards of a policy."""

    outputs = ("logprobs",)

    def __init__(self, config: PreferenceLossConfig):
        super().__init__(config)
        if self.loss.uses_reference:
            self.columns = (*self.columns, "ref_logprobs")

    def rewards(self, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        """(N,) implicit reward of each answer: see `register_preference_loss`."""
        values = outputs["logprobs"] - (batch["ref_logprobs"] if self.loss.uses_reference else 0.0)
        rewards = self.config.beta * batch.sum_per_sequence(values)
        return rewards / batch.sum_per_sequence(batch["loss_mask"].long()) if self.loss.length_normalized else rewards

    def metrics(self, outputs: dict[str, Tensor], batch: Batch) -> Metrics:
        """Also the mean log-probs of the answers, nats."""
        out = super().metrics(outputs, batch)
        logprobs = batch.sum_per_sequence(outputs["logprobs"].double())[pair_indices(batch)]
        for name, values in zip(("chosen", "rejected"), logprobs, strict=True):
            out.mean(f"logps/{name}", float(values.sum()), len(values))
        return out


class RewardModelLoss(PairLoss):
    """On the rewards that a model gives: the value after the last token, where `loss_mask` is True on one more."""

    outputs = ("values",)

    def rewards(self, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        """(N,) reward of each answer."""
        return batch.sum_per_sequence(outputs["values"])
