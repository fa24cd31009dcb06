"""Requests in flight that have no place in the KV cache: parked over a publish, or about to go on."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from verl.workers.rollout.base import Completion
from verl.workers.rollout.native.scheduler import ParkedSequence, PrefillRequest, RequestState, RunningSequence


class Parking:
    """Unfinished sequences and waiting requests, in the order in which they go on. `NativeCore` fills it."""

    def __init__(self) -> None:
        self.sequences: list[ParkedSequence] = []
        self.states: list[RequestState] = []  # with samples that have not begun
        self.resuming: list[ParkedSequence] = []  # they get rows before those that wait

    def park(self, running: Iterable[ParkedSequence], waiting: Iterable[RequestState]) -> None:
        """Take in what ran and what waited."""
        self.sequences, self.resuming = [*running, *self.resuming, *self.sequences], []
        for place, sequence in enumerate(self.sequences):
            sequence.place = place
        self.states += waiting

    def resume(self) -> list[RequestState]:
        """Let all sequences go on; returns the requests that wait on."""
        self.resuming = sorted((*self.resuming, *self.sequences), key=lambda sequence: sequence.place)
        states, self.sequences, self.states = self.states, [], []
        return states

    def take(self, free: int) -> list[PrefillRequest]:
        """At most `free` sequences that go on now; their tokens so far are part of the prompt."""
        taken, self.resuming = self.resuming[:free], self.resuming[free:]
        states = [sequence.row.state for sequence in taken]
        return [
            PrefillRequest(state.request.prompt_ids + sequence.tokens, [(state, sequence.row.sample)], parked=sequence)
            for state, sequence in zip(states, taken, strict=True)
        ]

    def abort(self, request_id: int | None) -> tuple[list[RequestState], list[RequestState]]:
        """End the parked sequences of one request, or of all; returns the requests that are complete, and those that
        were waiting."""

        def of_it(state: RequestState) -> bool:
            return request_id in (None, state.request.request_id)

        sequences = [s for s in (*self.sequences, *self.resuming) if of_it(s.row.state)]
        states = [state for state in self.states if of_it(state)]
        self.sequences = [s for s in self.sequences if not of_it(s.row.state)]
        self.resuming = [s for s in self.resuming if not of_it(s.row.state)]
        self.states = [state for state in self.states if not of_it(state)]
        for sequence in sequences:
            sequence.row.finish(sequence.tokens, sequence.logprobs, "aborted")
        found = {id(s.row.state): s.row.state for s in sequences if s.row.state.done}
        return list(found.values()), states

    def take_back(self, state: RequestState, saved: dict[str, Any]) -> None:
        """Let `state`, which was just submitted, go on from what `saved` says about its request."""
        state.started = saved["started"]
        for sample, fields in saved["finished"].items():
            segments = tuple((version, count) for version, count in fields["segments"])
            state.finish(
                int(sample),
                Completion(**{**fields, "segments": segments, "policy_version": tuple(fields["policy_version"])}),
            )
        for part in saved["unfinished"]:
            later = [(version, first_token) for version, first_token in part["later_versions"]]
            row = RunningSequence(state, part["sample"], 0, part["first_version"], None, later_versions=later)
            self.sequences.append(ParkedSequence(row, part["tokens"], part["logprobs"], part["place"]))


def saved_requests(
    states: Iterable[RequestState], waiting: Sequence[RequestState], unfinished: Sequence[ParkedSequence]
) -> list[dict[str, Any]]:
    """All `states` as JSON values for `Parking.take_back`, those that are `waiting` first; `unfinished` in order."""
    parts: dict[int, list[dict[str, Any]]] = {}
    for place, sequence in enumerate(unfinished):
        row = sequence.row
        part = {"sample": row.sample, "first_version": row.first_version, "later_versions": row.later_versions}
        part |= {"tokens": sequence.tokens, "logprobs": sequence.logprobs, "place": place}
        parts.setdefault(row.state.request.request_id, []).append(part)
    first = {state.request.request_id for state in waiting}
    return [
        {
            "request_id": state.request.request_id,
            "prompt": state.request.prompt_ids,
            "started": state.started,
            "finished": {str(sample): asdict(completion) for sample, completion in state.completions.items()},
            "unfinished": parts.get(state.request.request_id, []),
        }
        for state in (*waiting, *(state for state in states if state.request.request_id not in first))
    ]


def samples_in_flight(saved: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The samples that have begun of a request under way, by number, from either form of `RolloutEngine.in_flight`.

    Each has `tokens`, `logprobs`, `segments` ((version, tokens that it sampled), in order), and `stop_reason`, which is
    None while it is unfinished.
    """
    if "samples" in saved:
        return dict(enumerate(saved["samples"]))
    samples: dict[int, dict[str, Any]] = {}
    for number, done in saved["finished"].items():
        segments = done["segments"] or [(done["policy_version"][1], len(done["token_ids"]))]
        sample = {"tokens": done["token_ids"], "logprobs": done["logprobs"], "segments": segments}
        samples[int(number)] = sample | {"stop_reason": done["stop_reason"]}
    for part in saved["unfinished"]:
        starts = [(part["first_version"], 0), *part["later_versions"], (-1, len(part["tokens"]))]
        segments = [(version, end - start) for (version, start), (_, end) in pairwise(starts) if end > start]
        sample = {"tokens": part["tokens"], "logprobs": part["logprobs"], "segments": segments, "stop_reason": None}
        samples[part["sample"]] = sample
    return samples
