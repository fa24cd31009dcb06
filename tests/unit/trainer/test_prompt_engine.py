"""Log-probs of tokens by the versions that sampled them are known by request, sample, position and version."""

import asyncio
import hashlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.agent_cases import ScriptedEngine
from verl.data.batch import Batch
from verl.data.trajectory import Trajectory
from verl.rewards.base import Score
from verl.trainer.ppo.sources.prompt_engine import PromptEngine, score_version
from verl.trainer.ppo.sources.saved_groups import by_position
from verl.utils.errors import VerlError
from verl.utils.seeds import derive_seed
from verl.workers.rollout.base import Completion, GenerationRequest

GROUP, PROMPT = 7, [5, 6, 7]
Segments = list[tuple[int, int]]


class Scripted(ScriptedEngine):
    """Answers the requests for which there is a completion; the others stay in flight."""

    def __init__(self, completions: dict[int, list[Completion]] | None = None):
        super().__init__(None, [])
        self.completions = completions or {}

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        if request.request_id in self.completions:
            return self.completions[request.request_id]
        return await asyncio.Event().wait()


def completion(tokens: list[int], *segments: tuple[int, int]) -> Completion:
    versions = [version for version, _ in segments]
    return Completion(tokens, [0.0] * len(tokens), "stop", (min(versions), max(versions)), segments=tuple(segments))


def in_flight(prompt: list[int], *samples: tuple[list[int], Segments], number: int = GROUP) -> GenerationRequest:
    sampled = (Completion.of(tokens, [0.0] * len(tokens), "aborted", segments) for tokens, segments in samples)
    return GenerationRequest(number, prompt, sampled=tuple(sampled))


def by_token(batch: Batch) -> Tensor:
    """Stands for the trainer: minus the token's own number, minus a tenth of its position."""
    return -batch["tokens"].float() - batch.position_ids() / 10


def score(
    engine: PromptEngine, version: int, answers: list[Trajectory] | None, *requests: dict[int, GenerationRequest]
) -> int:
    return score_version(engine.sequences(answers, requests[0] if requests else {}), version, by_token)


def asked(completions: dict[int, list[Completion]], *requests: GenerationRequest, saved: Any = ()) -> PromptEngine:
    """An engine that got the requests, one after the other."""

    async def ask() -> PromptEngine:
        engine = PromptEngine(Scripted(completions), GROUP, saved)
        for request in requests:
            task = asyncio.ensure_future(engine.generate(request))
            await asyncio.sleep(0)
            if not task.done():
                engine.open.add(request.request_id)
                task.cancel()
        return engine

    engine = asyncio.run(ask())
    engine.open |= {r.request_id for r in requests if r.request_id not in completions}
    return engine


def answer_of(tokens: list[int], mask: list[int], *segments: tuple[int, int], conversation: int = -1) -> Trajectory:
    versions = [version for version, _ in segments]
    return Trajectory(
        torch.tensor(tokens), torch.tensor(mask, dtype=torch.bool), torch.zeros(len(tokens)), GROUP, reward=1.0,
        conversation=conversation, policy_version=(min(versions), max(versions)), segments=tuple(segments),
    )  # fmt: skip


def older(engine: PromptEngine, *answers: Trajectory, version: int = 0) -> list[list[float | None]]:
    """What is known of each token of the answers."""
    group = engine.with_older_logprobs([(answer, Score(1.0)) for answer in answers], version)
    found = [answer.older_logprobs for answer, _ in group]
    return [[None if np.isnan(v) else round(v, 4) for v in values.tolist()] for values in found if values is not None]


def test_what_was_scored_is_found_in_the_answer_that_goes_on_and_by_a_resumed_run():
    request = GenerationRequest(GROUP, PROMPT)
    engine = asked({}, request)
    assert score(engine, 0, None, {GROUP: in_flight(PROMPT, ([1, 2], [(0, 1), (2, 1)]))}) == 1
    assert score(engine, 2, None, {GROUP: in_flight(PROMPT, ([1, 2], [(0, 1), (2, 1)]))}) == 1
    assert score(engine, 2, None, {GROUP: in_flight(PROMPT, ([1, 2, 3], [(0, 1), (2, 1), (3, 1)]))}) == 0  # once
    saved = json.loads(json.dumps(engine.known(None), allow_nan=False))
    resumed = asked({GROUP: [completion([1, 2, 3], (0, 1), (2, 1), (3, 1))]}, request, saved=saved)
    whole = answer_of([*PROMPT, 1, 2, 3], [0, 0, 0, 1, 1, 1], (0, 1), (2, 1), (3, 1))
    assert older(resumed, whole, version=3) == [[None] * 3 + [-1.3, -2.4, None]]
    assert score(resumed, 3, [whole]) == 1 and older(resumed, whole) == [[None] * 3 + [-1.3, -2.4, -3.5]]
    again = asked({}, saved=json.loads(json.dumps(resumed.known([whole]), allow_nan=False)))
    assert older(again, whole) == [[None] * 3 + [-1.3, -2.4, -3.5]]


def test_an_answer_that_a_loop_has_cut_is_known_as_far_as_it_goes():
    engine = asked({GROUP: [completion([1, 2, 3], (0, 3))]}, GenerationRequest(GROUP, PROMPT))
    assert score(engine, 0, None) == 3
    cut = answer_of([*PROMPT, 1, 9, 3], [0, 0, 0, 1, 0, 1], (0, 2))
    assert older(engine, cut) == [[None] * 3 + [-1.3, None, None]]


