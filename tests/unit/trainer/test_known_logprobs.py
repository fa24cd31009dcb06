"""Log-probs of tokens by the versions that sampled them are found by the tokens, and by nothing else."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.agent_cases import ScriptedEngine
from verl.data.batch import Batch
from verl.data.trajectory import Trajectory
from verl.trainer.ppo.conversation_engine import ConversationEngine
from verl.trainer.ppo.known_logprobs import KnownLogprobs, SampledTokens
from verl.trainer.ppo.older_logprobs import with_known_old_logprobs
from verl.utils.errors import VerlError
from verl.workers.rollout.base import Completion, GenerationRequest

PROMPT = [5, 6, 7]
ANSWER = SampledTokens.after(PROMPT, [1, 2, 3, 4], [(0, 1), (2, 3)])
VALUES = -np.arange(7, dtype=np.float32)


def known(sequence: SampledTokens, *versions: int) -> KnownLogprobs:
    out = KnownLogprobs()
    for version in versions:
        out.add(sequence, sequence.versions == version, VALUES[: len(sequence.tokens)])
    return out


def found(store: KnownLogprobs, sequence: SampledTokens) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in store.of(sequence)]


def test_what_was_scored_is_found_in_the_answer_that_goes_on_and_by_a_resumed_run():
    store = known(SampledTokens.after(PROMPT, [1, 2], [(0, 1), (2, 1)]), 0, 2)
    store = KnownLogprobs.from_json(json.loads(json.dumps(store.as_json())))
    assert found(store, SampledTokens.after(PROMPT, [1, 2, 3], [(0, 1), (2, 1), (3, 1)])) == [None] * 3 + [-3, -4, None]
    assert found(store, SampledTokens.after(PROMPT, [1], [(0, 1)])) == [None] * 3 + [-3]  # a loop may cut an answer


@pytest.mark.parametrize(
    "other",
    [
        SampledTokens.after(PROMPT, [1, 2, 3, 9], [(0, 1), (2, 3)]),  # sampled again after a replica was lost
        SampledTokens.after([5, 6, 8], [1, 2, 3, 4], [(0, 1), (2, 3)]),  # another context
        SampledTokens.after(PROMPT, [1, 2, 3, 4], [(0, 1), (3, 3)]),  # other weights
    ],
    ids=["tokens", "context", "version"],
)
def test_other_tokens_contexts_and_versions_have_no_known_log_probs(other: SampledTokens):
    assert found(known(ANSWER, 0, 2), ANSWER) == [None] * 3 + [-3, -4, -5, -6]
    assert found(known(ANSWER, 0, 2), other)[4:] == [None] * 3


def test_turns_of_a_conversation_are_found_in_the_whole_with_tool_results_between_them():
    first = SampledTokens.after(PROMPT, [1, 2], [(0, 2)])
    second = SampledTokens.after([*PROMPT, 1, 2, 8, 8], [3], [(1, 1)])
    store = known(first, 0)
    store.add(second, second.versions == 1, -np.arange(8, dtype=np.float32))
    mask = torch.tensor([0, 0, 0, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    tokens = torch.tensor([*PROMPT, 1, 2, 8, 8, 3, 4])
    whole = Trajectory(tokens, mask, torch.zeros(9), 0, policy_version=(0, 2), segments=((0, 2), (1, 1), (2, 1)))
    expected = [None] * 3 + [-3, -4, None, None, -7, None]
    assert found(store, SampledTokens.of_answer(whole)) == expected


def test_what_a_prompt_has_under_way_is_every_turn_once_with_the_versions_of_its_tokens():
    class Held(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> list[Completion]:
            if request.request_id == 1:
                return [Completion([1, 2], [0.0, 0.0], "stop", (0, 1), segments=((0, 1), (1, 1)))]
            return await asyncio.Event().wait()

    finished = {"token_ids": [9], "logprobs": [0.0], "segments": [], "policy_version": [1, 1], "stop_reason": "stop"}
    unfinished: dict[str, Any] = {"sample": 0, "tokens": [3, 4, 5], "logprobs": [0.0, 0.0, 0.0]}
    unfinished |= {"first_version": 1, "later_versions": [[2, 1]]}
    native: dict[str, Any] = {"prompt": [*PROMPT, 1, 2, 8], "finished": {"1": finished}, "unfinished": [unfinished]}
    parked: dict[str, Any] = {
        "prompt": [*PROMPT, 1, 2, 8],
        "samples": [{"tokens": [3, 4, 5], "segments": [[1, 1], [2, 2]]}],
    }

    async def sequences(in_flight: dict[str, Any]) -> list[SampledTokens]:
        engine = ConversationEngine(Held(None, []))
        await engine.generate(GenerationRequest(1, PROMPT))
        waiting = asyncio.ensure_future(engine.generate(GenerationRequest(2, [*PROMPT, 1, 2, 8])))
        await asyncio.sleep(0)
        out = engine.sequences({1: in_flight, 2: in_flight, 3: in_flight})
        waiting.cancel()
        return out

    whole = [-1, -1, -1, 0, 1, -1, 1, 2, 2]
    [only] = asyncio.run(sequences(parked))
    assert only.versions.tolist() == whole and only.tokens.tolist() == [*PROMPT, 1, 2, 8, 3, 4, 5]
    first, second = asyncio.run(sequences(native))
    assert {tuple(s.versions.tolist()) for s in (first, second)} == {
        (-1, -1, -1, 0, 1, -1, 1),
        (-1, -1, -1, -1, -1, -1, 1, 2, 2),
    }


def test_a_token_of_older_weights_without_a_score_is_refused_and_never_scored_by_others():
    mask = torch.tensor([0, 1, 1], dtype=torch.bool)
    scored = torch.tensor([torch.nan, -0.5, torch.nan])
    answer = Trajectory(
        torch.tensor([5, 1, 2]), mask, torch.zeros(3), 0, policy_version=(3, 4), segments=((3, 1), (4, 1))
    )
    whole = replace(answer, older_logprobs=scored)
    old = with_known_old_logprobs(Batch.pack([whole]), [whole], version=4)["old_logprobs"]
    assert torch.equal(old.nan_to_num(9), scored.nan_to_num(9))  # NaN: the published version says it
    for lacking, version in ((answer, 4), (whole, 5)):
        with pytest.raises(VerlError, match=r"1 tokens, the first at place [12], that version [34] .*bypass_mode=True"):
            with_known_old_logprobs(Batch.pack([lacking]), [lacking], version)
