"""Advantages and policy losses by definition: float64 numbers, one token at a time, every formula written out.

Slow on purpose, and apart from verl.algorithms: nothing is imported from it. A sequence is a dictionary of lists with
one entry per token: mask (bool), and what the function reads. Advantages come back as one list per sequence, 0 where
the mask is False. Losses are functions of torch scalars, so that autograd gives their gradient: `log_p` carries it, and
what a paper holds fixed is detached.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from verl.utils.errors import ConfigError

Numbers = list[list[float]]
Masks = Sequence[Sequence[bool]]


def members(groups: Sequence[int], i: int) -> list[int]:
    """The sequences of the group of sequence `i`."""
    return [j for j, group in enumerate(groups) if group == groups[i]]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """The unbiased standard deviation."""
    return math.sqrt(math.fsum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def on_tokens(values: Sequence[float], masks: Masks) -> Numbers:
    return [[value if sampled else 0.0 for sampled in mask] for value, mask in zip(values, masks, strict=True)]


def whitened(rows: Numbers, masks: Masks) -> Numbers:
    """Sampled tokens shifted to mean 0 and scaled to variance 1 (+ 1e-8)."""
    all_values = [v for row, mask in zip(rows, masks, strict=True) for v, m in zip(row, mask, strict=True) if m]
    center, scale = mean(all_values), math.sqrt(deviation(all_values) ** 2 + 1e-8)
    return [
        [(v - center) / scale if m else 0.0 for v, m in zip(row, mask, strict=True)]
        for row, mask in zip(rows, masks, strict=True)
    ]


def rewards_to_go(rewards: Sequence[float], mask: Sequence[bool], gamma: float) -> list[float]:
    """This and all later rewards, discounted once per sampled token; 0 on other tokens."""
    out = [0.0] * len(rewards)
    for t in range(len(rewards)):
        later = [s for s in range(t, len(rewards)) if mask[s]]
        out[t] = math.fsum(gamma**k * rewards[s] for k, s in enumerate(later)) if mask[t] else 0.0
    return out


def aggregated(rows: Sequence[Tensor], groups: Sequence[int], mode: str, length: float) -> Tensor:
    """One number from the losses of each sequence's sampled tokens; a sequence without any does not count."""
    rows, groups = zip(*((row, group) for row, group in zip(rows, groups, strict=True) if len(row)), strict=True)
    match mode:
        case "token-mean":
            return torch.cat(rows).mean()
        case "token-sum":
            return torch.cat(rows).sum()
        case "seq-mean-token-sum":
            return torch.stack([row.sum() for row in rows]).mean()
        case "seq-mean-token-mean":
            return torch.stack([row.mean() for row in rows]).mean()
        case "seq-mean-token-sum-norm":
            return torch.stack([row.sum() / length for row in rows]).mean()
        case "prompt-mean-token-mean":
            prompts = [torch.cat([rows[j] for j in members(groups, groups.index(group))]) for group in set(groups)]
            return torch.stack([tokens.mean() for tokens in prompts]).mean()
    raise ConfigError(f"no definition of loss_agg_mode={mode!r} to compare with")


# ---- one advantage per sequence, from its score and the scores of its group


def grpo(scores: Sequence[float], groups: Sequence[int], by_std: bool) -> list[float]:
    out = []
    for i, score in enumerate(scores):
        group = [scores[j] for j in members(groups, i)]
        center, scale = (mean(group), deviation(group)) if len(group) > 1 else (0.0, 1.0)
        out.append((score - center) / (scale + 1e-6) if by_std else score - center)
    return out


def grpo_passk(scores: Sequence[float], groups: Sequence[int], by_std: bool) -> list[float]:
    out = []
    for i, score in enumerate(scores):
        group = members(groups, i)
        ranked = sorted(group, key=lambda j: (-scores[j], j))
        lead = score - scores[ranked[1]]
        scale = deviation([scores[j] for j in group]) + 1e-6 if by_std else 1.0
        out.append(lead / scale if ranked[0] == i else 0.0)
    return out