@pytest.mark.parametrize(
    "other",
    [
        answer_of([*PROMPT, 1, 2, 9], [0, 0, 0, 1, 1, 1], (0, 2), (3, 1)),  # sampled again after a replica was lost
        answer_of([5, 6, 8, 1, 2, 3], [0, 0, 0, 1, 1, 1], (0, 3)),  # another context
        answer_of([*PROMPT, 1, 2, 3], [0, 0, 0, 1, 1, 1], (0, 2), (1, 1)),  # other weights
    ],
    ids=["tokens", "context", "version"],
)
def test_other_tokens_contexts_and_versions_have_no_known_log_probs(other: Trajectory):
    same = answer_of([*PROMPT, 1, 2, 3], [0, 0, 0, 1, 1, 1], (0, 3))
    for answer, known in ((same, -3.5), (other, None)):
        engine = asked({GROUP: [completion([1, 2, 3], (0, 3))]}, GenerationRequest(GROUP, PROMPT))
        assert score(engine, 0, None) == 3
        assert older(engine, answer)[0][5] == known


def test_what_is_sampled_anew_by_later_weights_is_not_taken_for_what_was_scored():
    engine = asked({}, GenerationRequest(GROUP, PROMPT))
    assert score(engine, 1, None, {GROUP: in_flight(PROMPT, ([1, 2], [(1, 2)]))}) == 2
    assert score(engine, 2, None, {GROUP: in_flight(PROMPT, ([3, 4, 5], [(2, 3)]))}) == 3
    assert [one["logprobs"] for one in engine.known(None)] == [pytest.approx([-3.3, -4.4, -5.5])]


def test_turns_of_a_conversation_are_found_in_the_whole_with_tool_results_between_them():
    conversation = derive_seed(GROUP, 3)
    turns = {1: [completion([1, 2], (0, 2))], 2: [completion([3, 4], (1, 1), (2, 1))]}
    second = [*PROMPT, 1, 2, 8, 8]
    requests = [GenerationRequest(n, p, conversation=conversation) for n, p in ((1, PROMPT), (2, second))]
    tokens, mask = [*second, 3, 4], [0, 0, 0, 1, 1, 0, 0, 1, 1]
    whole = answer_of(tokens, mask, (0, 2), (1, 1), (2, 1), conversation=3)
    rewritten = answer_of([5, 6, 9, *tokens[3:]], mask, (0, 2), (1, 1), (2, 1), conversation=3)
    known = [[None] * 3 + [-1.3, -2.4, None, None, -3.7, None]]
    for answer, expected in ((whole, known), (rewritten, [[None] * 9])):
        engine = asked(turns, *requests)
        assert score(engine, 0, None) == 2 and score(engine, 1, None) == 1
        assert older(engine, answer) == expected


def test_what_a_prompt_has_under_way_is_every_turn_once_with_the_versions_of_its_tokens():
    second = [*PROMPT, 1, 2, 8]
    one = in_flight(second, ([3, 4, 5], [(1, 1), (2, 2)]), number=2)
    two = in_flight(second, ([9], [(1, 1)]), ([3, 4, 5], [(1, 1), (2, 2)]), number=2)
    first = {1: [completion([1, 2], (0, 1), (1, 1))]}

    def under_way(of_second: GenerationRequest) -> list[tuple[list[int], list[tuple[int, list[int]]]]]:
        engine = asked(first, GenerationRequest(1, PROMPT), GenerationRequest(2, second))
        found = engine.sequences(None, {1: of_second, 2: of_second, 3: of_second})
        return [(s.tokens, [(part.first, part.versions.tolist()) for part in s.parts]) for s in found]

    assert under_way(one) == [([*second, 3, 4, 5], [(3, [0, 1]), (6, [1, 2, 2])])]
    assert under_way(two) == [([*second, 9], [(3, [0, 1]), (6, [1])]), ([*second, 3, 4, 5], [(6, [1, 2, 2])])]


def test_a_token_of_older_weights_without_a_score_is_refused_and_never_scored_by_others():
    answer = answer_of([5, 1, 2], [0, 1, 1], (3, 1), (4, 1))
    saved = [{"request": -1, "sample": 0, "versions": [-1, 3, 4], "logprobs": [None, -0.5, None]}]
    known = asked({}, saved=saved)
    assert older(known, answer, version=4) == [[None, -0.5, None]]  # None: the published version says it
    for engine, version in ((asked({}), 4), (known, 5)):
        with pytest.raises(VerlError, match=r"1 tokens, the first at place [12], that version [34] .*bypass_mode=True"):
            older(engine, answer, version=version)
    asked({}).with_older_logprobs([(replace(answer, reward=None), Score(None))], 5)  # no step trains on it


def test_what_an_earlier_version_saved_by_digests_is_known_by_position():
    def run(version: int, before: list[int], tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
        digest = hashlib.blake2b(np.array(before, dtype="<i8").tobytes(), digest_size=16).hexdigest()
        return {"version": version, "first": len(before), "before": digest, "tokens": tokens, "logprobs": logprobs}

    runs = [run(0, PROMPT, [1, 2], [-1.0, -2.0]), run(1, [*PROMPT, 1, 2, 8], [3], [-3.0]), run(0, [4], [1], [-9.0])]
    whole = answer_of([*PROMPT, 1, 2, 8, 3, 4], [0, 0, 0, 1, 1, 0, 1, 1], (0, 2), (1, 1), (2, 1))
    requests = [in_flight([*PROMPT, 1, 2, 8], ([3, 4], [(1, 2)]), ([7], [(1, 1)]), number=12)]
    saved = by_position(runs, [whole], requests)
    assert by_position(saved, [whole], requests) is saved  # its own form
    engine = asked({}, saved=saved)
    assert older(engine, whole) == [[None] * 3 + [-1, -2, None, -3, None]]
    assert [(one["request"], one["sample"], one["logprobs"]) for one in engine.known(None)] == [(12, 0, [-3.0, None])]
