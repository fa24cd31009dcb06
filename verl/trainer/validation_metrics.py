"""Validation metrics over repeated answers: mean@N, std@N, best@n, worst@n and maj@n, by data source.

N answers to one prompt give, for each variable, their mean and standard deviation, and for n = 2, 4, ... up to N the
best, the worst and the majority-vote (by `pred`) value of n answers. The latter are bootstrap estimates: the mean and
standard deviation over 1000 draws of n answers with replacement, seed 42. Each metric is then averaged over the prompts
of its data source.

Shapes: P prompts with N answers each, B draws, n answers per draw.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

NUM_DRAWS = 1000
SEED = 42
_PROMPTS_AT_ONCE = 512


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[str], infos: Mapping[str, Sequence[Any]]
) -> dict[str, float]:
    """`val-core/<source>/<variable>/<metric>` for the headline figures, `val-aux/...` for all others.

    Entry i of every sequence is about answer i; answers with the same data source and uid belong to one prompt. The
    core variable is `acc` where it exists, else `reward`; its mean@N, best@N/mean and maj@N/mean are the headlines.
    Variables that hold strings or other objects are left out; `pred` is only voted on. An answer whose value is None
    was not scored: it is left out of the variable, and counted in val-aux/<source>/<variable>/unscored.
    """
    for name, values in infos.items():
        if len(values) != len(data_sources) or len(sample_uids) != len(data_sources):
            raise ValueError(f"{name!r} has {len(values)} values for {len(data_sources)} answers")
    out: dict[str, float] = {}
    for source, groups in _answers_by_source(data_sources, sample_uids).items():
        columns = {name: values for name, values in infos.items() if _is_numeric(name, values, groups)}
        core = "acc" if "acc" in columns else "reward"
        for name, values in columns.items():
            figures = _variable_metrics(values, infos.get("pred"), groups)
            largest = max((_size(metric) for metric in figures), default=0)
            for metric, value in figures.items():
                section = "val-core" if name == core and _is_headline(metric, largest) else "val-aux"
                out[f"{section}/{source}/{name}/{metric}"] = value
        for name, values in infos.items():
            missing = [values[i] is None for group in groups for i in group]
            if name != "pred" and any(missing) and (name in columns or all(missing)):
                out[f"val-aux/{source}/{name}/unscored"] = float(sum(missing))
    return out


def _answers_by_source(sources: Sequence[str], uids: Sequence[str]) -> dict[str, list[list[int]]]:
    """Data source -> answer indices of each of its prompts, in order of appearance."""
    groups: dict[str, dict[str, list[int]]] = {}
    for index, (source, uid) in enumerate(zip(sources, uids, strict=True)):
        groups.setdefault(source, {}).setdefault(uid, []).append(index)
    return {source: list(by_uid.values()) for source, by_uid in groups.items()}


def _is_numeric(name: str, values: Sequence[Any], groups: list[list[int]]) -> bool:
    seen = [values[i] for group in groups for i in group if values[i] is not None]
    numbers = (int, float, np.integer, np.floating, np.bool_)
    return name != "pred" and bool(seen) and all(isinstance(value, numbers) for value in seen)


def _size(metric: str) -> int:
    return int(metric.split("@")[1].split("/")[0])


def _is_headline(metric: str, largest: int) -> bool:
    return metric.startswith(("mean@", "maj@", "best@")) and _size(metric) == largest


def _variable_metrics(values: Sequence[Any], preds: Sequence[Any] | None, groups: list[list[int]]) -> dict[str, float]:
    """Metric -> mean over the prompts that have it. Prompts with equally many scored answers are handled together."""
    by_size: dict[int, list[list[int]]] = {}
    for group in groups:
        scored = [i for i in group if values[i] is not None]
        if scored:
            by_size.setdefault(len(scored), []).append(scored)
    totals: dict[str, tuple[float, int]] = {}
    for same_size in by_size.values():
        values_PN = np.array([[float(values[i]) for i in group] for group in same_size])
        voters = [[preds[i] for i in group] for group in same_size] if preds is not None else None
        for metric, per_prompt in _prompt_metrics(values_PN, voters).items():
            total, count = totals.get(metric, (0.0, 0))
            totals[metric] = (total + float(per_prompt.sum()), count + len(per_prompt))
    return {metric: total / count for metric, (total, count) in totals.items()}


def _prompt_metrics(values_PN: np.ndarray, voters: list[list[Any]] | None) -> dict[str, np.ndarray]:
    """Metric -> (P,) for prompts with N answers each."""
    num_answers = values_PN.shape[1]
    out = {f"mean@{num_answers}": values_PN.mean(axis=1)}
    if num_answers == 1:
        return out
    out[f"std@{num_answers}"] = values_PN.std(axis=1)
    for size in subset_sizes(num_answers):
        for name, (mean, std) in _best_and_worst(values_PN, size).items():
            out[f"{name}@{size}/mean"], out[f"{name}@{size}/std"] = mean, std
        if voters is not None:
            mean, std = _majority(values_PN, voters, size)
            out[f"maj@{size}/mean"], out[f"maj@{size}/std"] = mean, std
    return out


def subset_sizes(num_answers: int) -> list[int]:
    """2, 4, 8, ... below `num_answers`, then `num_answers` itself."""
    powers = [2**k for k in range(1, num_answers.bit_length()) if 2**k < num_answers]
    return [*powers, num_answers]


@cache
def _draws(num_answers: int, size: int) -> np.ndarray:
    """(B, n) answers drawn with replacement. The legacy generator's stream is frozen, so figures stay comparable."""
    return np.random.RandomState(SEED).randint(0, num_answers, size=(NUM_DRAWS, size))


