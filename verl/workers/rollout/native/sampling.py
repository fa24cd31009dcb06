"""Sampling that depends on the request alone: the inverse CDF of the uniform numbers of random_streams.py.

Shapes: B rows sampled at once, V vocabulary. `weights_BV` are unnormalised probabilities.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from verl.workers.rollout.base import Alternatives, SamplingParams

_BLOCK_COLUMNS = 128  # block size of the two-level search in large vocabularies; divides most sizes
_CPU_CHUNK_ELEMENTS = 1 << 19  # probabilities processed at once on a CPU: they stay in its cache
_TOP_P_CANDIDATES = 1024  # largest probabilities tried before a whole row is sorted for top-p


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling settings per row, (B,) each; None if no row of the batch needs the setting."""

    temperature_B: Tensor | None = None  # float32; 1 where greedy
    greedy_B: Tensor | None = None  # bool
    top_k_B: Tensor | None = None  # int64; V where off
    top_p_B: Tensor | None = None  # float32; 1 where off
    min_p_B: Tensor | None = None  # float32; 0 where off
    forbidden_BK: Tensor | None = None  # int64 token ids that may not be sampled, -1 for none

    @property
    def restricts(self) -> bool:
        """Whether some tokens of some row may not be sampled."""
        limits = (self.top_k_B, self.top_p_B, self.min_p_B, self.forbidden_BK)
        return any(limit is not None for limit in limits)

    def select(self, chunk: slice) -> "SamplingTensors":
        columns = (getattr(self, f.name) for f in fields(self))
        return SamplingTensors(*(None if column is None else column[chunk] for column in columns))


def sample(logits_BV: Tensor, uniforms_B: Tensor, tensors: SamplingTensors) -> tuple[Tensor, Tensor]:
    """Token ids (B,) and their log-probs (B,) float32 nats; `logits_BV` (any float type) may be overwritten.

    Log-probs are those of the full softmax at the temperature (1 if greedy), as the trainer computes them.
    min-p, top-k, top-p and forbidden tokens only restrict which token is sampled; tokens that tie with the last allowed
    probability stay allowed. A row whose logits are not finite returns a log-prob of nan.
    """
    rows, size = logits_BV.shape
    step = max(1, _CPU_CHUNK_ELEMENTS // size) if logits_BV.device.type == "cpu" else rows
    if rows <= step:
        return _sample(logits_BV, uniforms_B, tensors)
    parts = []
    for first in range(0, rows, step):
        chunk = slice(first, first + step)
        parts.append(_sample(logits_BV[chunk], uniforms_B[chunk], tensors.select(chunk)))
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _sample(logits_BV: Tensor, uniforms_B: Tensor, tensors: SamplingTensors) -> tuple[Tensor, Tensor]:
    logits_BV = logits_BV.float()
    if tensors.temperature_B is not None:
        logits_BV.div_(tensors.temperature_B.unsqueeze(1))
    peak_B1 = logits_BV.amax(-1, keepdim=True)
    weights_BV = (logits_BV - peak_B1).exp_()
    if tensors.restricts:
        total_B = weights_BV.sum(-1, dtype=torch.float64)
        tokens_B, _ = _inverse_cdf(restrict(weights_BV, tensors), uniforms_B)
    else:
        tokens_B, total_B = _inverse_cdf(weights_BV, uniforms_B)
    if tensors.greedy_B is not None:
        allowed = (
            logits_BV if tensors.forbidden_BK is None else _forbid(logits_BV.clone(), tensors.forbidden_BK, -torch.inf)
        )
        tokens_B = torch.where(tensors.greedy_B, allowed.argmax(-1), tokens_B)
    picked_B = logits_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)
    return tokens_B, picked_B - peak_B1.squeeze(1) - total_B.log().to(torch.float32)


def restrict(weights_BV: Tensor, tensors: SamplingTensors) -> Tensor:
    """`weights_BV` with zeros at forbidden tokens, then at tokens outside min-p, top-k and top-p, in this order.

    Source of min-p: Nguyen et al., "Turning Up the Heat: Min-p Sampling" (2024), section 3.
    """
    if tensors.forbidden_BK is not None:
        weights_BV = _forbid(weights_BV.clone(), tensors.forbidden_BK, 0.0)
    if tensors.min_p_B is not None:
        least_B1 = weights_BV.amax(-1, keepdim=True) * tensors.min_p_B.unsqueeze(1)
        weights_BV = weights_BV.where(weights_BV >= least_B1, 0.0)
    if tensors.top_k_B is not None:
        max_top_k = int(tensors.top_k_B.where(tensors.top_k_B < weights_BV.shape[1], 1).max())
        ranked = weights_BV.topk(max_top_k, dim=-1).values
        threshold = ranked.gather(1, (tensors.top_k_B.clamp(max=max_top_k) - 1).unsqueeze(1))
        threshold = threshold.where(tensors.top_k_B.unsqueeze(1) < weights_BV.shape[1], 0.0)
        weights_BV = weights_BV.where(weights_BV >= threshold, 0.0)
    if tensors.top_p_B is not None:
        weights_BV = weights_BV.where(weights_BV >= _top_p_threshold(weights_BV, tensors.top_p_B), 0.0)
    return weights_BV


