"""The rollout engine as one prompt sees it: it remembers what it sampled, and what the trainer has scored of that."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.data.batch import Batch
from verl.data.trajectory import Trajectory
from verl.trainer.ppo.sources.group_filter import Group
from verl.utils.errors import VerlError
from verl.utils.seeds import derive_seed
from verl.workers.rollout.base import Completion, GenerationRequest, RolloutEngine
from verl.workers.rollout.wrapped import WrappedEngine

BYPASS = "algorithm.rollout_correction.bypass_mode=True"
ANSWER = -1  # in place of a request: the sample of this number is a complete answer, of one turn or several


@dataclass(frozen=True)
class Part:
    """S neighbouring tokens of a sequence: a sample of a request, or a complete answer with its prompt."""

    first: int  # place of the first in the sequence
    versions: np.ndarray  # (S,) int64 that sampled them; -1 where the policy did not
    known: np.ndarray  # (S,) float32 nats by the trainer at these versions, written in place; NaN: not scored

    def unscored(self, version: int) -> np.ndarray:
        """(S,) bool: the tokens that `version` sampled and that were not scored yet."""
        return (self.versions == version) & np.isnan(self.known)


@dataclass
class SampledSequence:
    """A sequence sampled for group number `group`, complete or not."""

    group: int
    tokens: list[int]
    parts: list[Part]

    def to_score(self, version: int) -> Trajectory:
        """A trajectory of the tokens so far; its mask is True where `version` is to be scored."""
        mask = np.zeros(len(self.tokens), dtype=bool)
        for part in self.parts:
            mask[part.first : part.first + len(part.known)] |= part.unscored(version)
        tokens = torch.tensor(self.tokens)
        return Trajectory(tokens, torch.from_numpy(mask), torch.zeros(len(tokens)), group_id=self.group, reward=0.0)


def score_version(under_way: Iterable[SampledSequence], version: int, logprobs_of: Callable[[Batch], Tensor]) -> int:
    """Score the tokens that `version` sampled and that were not scored yet. Returns their number."""
    new = [sequence for sequence in under_way if any(part.unscored(version).any() for part in sequence.parts)]
    if not new:
        return 0
    scored, count = logprobs_of(Batch.pack([sequence.to_score(version) for sequence in new])), 0
    for sequence, values in zip(new, scored.split([len(sequence.tokens) for sequence in new]), strict=True):
        for part in sequence.parts:
            here = part.unscored(version)
            part.known[here] = values.numpy()[part.first :][: len(here)][here]
            count += int(here.sum())
    return count


class PromptEngine(WrappedEngine):
    """The engine for the answers to one prompt. What the trainer has scored of them it knows by request, sample,
    position and version: tokens that were sampled anew, because a replica was lost, are of a later version."""

    def __init__(self, inner: RolloutEngine, group: int, saved: Sequence[dict[str, Any]] = ()):
        super().__init__(inner)
        self.group = group
        self.open: set[int] = set()  # requests under way
        self.turns: list[tuple[GenerationRequest, int, Completion]] = []  # complete, with the number of the sample
        self._known = {
            (one["request"], one["sample"]): (np.array(one["versions"]), np.array(one["logprobs"], dtype=np.float32))
            for one in saved
        }

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        self.open.add(request.request_id)
        try:
            completions = await super().generate(request)
        finally:
            self.open.discard(request.request_id)
        self.turns += [(request, sample, completion) for sample, completion in enumerate(completions)]
        return completions

    def sequences(
        self, answers: Sequence[Trajectory] | None, in_flight: dict[int, GenerationRequest]
    ) -> list[SampledSequence]:
        """The sequences so far: the complete `answers`, or the turns and `in_flight` (by request, from the engine).
        A turn of a conversation is part of the next one."""
        if answers is not None:
            wholes = [(answer.tokens.tolist(), self._whole(number, answer)) for number, answer in enumerate(answers)]
            return [SampledSequence(self.group, tokens, [part]) for tokens, part in wholes]
        found = [([*request.prompt_ids, *c.token_ids], self._turn(request, n, c)) for request, n, c in self.turns]
        for request_id in sorted(self.open & in_flight.keys()):
            request = in_flight[request_id]
            for n, c in enumerate(request.sampled):
                found.append(([*request.prompt_ids, *c.token_ids], self._turn(request, n, c)))
        out: list[SampledSequence] = []
        for tokens, part in found:
            earlier = next((one for one in out if tokens[: len(one.tokens)] == one.tokens), None)
            if earlier is None:
                out.append(SampledSequence(self.group, tokens, [part]))
            else:
                earlier.tokens = tokens
                earlier.parts.append(part)
        return out

    def with_older_logprobs(self, group: Group, version: int) -> Group:
        """The answers with what is known of them. VerlError where one to train on has a token that older weights than
        `version`, the published ones, sampled and that was not scored."""
        parts = [self._whole(number, answer) for number, (answer, _) in enumerate(group)]
        for (answer, _), part in zip(group, parts, strict=True):
            missing = np.isnan(part.known) & (part.versions >= 0) & (part.versions < version)
            if missing.any() and answer.reward is not None:
                raise VerlError(_not_scored_message(answer, missing, part.versions))
        known = [torch.from_numpy(part.known) for part in parts]
        return [(replace(answer, older_logprobs=k), score) for (answer, score), k in zip(group, known, strict=True)]

    def known(self, answers: Sequence[Trajectory] | None) -> list[dict[str, Any]]:
        """The known log-probs of complete answers, or of requests, as JSON values for another of these engines."""
        for number, answer in enumerate(answers or ()):
            self._whole(number, answer)
        return [
            {"request": request, "sample": sample, "versions": versions.tolist()}
            | {"logprobs": [None if np.isnan(value) else value for value in logprobs.tolist()]}
            for (request, sample), (versions, logprobs) in self._known.items()
            if (request == ANSWER) == (answers is not None) and not np.isnan(logprobs).all()
        ]

    def _part(self, first: int, request: int, sample: int, versions: np.ndarray) -> Part:
        """The first tokens of a sample, as many as have `versions`."""
        known = np.full(len(versions), np.nan, dtype=np.float32)
        then, before = self._known.get((request, sample), (versions, known))
        size = min(len(then), len(versions))
        known[:size] = np.where(then[:size] == versions[:size], before[:size], np.nan)
        self._known[request, sample] = versions, known
        return Part(first, versions, known)

    def _turn(self, request: GenerationRequest, sample: int, done: Completion) -> Part:
        return self._part(len(request.prompt_ids), request.request_id, sample, versions_of(done.all_segments))

    def _whole(self, number: int, answer: Trajectory) -> Part:
        """A complete answer, with what is known of its turns where they follow the same tokens as in their request."""
        tokens, versions = answer.tokens.numpy(), versions_of_answer(answer)
        whole = self._part(0, ANSWER, number, versions)
        for request, sample, done in self.turns:
            of_sample = sample == number if request.conversation is None else (
                request.conversation == derive_seed(self.group, answer.conversation)
            )  # fmt: skip
            if not of_sample or tokens[: len(request.prompt_ids)].tolist() != request.prompt_ids:
                continue
            turn = self._turn(request, sample, done)
            known, mine = whole.known[turn.first :], tokens[turn.first :]  # views
            size = min(len(mine), len(done.token_ids))
            same = np.logical_and.accumulate(mine[:size] == done.token_ids[:size])
            same &= (turn.versions[:size] == versions[turn.first :][:size]) & np.isnan(known[:size])
            known[:size][same] = turn.known[:size][same]
        return whole


def versions_of(segments: Iterable[Sequence[int]]) -> np.ndarray:
    """(S,) the version that sampled each token; `segments` are (version, tokens that it sampled), in order."""
    versions, counts = np.array([tuple(part) for part in segments], dtype=np.int64).reshape(-1, 2).T
    return np.repeat(versions, counts)


def versions_of_answer(answer: Trajectory) -> np.ndarray:
    """(L,) the version that sampled each token of a complete answer; -1 where the policy did not."""
    versions = np.full(len(answer.tokens), -1)
    versions[answer.loss_mask.numpy()] = versions_of(
        answer.segments or ((answer.policy_version[1], answer.num_sampled),)
    )
    return versions


def _not_scored_message(answer: Trajectory, missing: np.ndarray, versions: np.ndarray) -> str:
    place = int(missing.argmax())
    return (
        f"an answer to row {answer.row} has {int(missing.sum())} tokens, the first at place {place}, that version "
        f"{int(versions[place])} of the weights sampled and that the trainer did not score before it gave that version "
        "up. Either an agent loop returned other tokens before them than it had given to generate(), or a checkpoint "
        f"goes on that was trained with {BYPASS}; set {BYPASS}, or async_training.staleness_threshold=0"
    )
