"""Unfinished answers outlive a publish, and another process: what was sampled stays, and the rest follows from it."""

import asyncio
import copy
import json
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from tests.rollout_adapters import CONFIG, PROMPT, letters_tokenizer, small_model
from verl.workers.rollout.base import Completion, GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import NativeEngine

POLICIES = ("recompute", "keep_kv")
SAMPLING = SamplingParams(n=3, max_tokens=20, ignore_eos=True)
REQUESTS = [GenerationRequest(number, PROMPT[: 2 + number % 3], SAMPLING) for number in range(4)]  # more than 8 rows


def engine_of(model: PreTrainedModel, policy: str = "recompute") -> NativeEngine:
    config = replace(CONFIG, kv_cache_on_publish=policy)
    return NativeEngine(config, model, letters_tokenizer())


def changed(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))


async def until(engine: NativeEngine, num_tokens: int) -> None:
    """Let the engine sample so many tokens since its start, then park it."""
    while engine.core.counters.generated_tokens < num_tokens:
        await asyncio.sleep(0)
    await engine.park()


def whole(model: PreTrainedModel) -> list[list[Completion]]:
    async def run() -> list[list[Completion]]:
        engine = engine_of(model)
        return await asyncio.gather(*(engine.generate(request) for request in REQUESTS))

    return asyncio.run(run())


def ids(answers: list[list[Completion]]) -> list[list[int]]:
    return [completion.token_ids for group in answers for completion in group]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stops", [(1,), (30, 90, 150)])
def test_without_new_weights_parked_answers_are_those_of_an_engine_that_never_stopped(policy: str, stops: tuple):
    async def run() -> list[list[Completion]]:
        engine = engine_of(small_model(), policy)
        answers = [asyncio.ensure_future(engine.generate(request)) for request in REQUESTS]
        for stop in stops:
            await until(engine, stop)
            await engine.sleep()
            await asyncio.sleep(0.001)
            sampled = engine.core.counters.generated_tokens
            await asyncio.sleep(0.001)
            assert engine.core.counters.generated_tokens == sampled  # nothing goes on
            await engine.wake()
            await engine.resume()
        return await asyncio.gather(*answers)

    assert ids(asyncio.run(run())) == ids(whole(small_model()))


def test_recompute_frees_the_cache_and_keep_kv_keeps_it():
    async def rows(policy: str) -> int:
        engine = engine_of(small_model(), policy)
        answer = asyncio.ensure_future(engine.generate(REQUESTS[0]))
        await until(engine, 10)
        await engine.sleep()
        kept = engine.core.allocated_rows
        await engine.wake()
        await engine.resume()
        await answer
        return kept

    assert asyncio.run(rows("recompute")) == 0
    assert asyncio.run(rows("keep_kv")) == 3


def logprobs_by(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0].float()
    rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_token_has_the_log_prob_of_the_version_that_sampled_it(policy: str):
    model, old = small_model(), small_model()

    async def run() -> list[Completion]:
        engine = engine_of(model, policy)
        answer = asyncio.ensure_future(engine.generate(REQUESTS[2]))
        await until(engine, 12)
        await engine.sleep()
        changed(model)
        await engine.wake()
        await engine.update_weights(model, 1)
        await engine.resume()
        return await answer

    for completion in asyncio.run(run()):
        (first, before), (second, after) = completion.segments
        assert (first, second) == completion.policy_version == (0, 1)
        assert before + after == len(completion.token_ids) == 20 and before >= 4
        prompt, answer = REQUESTS[2].prompt_ids, completion.token_ids
        by_old, by_new = logprobs_by(old, prompt, answer), logprobs_by(model, prompt, answer)
        recorded = torch.tensor(completion.logprobs)
        torch.testing.assert_close(recorded[:before], by_old[:before], atol=2e-5, rtol=0)
        gap = (recorded[before:] - by_new[before:]).abs().max()
        assert gap < 2e-5 if policy == "recompute" else gap > 1e-4  # keys and values of the older weights


def test_what_was_parked_goes_on_in_another_process_bit_for_bit():
    model = small_model()

    async def first() -> tuple[list[dict], list[list[Completion]]]:
        engine = engine_of(model)
        answers = [asyncio.ensure_future(engine.generate(request)) for request in REQUESTS]
        await until(engine, 100)
        await engine.sleep()
        saved = json.loads(json.dumps(engine.parked()))
        await engine.wake()
        await engine.update_weights(model, 5)
        await engine.resume()
        return saved, await asyncio.gather(*answers)

    async def second(saved: list[dict]) -> list[list[Completion]]:
        engine = engine_of(copy.deepcopy(model))
        await engine.park()
        engine.restore(saved)
        answers = [asyncio.ensure_future(engine.generate(request)) for request in REQUESTS]
        await asyncio.sleep(0)
        await engine.update_weights(engine.model, 5)
        await engine.resume()
        completions = await asyncio.gather(*answers)
        [stats] = await engine.stats()
        assert stats.totals["requests"] == len(REQUESTS) - len(saved)  # the first has counted those that go on
        return completions

    saved, uninterrupted = asyncio.run(first())
    assert any(part["tokens"] for request in saved for part in request["unfinished"])
    assert asyncio.run(second(saved)) == uninterrupted


def test_a_request_that_comes_back_after_the_engine_went_on_goes_on_at_once():
    model = small_model()

    async def run() -> tuple[Completion, Completion]:
        first, second = engine_of(model), engine_of(model)
        answer = asyncio.ensure_future(first.generate(REQUESTS[2]))
        await until(first, 4)
        await first.park()
        second.restore(first.parked())
        again = await asyncio.wait_for(second.generate(REQUESTS[2]), 60)
        await first.resume()
        return (await answer)[0], again[0]

    uninterrupted, again = asyncio.run(run())
    assert again == uninterrupted


def test_a_parked_request_can_be_aborted_and_keeps_its_tokens():
    expected = whole(small_model())

    async def run() -> list[Completion]:
        engine = engine_of(small_model())
        answers = [asyncio.ensure_future(engine.generate(request)) for request in REQUESTS]
        await until(engine, 50)
        await engine.abort(REQUESTS[1].request_id)
        aborted = await answers[1]
        await engine.resume()
        rest = await asyncio.gather(answers[0], *answers[2:])
        assert ids(rest) == ids([expected[0], *expected[2:]])
        return aborted

    for completion in asyncio.run(run()):
        assert completion.stop_reason == "aborted" and 0 < len(completion.token_ids) < 20


def test_what_arrives_while_parked_waits_behind_what_was_parked():
    expected = whole(small_model())

    async def run() -> None:
        engine = engine_of(small_model())
        first = asyncio.ensure_future(engine.generate(REQUESTS[0]))
        await until(engine, 5)
        later = asyncio.ensure_future(engine.generate(REQUESTS[1]))
        await asyncio.sleep(0.001)
        assert not later.done() and engine.core.counters.prompts_computed == 1
        await engine.resume()
        assert ids([await first, await later]) == ids(expected[:2])

    asyncio.run(run())
