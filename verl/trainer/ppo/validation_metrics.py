"""Validation metrics over repeated answers: mean@N, std@N, best@n, worst@n and maj@n, by data source.

N answers to one prompt give, for each variable, their mean and standard deviation, and for n = 2, 4, ... up to N the
best, the worst and the majority-vote (by `pred`) value of n answers. These are exact: the mean and standard deviation
over all subsets of n of the N answers. n = N has one subset: best@N is the maximum, and no deviation is given. Each
metric is then averaged over the prompts of its data source.

Shapes: P prompts with N answers each; K = 0 ... N answers chosen.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from math import comb
from typing import Any

import numpy as np

_MAX_VOTERS = 256  # of more answers only all vote: the exact vote of subsets takes seconds a prompt


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
    ranked_PN, spread_P = np.sort(values_PN, axis=1), np.ptp(values_PN, axis=1)
    alike = [""] * num_answers  # who is elected matters only where values differ
    votes_P = [_vote_chances(preds if spread else alike) for preds, spread in zip(voters or (), spread_P, strict=False)]
    for size in subset_sizes(num_answers):
        chances_N = np.array([comb(below, size - 1) / comb(num_answers, size) for below in range(num_answers)])
        kinds = {"best": (ranked_PN, chances_N), "worst": (ranked_PN[:, ::-1], chances_N)}
        if votes_P and size in votes_P[0]:
            kinds["maj"] = (values_PN, np.array([chances[size] for chances in votes_P]))
        for kind, (given_PN, chances) in kinds.items():
            mean_P = out[f"{kind}@{size}/mean"] = (given_PN * chances).sum(axis=1)
            if size < num_answers:
                out[f"{kind}@{size}/std"] = np.sqrt(((given_PN - mean_P[:, None]) ** 2 * chances).sum(axis=1))
    return out


def subset_sizes(num_answers: int) -> list[int]:
    """2, 4, 8, ... below `num_answers`, then `num_answers` itself."""
    powers = [2**k for k in range(1, num_answers.bit_length()) if 2**k < num_answers]
    return [*powers, num_answers]


@cache
def _binomials(num_answers: int) -> np.ndarray:
    """(N + 1, N + 1): entry (a, b) is the number of ways to choose b of a answers."""
    return np.array([[float(comb(a, b)) for b in range(num_answers + 1)] for a in range(num_answers + 1)])


def _vote_chances(preds: Sequence[Any]) -> dict[int, np.ndarray]:
    """Subset size -> (N,) chance of each answer to be elected: the first that gives the most frequent pred.

    Of equally frequent preds the one that comes first wins. So an answer wins with v votes where v - 1 answers behind
    it have its pred, and every other pred has fewer than v, or v that are all behind it.
    """
    _, first_C, labels_N = np.unique([str(pred) for pred in preds], return_index=True, return_inverse=True)
    given_CN = labels_N == np.arange(len(first_C))[:, None]  # C different preds
    sizes_C, num_answers = given_CN.sum(axis=1), len(preds)
    elected = first_C[sizes_C == sizes_C.max()].min()
    out = {num_answers: np.eye(1, num_answers, elected)[0]}
    sizes = subset_sizes(num_answers)[:-1]
    if not sizes or num_answers > _MAX_VOTERS:
        return out
    ways, behind_CN = _binomials(num_answers), given_CN[:, ::-1].cumsum(axis=1)[:, ::-1] - given_CN
    wins_NK = np.zeros((num_answers, sizes[-1] + 1))
    for votes in range(1, min(sizes_C.max(), sizes[-1]) + 1):
        others_NK = np.tile(ways[sizes_C[sizes_C < votes].sum(), : sizes[-1] + 1], (num_answers, 1))
        rivals = np.flatnonzero(sizes_C >= votes)
        for rival in rivals if len(rivals) > 1 else ():
            joined_NK = others_NK.copy()
            for count in range(1, votes + 1):
                ways_N = ways[behind_CN[rival] if count == votes else sizes_C[rival], count] * ~given_CN[rival]
                joined_NK[:, count:] += ways_N[:, None] * others_NK[:, :-count]
            others_NK = joined_NK
        own_N = ways[behind_CN[labels_N, np.arange(num_answers)], votes - 1]
        wins_NK[:, votes:] += own_N[:, None] * others_NK[:, :-votes]
    return {size: wins_NK[:, size] / ways[-1, size] for size in sizes} | out
