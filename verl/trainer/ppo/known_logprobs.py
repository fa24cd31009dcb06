"""Log-probs of sampled tokens by the trainer at the versions that sampled them, found again by the tokens."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from verl.data.trajectory import Trajectory
from verl.trainer.ppo.group_filter import Group


@dataclass(frozen=True)
class SampledTokens:
    """A sequence of L tokens, and which version of the weights sampled each."""

    tokens: np.ndarray  # (L,) int64
    versions: np.ndarray  # (L,) int64; -1 where the policy did not sample the token

    @classmethod
    def of_answer(cls, answer: Trajectory) -> "SampledTokens":
        """The tokens of a trajectory, of one turn or several."""
        versions = np.full(len(answer.tokens), -1)
        parts = answer.segments or ((answer.policy_version[1], answer.num_sampled),)
        versions[answer.loss_mask.numpy()] = _version_of_each(parts)
        return cls(answer.tokens.numpy(), versions)

    @classmethod
    def after(cls, prompt_ids: list[int], token_ids: list[int], parts: Iterable[Sequence[int]]) -> "SampledTokens":
        """`token_ids` after a prompt; `parts` are (version, tokens that it sampled), in order."""
        tokens = np.array([*prompt_ids, *token_ids], dtype=np.int64)
        return cls(tokens, np.concatenate([np.full(len(prompt_ids), -1), _version_of_each(parts)]))

    def joined(self, beginning: "SampledTokens") -> "SampledTokens | None":
        """This sequence with the versions of `beginning` too; None where it does not begin with those tokens, or where
        other versions sampled them."""
        size = len(beginning.tokens)
        mine, its = self.versions[:size], beginning.versions
        if not np.array_equal(self.tokens[:size], beginning.tokens) or ((mine >= 0) & (its >= 0) & (mine != its)).any():
            return None
        return SampledTokens(self.tokens, np.concatenate([np.maximum(mine, its), self.versions[size:]]))


def _version_of_each(parts: Iterable[Sequence[int]]) -> np.ndarray:
    versions, counts = np.array([tuple(part) for part in parts], dtype=np.int64).reshape(-1, 2).T
    return np.repeat(versions, counts)


@dataclass(frozen=True)
class _Run:
    """Neighbouring tokens of one version, and their log-probs."""

    version: int
    first: int  # place of its first token in the sequence
    before: str  # digest of the tokens before that
    tokens: np.ndarray  # (R,) int64
    logprobs: np.ndarray  # (R,) float32 nats


class KnownLogprobs:
    """What the trainer has scored of the answers to one prompt.

    It is found by what it says something about: the tokens, those before them, and the version. So it holds for an
    answer that is still being sampled, for a turn of a conversation and for the whole, and never for tokens that were
    sampled anew because a replica was lost.
    """

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    @property
    def is_empty(self) -> bool:
        return not self._runs

    def of(self, sequence: SampledTokens) -> np.ndarray:
        """(L,) float32 nats; NaN where nothing is known."""
        known = np.full(len(sequence.tokens), np.nan, dtype=np.float32)
        before = digests(sequence.tokens, (run.first for run in self._runs))
        for run in self._runs:
            size = min(len(run.tokens), len(known) - run.first)
            here = slice(run.first, run.first + size)
            if before.get(run.first) == run.before and np.array_equal(sequence.tokens[here], run.tokens[:size]):
                same = sequence.versions[here] == run.version
                known[here][same] = run.logprobs[:size][same]
        return known

    def add(self, sequence: SampledTokens, places: np.ndarray, logprobs: np.ndarray) -> None:
        """Note `logprobs` (L,) at `places` (L,) bool, tokens of one version."""
        edges = np.flatnonzero(np.diff(places, prepend=False, append=False)).tolist()
        runs = [(first, end) for first, end in pairwise(edges) if places[first]]
        before = digests(sequence.tokens, (first for first, _ in runs))
        for first, end in runs:
            tokens, values = sequence.tokens[first:end], logprobs[first:end].astype(np.float32)
            self._runs.append(_Run(int(sequence.versions[first]), first, before[first], tokens, values))

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {"version": run.version, "first": run.first, "before": run.before}
            | {"tokens": run.tokens.tolist(), "logprobs": run.logprobs.tolist()}
            for run in self._runs
        ]

    @classmethod
    def from_json(cls, saved: Sequence[dict[str, Any]]) -> "KnownLogprobs":
        known = cls()
        for run in saved:
            tokens, logprobs = np.array(run["tokens"], dtype=np.int64), np.array(run["logprobs"], dtype=np.float32)
            known._runs.append(_Run(run["version"], run["first"], run["before"], tokens, logprobs))
        return known


def digests(tokens: np.ndarray, ends: Iterable[int]) -> dict[int, str]:
    """Of the tokens before each of `ends`, as far as there are that many."""
    data, running, done, out = memoryview(tokens.astype("<i8").tobytes()), hashlib.blake2b(digest_size=16), 0, {}
    for end in sorted(set(ends)):
        if end > len(tokens):
            break
        running.update(data[8 * done : 8 * end])
        out[end], done = running.hexdigest(), end
    return out


def with_older_logprobs(group: Group, known: KnownLogprobs) -> Group:
    """The answers with what is known of them."""
    if known.is_empty:
        return group
    return [
        (replace(answer, older_logprobs=torch.from_numpy(known.of(SampledTokens.of_answer(answer)))), score)
        for answer, score in group
    ]
