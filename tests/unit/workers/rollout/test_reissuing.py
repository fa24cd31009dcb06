"""Engines that take no sampled tokens: what they sampled until they are aborted stays, and the rest follows from it."""

import asyncio
import copy
import json
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from tests.rollout_adapters import CONFIG, EOS, PROMPT, letters_tokenizer, own_logprobs, small_model
from verl.utils.errors import WorkerError
from verl.workers.rollout.base import Completion, GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import NativeEngine
from verl.workers.rollout.parking import ParkingEngine
from verl.workers.rollout.saved_requests import requests_as_json, requests_from_json

SAMPLING = SamplingParams(n=3, max_tokens=20, ignore_eos=True)
GREEDY = replace(SAMPLING, temperature=0.0)


def varied_model() -> PreTrainedModel:
    """A model whose greedy answers do not repeat one token."""
    return small_model(tied=False)


def engine_of(model: PreTrainedModel) -> ParkingEngine:
    return ParkingEngine(NativeEngine(CONFIG, model, letters_tokenizer()))


async def parked_after(engine: ParkingEngine, num_tokens: int) -> None:
    assert isinstance(engine.inner, NativeEngine)
    while engine.inner.core.counters.generated_tokens < num_tokens:
        await asyncio.sleep(0)
    await engine.park()
    await engine.sleep()
    await engine.wake()


def requests(sampling: SamplingParams) -> list[GenerationRequest]:
    return [GenerationRequest(number, PROMPT[: 2 + number % 3], sampling) for number in range(4)]  # more than 8 rows


def test_greedy_answers_are_those_of_an_engine_that_never_stopped():
    async def run(stops: tuple[int, ...]) -> list[list[int]]:
        engine = engine_of(varied_model())
        answers = [asyncio.ensure_future(engine.generate(request)) for request in requests(GREEDY)]
        for stop in stops:
            await parked_after(engine, stop)
            await engine.resume()
        return [completion.token_ids for answer in answers for completion in await answer]

    assert asyncio.run(run((1, 30, 90))) == asyncio.run(run(()))


def test_each_token_has_the_log_prob_of_the_version_that_sampled_it():
    model, prompt = small_model(), requests(SAMPLING)[2].prompt_ids
    versions: list[PreTrainedModel] = []

    async def run() -> list[Completion]:
        engine = engine_of(model)
        await engine.update_weights(model, 0)
        answer = asyncio.ensure_future(engine.generate(requests(SAMPLING)[2]))
        for version, stop in enumerate((12, 30), start=1):
            await parked_after(engine, stop)
            versions.append(copy.deepcopy(model).double())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.02 * torch.randn(parameter.shape)
            await engine.update_weights(model, version)
            await engine.resume()
        versions.append(copy.deepcopy(model).double())
        return await answer

    for completion in asyncio.run(run()):
        assert [version for version, _ in completion.segments] == [0, 1, 2] and completion.policy_version == (0, 2)
        start, recorded = 0, torch.tensor(completion.logprobs).double()
        for version, count in completion.segments:
            part = slice(start, start + count)
            expected = [own_logprobs(old, completion.token_ids, prompt)[part] for old in versions]
            torch.testing.assert_close(recorded[part], expected[version], atol=1e-5, rtol=0)
            others = [float((e - recorded[part]).abs().max()) for v, e in enumerate(expected) if v != version]
            assert min(others) > 1e-4
            start += count
        assert start == len(completion.token_ids) == 20


def test_what_follows_a_park_draws_new_random_numbers():
    model = small_model()
    with torch.no_grad():
        model.model.norm.weight.zero_()  # all logits are equal: a token is its random number

    async def run() -> list[int]:
        engine = engine_of(model)
        answer = asyncio.ensure_future(engine.generate(GenerationRequest(0, PROMPT, replace(SAMPLING, n=1))))
        await parked_after(engine, 10)
        await engine.resume()
        return (await answer)[0].token_ids

    tokens = asyncio.run(run())
    assert len(tokens) == 20 and tokens[:10] != tokens[10:]


def test_another_process_goes_on_with_what_was_parked():
    async def until_parked() -> list[dict]:
        engine = engine_of(varied_model())
        answers = [asyncio.ensure_future(engine.generate(request)) for request in requests(GREEDY)]
        await parked_after(engine, 40)
        saved = json.loads(json.dumps(requests_as_json(await engine.in_flight())))
        for answer in answers:
            answer.cancel()
        return saved

    saved = asyncio.run(until_parked())
    kept = [sample["tokens"] for request in saved for sample in request["samples"]]
    assert 0 < max(map(len, kept)) < 20

    async def rest() -> tuple[list[list[int]], float]:
        engine = engine_of(varied_model())
        await engine.park()
        engine.restore(requests_from_json(saved))
        answers = [asyncio.ensure_future(engine.generate(request)) for request in requests(GREEDY)]
        await engine.resume()
        tokens = [completion.token_ids for answer in answers for completion in await answer]
        assert isinstance(engine.inner, NativeEngine)
        return tokens, engine.inner.core.counters.generated_tokens

    tokens, sampled = asyncio.run(rest())
    whole = asyncio.run(_whole())
    assert tokens == whole and min(len(set(answer)) for answer in whole) > 3
    assert sampled == sum(map(len, whole)) - sum(map(len, kept))  # nothing is sampled twice


async def _whole() -> list[list[int]]:
    engine = NativeEngine(CONFIG, varied_model(), letters_tokenizer())
    answers = await asyncio.gather(*(engine.generate(request) for request in requests(GREEDY)))
    return [completion.token_ids for group in answers for completion in group]


def test_an_answer_that_ended_before_the_park_is_not_sampled_again():
    model = small_model()
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 6  # some end early

    async def run() -> list[Completion]:
        engine = engine_of(model)
        sampling = replace(SAMPLING, n=6, ignore_eos=False)
        answer = asyncio.ensure_future(engine.generate(GenerationRequest(0, PROMPT, sampling)))
        await parked_after(engine, 24)
        ended = {i: s.token_ids for i, s in enumerate((await engine.in_flight())[0].sampled) if not s.is_unfinished}
        assert 0 < len(ended) < 6
        await engine.resume()
        completions = await answer
        assert all(completions[i].token_ids == tokens for i, tokens in ended.items())
        return completions

    assert {c.stop_reason for c in asyncio.run(run())} <= {"stop", "length"}


def test_new_requests_wait_and_an_abort_ends_a_parked_one():
    async def run() -> None:
        engine = engine_of(varied_model())
        first = asyncio.ensure_future(engine.generate(requests(GREEDY)[0]))
        await parked_after(engine, 9)
        second = asyncio.ensure_future(engine.generate(requests(GREEDY)[1]))
        await asyncio.sleep(0.01)
        assert not second.done()
        await engine.abort(0)
        await engine.resume()
        assert all(c.stop_reason == "aborted" and c.token_ids for c in await first)
        assert all(len(c.token_ids) == 20 for c in await second)

    asyncio.run(run())


@pytest.mark.parametrize("change", [{"stop": ("ab",)}, {"repetition_penalty": 1.1}])
def test_what_looks_back_at_the_answer_is_refused(change: dict):
    engine = engine_of(varied_model())
    with pytest.raises(WorkerError, match="use stop_token_ids"):
        asyncio.run(engine.generate(GenerationRequest(0, PROMPT, replace(SAMPLING, **change))))