def gdpo(
    parts: Sequence[Sequence[float]], weights: Sequence[float], groups: Sequence[int], masks: Masks, by_std: bool = True
) -> Numbers:
    each = [grpo(part, groups, by_std) for part in parts]
    sums = [math.fsum(w * e[i] for w, e in zip(weights, each, strict=True)) for i in range(len(groups))]
    return whitened(on_tokens(sums, masks), masks)


def rloo(scores: Sequence[float], groups: Sequence[int]) -> list[float]:
    out = []
    for i, score in enumerate(scores):
        others = [scores[j] for j in members(groups, i) if j != i]
        out.append(score - (mean(others) if others else 0.0))
    return out


def opo(scores: Sequence[float], groups: Sequence[int], masks: Masks) -> list[float]:
    out = []
    for i, score in enumerate(scores):
        group = members(groups, i)
        lengths = [sum(masks[j]) for j in group]
        total = sum(lengths)
        weighted = math.fsum(n * scores[j] for n, j in zip(lengths, group, strict=True))
        out.append(score - (weighted / total if len(group) > 1 and total else 0.0))
    return out


def gpg(scores: Sequence[float], groups: Sequence[int]) -> list[float]:
    factor = len(scores) / max(sum(score != 0 for score in scores), 1)
    return [factor * a for a in grpo(scores, groups, by_std=False)]


def policy_filtration(scores: Sequence[float], method: str, power: float) -> list[float]:
    """The probability of each sequence in one draw of PF-PPO."""
    if method == "pow":
        weights = [math.pow(abs(s), power) for s in scores]
    elif method == "max_min":
        weights = [1.0 if s in (max(scores), min(scores)) else 0.0 for s in scores]
    else:
        weights = [0.4 if s == max(scores) else 0.1 for s in scores]
    total = math.fsum(weights)
    return [w / total if total else 1 / len(scores) for w in weights]


# ---- one advantage per token


def reinforce_plus_plus(rewards: Numbers, masks: Masks, gamma: float) -> Numbers:
    return whitened([rewards_to_go(r, m, gamma) for r, m in zip(rewards, masks, strict=True)], masks)


def reinforce_plus_plus_baseline(scores: Sequence[float], groups: Sequence[int], masks: Masks) -> Numbers:
    return whitened(on_tokens(grpo(scores, groups, by_std=False), masks), masks)


def remax(rewards: Numbers, masks: Masks, baselines: Sequence[float]) -> Numbers:
    to_go = [rewards_to_go(r, m, 1.0) for r, m in zip(rewards, masks, strict=True)]
    rows = zip(to_go, masks, baselines, strict=True)
    return [[g - b if m else 0.0 for g, m in zip(row, mask, strict=True)] for row, mask, b in rows]


def optimal_token_baseline(
    rewards: Numbers,
    masks: Masks,
    groups: Sequence[int],
    log_p: Numbers,
    squares: Numbers,
    align_by_sampled: bool,
    importance: Numbers | None = None,
    sampled_masks: Masks | None = None,
) -> Numbers:
    """Advantages: the reward to go less the weighted mean of that of aligned tokens in the group.

    Tokens are aligned that stand as many tokens after their first sampled one, also those of the environment before
    the last sampled one; with `align_by_sampled` only sampled tokens are counted and aligned.
    `importance`: weights of the losses, which make the gradient of a token as many times larger. `sampled_masks`:
    `masks` with the tokens that rollout correction has rejected.
    """
    to_go = [
        [math.fsum(r for r, m in zip(row[t:], mask[t:], strict=True) if m) for t in range(len(row))]
        for row, mask in zip(rewards, masks, strict=True)
    ]
    energy = [
        [1 - 2 * math.exp(lp) + sq for lp, sq in zip(*row, strict=True)] for row in zip(log_p, squares, strict=True)
    ]
    if importance is not None:
        energy = [[e * w * w for e, w in zip(*row, strict=True)] for row in zip(energy, importance, strict=True)]
    out = [[0.0] * len(mask) for mask in masks]

    def aligned_position(i: int, t: int) -> int:
        row = (sampled_masks or masks)[i]
        first = list(row).index(True)
        return sum(row[first:t]) if align_by_sampled else t - first

    def weight(i: int, t: int) -> float:
        return math.fsum(energy[i][s] for s in range(t + 1) if masks[i][s])

    def compared(j: int) -> list[int]:
        sampled = [s for s, m in enumerate(masks[j]) if m]
        return sampled if align_by_sampled or not sampled else list(range(sampled[0], sampled[-1] + 1))

    for i, mask in enumerate(masks):
        for t in (t for t in range(len(mask)) if mask[t]):
            peers = [
                (j, s)
                for j in members(groups, i)
                for s in compared(j)
                if aligned_position(j, s) == aligned_position(i, t)
            ]
            total = math.fsum(weight(j, s) for j, s in peers)
            product = math.fsum(to_go[j][s] * weight(j, s) for j, s in peers)
            out[i][t] = to_go[i][t] - (product / max(total, 1e-8) if len(peers) > 1 else 0.0)
    return out


