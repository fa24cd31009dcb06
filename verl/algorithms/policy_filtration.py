"""PF-PPO: the sequences of a step are drawn again by weights from their scores. Source: arXiv 2409.06957."""

import torch
from torch import Tensor

from verl.config.algorithm import PFPPOConfig
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.utils.errors import DataError

BEST_WEIGHT, OTHER_WEIGHT = 0.4, 0.1  # of max_random: the best of five answers is drawn every second time


def filtration_probabilities(scores_N: Tensor, config: PFPPOConfig) -> Tensor:
    """(N,) float64 probability of each sequence in one draw, by its weight; all alike where every weight is 0.

    Weight with pow: |score|^weight_pow. With max_min: 1 for the largest and the smallest score of the batch, else 0.
    With max_random: 0.4 for the largest, else 0.1. (The paper ranks the answers to one prompt; scores of the batch also
    do for one answer per prompt.) DataError where no number can hold the weights. Source: arXiv 2409.06957.
    """
    scores = scores_N.double()
    is_best = scores == scores.max()
    if config.reweight_method == "max_min":
        weights = (is_best | (scores == scores.min())).double()
    elif config.reweight_method == "max_random":
        weights = torch.where(is_best, BEST_WEIGHT, OTHER_WEIGHT).double()
    else:
        weights = scores.abs() ** config.weight_pow
    total = weights.sum()
    if not torch.isfinite(total):
        raise DataError(
            f"algorithm.pf_ppo.weight_pow={config.weight_pow} makes weights of scores up to {float(scores.abs().max())}"
            " that no number can hold; lower it, or scale the reward"
        )
    return weights / total if total > 0 else torch.full_like(weights, 1 / len(weights))


def draw(probabilities_N: Tensor, draws: Tensor) -> Tensor:
    """The number of a sequence for each uniform number in [0, 1); of probability 0 none."""
    ends = probabilities_N.cumsum(0)
    return torch.searchsorted(ends / ends[-1], draws.to(ends.device), right=True)


def resample_by_score(batch: Batch, config: PFPPOConfig, draws_N: Tensor) -> tuple[Batch, Metrics]:
    """As many sequences as before, drawn with replacement by weights from their scores; the update is of those.

    For gae, with a reward model that is surest of its best and its worst answers. Advantages are computed before, over
    all answers. `draws_N[i]`, uniform, chooses sequence i. Adds a column slot_ids. Metrics:
    training/pf_ppo/{distinct_sequences,score}.
    """
    scores = batch["rewards"]
    chosen = draw(filtration_probabilities(scores, config), draws_N)
    metrics = Metrics()
    metrics.mean("training/pf_ppo/distinct_sequences", float(len(set(chosen.tolist()))), 1)
    metrics.mean("training/pf_ppo/score", float(scores.double()[chosen].mean()), 1)
    return batch.select(chosen).with_columns(slot_ids=batch["group_ids"]), metrics