def _top_p_threshold(weights_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """(B, 1) smallest weight in the top-p set: the fewest largest weights whose sum reaches `top_p` of the total."""
    target_mass = weights_BV.sum(-1, keepdim=True, dtype=torch.float64) * top_p_B.unsqueeze(1)
    count = min(_TOP_P_CANDIDATES, weights_BV.shape[1])
    while True:
        ranked = weights_BV.topk(count, dim=-1).values
        mass = ranked.cumsum(-1, dtype=torch.float64)
        if count == weights_BV.shape[1] or bool(((mass[:, -1:] >= target_mass) | (top_p_B >= 1).unsqueeze(1)).all()):
            break
        count = weights_BV.shape[1]
    index = (mass < target_mass).sum(-1, keepdim=True).clamp(max=count - 1)
    return ranked.gather(1, index).where(top_p_B.unsqueeze(1) < 1, 0.0)


def _forbid(values_BV: Tensor, forbidden_BK: Tensor, filler: float) -> Tensor:
    """`values_BV` with `filler` at the forbidden tokens (changed in place); -1 forbids nothing."""
    for column in forbidden_BK.unbind(1):
        rows = torch.nonzero(column >= 0).squeeze(1)
        values_BV[rows, column[rows]] = filler
    return values_BV


def penalise(logits_V: Tensor, prompt_ids: Tensor, generated_ids: Tensor, params: SamplingParams) -> None:
    """Lower the logits of tokens that occurred, in place: each generated one by `presence_penalty` and its count times
    `frequency_penalty`; those of the prompt too are divided (multiplied if negative) by `repetition_penalty`.

    Source: the OpenAI API reference; Keskar et al., "CTRL" (2019), section 4.1.
    """
    if params.repetition_penalty != 1:
        seen = torch.cat((prompt_ids, generated_ids)).unique()
        values = logits_V[seen]
        factor = params.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / factor, values * factor)
    if len(generated_ids):
        seen, counts = generated_ids.unique(return_counts=True)
        logits_V[seen] -= params.presence_penalty + params.frequency_penalty * counts


def add_bias(logits_V: Tensor, params: SamplingParams) -> None:
    """Add `logit_bias` to the logits, in place."""
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        logits_V[list(ids)] += torch.tensor(values, device=logits_V.device)


def most_likely(logits_V: Tensor, temperature: float, count: int) -> Alternatives:
    """The `count` most likely tokens with their log-probs (nats) at `temperature`."""
    best = (logits_V.float() / temperature).log_softmax(-1).topk(min(count, len(logits_V)))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _inverse_cdf(weights_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """The first token whose cumulative weight exceeds uniform x total, and the totals (float64).

    Cumulative sums are float64, so rounding changes the token only at the border of two tokens' intervals. Large
    vocabularies are searched in two levels: first the block of columns (float32 sums), then the column.
    """
    size = weights_BV.shape[1]
    if size <= 16 * _BLOCK_COLUMNS:
        return _inverse_cdf_in_one_level(weights_BV, uniforms_B)
    padding = -size % _BLOCK_COLUMNS
    if padding:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, padding))
    blocks = weights_BV.view(weights_BV.shape[0], -1, _BLOCK_COLUMNS)
    mass = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    total = mass[:, -1]
    target = (uniforms_B * total).unsqueeze(1)
    block = torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[1] - 1)
    before = torch.where(block > 0, mass.gather(1, (block - 1).clamp(min=0)), 0.0)
    chosen_block = blocks[torch.arange(len(blocks), device=blocks.device), block.squeeze(1)]
    within_block = chosen_block.cumsum(-1, dtype=torch.float64)
    # Rounding may put the target slightly above the block's own sum: clamp it.
    remainder = torch.minimum(target - before, torch.nextafter(within_block[:, -1:], torch.zeros_like(target)))
    column = torch.searchsorted(within_block, remainder, right=True)
    return (block * _BLOCK_COLUMNS + column).squeeze(1).clamp_(max=size - 1), total


def _inverse_cdf_in_one_level(weights_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    mass = weights_BV.cumsum(-1, dtype=torch.float64)
    total = mass[:, -1]
    target = (uniforms_B * total).unsqueeze(1)
    return torch.searchsorted(mass, target, right=True).squeeze(1).clamp_(max=weights_BV.shape[1] - 1), total