# ---- policy losses of one token


def ratio_of(log_p: Tensor, old: Tensor) -> Tensor:
    return torch.exp(torch.clamp(log_p - old, -20.0, 20.0))


def clip(x: Tensor, low: float, high: float) -> Tensor:
    return torch.clamp(x, 1 - low, 1 + high)


def ppo(log_p: Tensor, old: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    ratio = ratio_of(log_p, old)
    return -torch.minimum(ratio * a, clip(ratio, low, high) * a)


def vanilla(log_p: Tensor, old: Tensor, a: Tensor, low: float, high: float, c: float) -> Tensor:
    loss = ppo(log_p, old, a, low, high)
    return torch.minimum(loss, -c * a) if a < 0 else loss


def cispo(log_p: Tensor, old: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    return -clip(ratio_of(log_p, old), low, high).detach() * a * log_p


def sapo(log_p: Tensor, old: Tensor, a: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    tau = tau_pos if a > 0 else tau_neg
    return -a * 4 / tau / (1 + torch.exp(-tau * (ratio_of(log_p, old) - 1)))


def policy_gradient(log_p: Tensor, a: Tensor) -> Tensor:
    return -a * log_p


def dro(log_p: Tensor, old: Tensor, a: Tensor, beta: float) -> Tensor:
    return -(a * log_p - beta / 2 * (log_p - old) ** 2)


def total_variation(p: float, old: float) -> float:
    """Between two distributions of two outcomes, with probabilities `p` and `old` of the first."""
    return (abs(p - old) + abs((1 - p) - (1 - old))) / 2


def binary_kl(p: float, old: float) -> float:
    """KL(old || p), nats."""
    return old * math.log(old / p) + (1 - old) * math.log((1 - old) / (1 - p))


def dppo(
    log_p: Tensor,
    old: Tensor,
    a: Tensor,
    low: float,
    high: float,
    c: float,
    divergence: Callable[[float, float], float],
) -> Tensor:
    distance = divergence(math.exp(log_p.item()), math.exp(old.item()))
    if (a > 0 and log_p > old and distance > high) or (a < 0 and log_p < old and distance > low):
        return 0.0 * log_p
    return -torch.clamp(ratio_of(log_p, old), max=c).detach() * a * log_p


def kl_cov(log_p: Tensor, old: Tensor, a: Tensor, is_chosen: bool, coefficient: float) -> Tensor:
    loss = -ratio_of(log_p, old) * a
    return loss + coefficient * (log_p - old).abs() if is_chosen else loss


# ---- policy losses of one sequence: lists over its sampled tokens, which all get the loss


def gspo(log_p: Sequence[Tensor], old: Sequence[Tensor], a: Sequence[Tensor], low: float, high: float) -> list[Tensor]:
    log_s = torch.stack([lp - o for lp, o in zip(log_p, old, strict=True)]).mean()
    losses = []
    for lp, advantage in zip(log_p, a, strict=True):
        s = torch.exp(log_s.detach() + lp - lp.detach())
        losses.append(-torch.minimum(s * advantage, clip(s, low, high) * advantage))
    return losses


def geo_mean(log_p: Sequence[Tensor], old: Sequence[Tensor], a: Sequence[Tensor], low: float, high: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for lp, o, advantage in zip(log_p, old, a, strict=True):
        ratio = lp - o
        bounded = torch.clamp(ratio, -low, high)
        total = total + (torch.minimum(ratio, bounded) if advantage > 0 else torch.maximum(ratio, bounded))
    return -sum(a) / len(a) * torch.exp(total / len(log_p))


# ---- tokens chosen over a mini-batch: lists over all its sampled tokens


def covariances(log_p: Sequence[float], a: Sequence[float]) -> list[float]:
    return [(advantage - mean(a)) * (lp - mean(log_p)) for lp, advantage in zip(log_p, a, strict=True)]


def how_many(ratio: float, tokens: int) -> int:
    return 0 if ratio == 0 else max(int(ratio * tokens), 1)


def chosen_by_clip_cov(
    log_p: Sequence[float],
    old: Sequence[float],
    a: Sequence[float],
    draws: Sequence[float],
    bounds: tuple[float, float],
    ratio: float,
    clip_range: tuple[float, float],
) -> set[int]:
    inside = []
    for i, cov in enumerate(covariances(log_p, a)):
        r = math.exp(log_p[i] - old[i])
        is_clipped = (a[i] > 0 and r > 1 + clip_range[1]) or (a[i] < 0 and r < 1 - clip_range[0])
        if bounds[0] < cov < bounds[1] and not is_clipped:
            inside.append(i)
    return set(sorted(inside, key=lambda i: draws[i])[: how_many(ratio, len(a))])


def chosen_by_kl_cov(log_p: Sequence[float], a: Sequence[float], ratio: float) -> set[int]:
    cov = covariances(log_p, a)
    return set(sorted(range(len(a)), key=lambda i: -cov[i])[: how_many(ratio, len(a))])


# ---- rollout correction: log-probs of the trained policy and of the rollout, per sequence


def log_ratio(log_p: float, rollout: float) -> float:
    return max(-20.0, min(20.0, log_p - rollout))


def divergence(kind: str, x: float) -> float:
    """k1, k2 or k3 of a log-ratio, in nats."""
    return {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[kind]


def accepted(log_p: Numbers, rollout: Numbers, masks: Masks, rule: str, low: float, high: float) -> list[list[bool]]:
    """Which sampled tokens `rule` keeps. k1: ratios low to high; k2, k3: estimates up to `high`."""
    unit, _, kind = rule.rpartition("_")
    out = []
    for new, old, mask in zip(log_p, rollout, masks, strict=True):
        ratios = {t: log_ratio(new[t], old[t]) for t in range(len(mask)) if mask[t]}
        values = {t: divergence(kind, x) for t, x in ratios.items()}
        if values and unit != "token":
            numbers = list(values.values())
            whole = max(numbers) if unit == "seq_max" else math.fsum(numbers)
            values = dict.fromkeys(values, whole / len(numbers) if unit == "seq_mean" else whole)
        fits = {t: low <= math.exp(-v) <= high if kind == "k1" else v <= high for t, v in values.items()}
        out.append([fits.get(t, False) for t in range(len(mask))])
    return out


def importance_weights(
    log_p: Numbers, rollout: Numbers, masks: Masks, kept: Masks, of_sequence: bool, limits: tuple[float, float] | float
) -> Numbers:
    """Probability ratios of tokens or of whole sequences; above one limit cut to it, outside two 0."""
    out = []
    for new, old, mask, keep in zip(log_p, rollout, masks, kept, strict=True):
        logs = [log_ratio(a, b) if m else 0.0 for a, b, m in zip(new, old, mask, strict=True)]
        logs = [log_ratio(math.fsum(logs), 0.0)] * len(mask) if of_sequence else logs
        weights = [math.exp(x) for x in logs]
        if isinstance(limits, tuple):
            weights = [w if limits[0] <= w <= limits[1] else 0.0 for w in weights]
        else:
            weights = [min(w, limits) for w in weights]
        out.append([w if k else 0.0 for w, k in zip(weights, keep, strict=True)])
    return out


def normalised(weights: Numbers, kept: Masks, of_sequence: bool) -> Numbers:
    """Divided by their mean over kept tokens, or over the sequences that have any."""
    rows = [[w for w, k in zip(row, keep, strict=True) if k] for row, keep in zip(weights, kept, strict=True)]
    values = [row[0] for row in rows if row] if of_sequence else [w for row in rows for w in row]
    return [[w / mean(values) for w in row] for row in weights]