def _best_and_worst(values_PN: np.ndarray, size: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """best and worst of n: mean and standard deviation over the draws, (P,) each."""
    draws_nB = _draws(values_PN.shape[1], size).T
    means, stds = np.empty((2, len(values_PN))), np.empty((2, len(values_PN)))
    for start in range(0, len(values_PN), _PROMPTS_AT_ONCE):
        block = slice(start, start + _PROMPTS_AT_ONCE)
        values_NP = np.ascontiguousarray(values_PN[block].T)  # rows are gathered below
        best_BP = values_NP[draws_nB[0]]
        worst_BP = best_BP.copy()
        for answers_B in draws_nB[1:]:
            drawn_BP = values_NP[answers_B]
            np.maximum(best_BP, drawn_BP, out=best_BP)
            np.minimum(worst_BP, drawn_BP, out=worst_BP)
        for kind, drawn_BP in enumerate((best_BP, worst_BP)):
            means[kind, block], stds[kind, block] = drawn_BP.mean(axis=0), drawn_BP.std(axis=0)
    return {"best": (means[0], stds[0]), "worst": (means[1], stds[1])}


def _majority(values_PN: np.ndarray, voters: list[list[Any]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Majority value of n drawn answers: that of the first with the most frequent pred (ties: drawn first)."""
    multiplicity_BN, order_BN = _draw_counts_and_order(values_PN.shape[1], size)
    means, stds = values_PN[:, 0].copy(), np.zeros(len(values_PN))
    for prompt in np.flatnonzero((values_PN != values_PN[:, :1]).any(axis=1)):  # elsewhere all values are equal
        texts_N = np.array([str(pred) for pred in voters[prompt]])
        same_NN = (texts_N[:, None] == texts_N[None, :]).astype(np.float32)
        elected_B = (multiplicity_BN @ (same_NN * (size + 1)) + order_BN).argmax(axis=1)
        elected_values_B = values_PN[prompt, elected_B]
        means[prompt], stds[prompt] = elected_values_B.mean(), elected_values_B.std()
    return means, stds


@cache
def _draw_counts_and_order(num_answers: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each draw contains each answer, and minus its first position (-inf: not drawn), (B, N) each."""
    draws_Bn = _draws(num_answers, size)
    multiplicity = np.zeros((NUM_DRAWS, num_answers), dtype=np.float32)
    order = np.full((NUM_DRAWS, num_answers), -np.inf, dtype=np.float32)
    rows = np.arange(NUM_DRAWS)
    for place in reversed(range(size)):
        multiplicity[rows, draws_Bn[:, place]] += 1
        order[rows, draws_Bn[:, place]] = -place
    return multiplicity, order
