"""The native engine with weights of its own: it samples while new ones arrive, and goes on under them."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.rollout_adapters import CONFIG, letters_tokenizer, small_model
from verl.workers.rollout.base import Completion, GenerationRequest, SamplingParams, StaleWeightsError
from verl.workers.rollout.native.replica import NativeReplica
from verl.workers.rollout.parking import NO, ParkingEngine
from verl.workers.rollout.saved_requests import requests_as_json, requests_from_json

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5]


def model_of(seed: int) -> torch.nn.Module:
    model = small_model()
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


@pytest.fixture
def replica(tmp_path: Path) -> NativeReplica:
    small_model().save_pretrained(tmp_path)
    return NativeReplica(CONFIG, tmp_path, letters_tokenizer())


async def publish(replica: NativeReplica, model: torch.nn.Module, version: int) -> None:
    await replica.begin_update()
    await replica.load_bucket(list(model.named_parameters()))
    await replica.finish_update(version)


async def until_sampled(replica: NativeReplica, count: int) -> None:
    while (await replica.stats())[0].totals["generated_tokens"] < count:
        await asyncio.sleep(0)


def greedy(model: torch.nn.Module, tokens: list[int], count: int) -> list[int]:
    """The likeliest continuation by whole forward passes without a cache."""
    tokens = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[-count:]


def test_an_answer_goes_on_under_the_weights_that_are_published_while_it_is_sampled(replica: NativeReplica):
    old, new = model_of(1), model_of(2)

    async def run() -> Completion:
        await publish(replica, old, 0)
        answer = asyncio.create_task(replica.generate(GenerationRequest(0, PROMPT, GREEDY)))
        await until_sampled(replica, 5)
        await replica.begin_update()
        await replica.load_bucket(list(new.named_parameters()))  # which changes nothing yet
        await until_sampled(replica, 10)
        await replica.finish_update(1)
        return (await answer)[0]

    completion = asyncio.run(run())
    (first, by_old), (second, by_new) = completion.segments
    assert (first, second) == (0, 1) == completion.policy_version and by_old >= 10 and by_old + by_new == 24
    assert completion.token_ids[:by_old] == greedy(old, PROMPT, by_old)
    assert completion.token_ids[by_old:] == greedy(new, [*PROMPT, *completion.token_ids[:by_old]], by_new)
    assert replica.read_back.num_tensors == len(list(new.parameters()))


def test_a_parameter_that_did_not_arrive_is_named_and_the_old_weights_stay(replica: NativeReplica):
    async def run() -> Completion:
        await publish(replica, model_of(1), 0)
        await replica.begin_update()
        await replica.load_bucket([pair for pair in model_of(2).named_parameters() if pair[0][-11:] != "norm.weight"])
        with pytest.raises(StaleWeightsError, match=r"version 1 brought no value for .*norm\.weight"):
            await replica.finish_update(1)
        return (await replica.generate(GenerationRequest(0, PROMPT, GREEDY)))[0]

    completion = asyncio.run(run())
    assert completion.policy_version == (0, 0) and completion.token_ids == greedy(model_of(1), PROMPT, 24)


def test_another_process_goes_on_with_the_tokens_of_what_was_in_flight(tmp_path: Path, replica: NativeReplica):
    small_model().save_pretrained(tmp_path)
    sampling = SamplingParams(n=2, max_tokens=24, ignore_eos=True, seed=3)
    requests = [GenerationRequest(number, [*PROMPT, number], sampling) for number in range(3)]

    async def first() -> tuple[list[list[Completion]], list[GenerationRequest]]:
        await publish(replica, model_of(1), 0)
        answers = [asyncio.create_task(replica.generate(request)) for request in requests]
        await until_sampled(replica, 30)
        saved = json.loads(json.dumps(requests_as_json(await replica.in_flight())))
        return await asyncio.gather(*answers), requests_from_json(saved)

    whole, saved = asyncio.run(first())
    assert all(len(sample.token_ids) >= 4 for one in saved for sample in one.sampled) and len(saved) == 3
    saved[2] = replace(saved[2], prompt_ids=[9])  # the conversation came to another turn: this is not what was sampled

    async def second() -> list[list[Completion]]:
        again = NativeReplica(CONFIG, tmp_path, letters_tokenizer())
        await publish(again, model_of(1), 0)
        engine = ParkingEngine(again, NO, continues=True)
        engine.restore(saved)
        resumed = await asyncio.gather(*map(engine.generate, requests))
        done = (await again.stats())[0].totals
        assert done["generated_tokens"] == 6 * 24 - sum(len(s.token_ids) for one in saved[:2] for s in one.sampled)
        assert done["requests"] == 1  # the first process has counted those that go on
        return resumed

    resumed = asyncio.run(second())
    assert [[c.token_ids for c in group] for group in resumed] == [[c.token_ids for c in group] for group in whole]


def test_each_token_streams_once_beside_a_publish(replica: NativeReplica):
    async def run() -> tuple[list[int], list[int], Completion]:
        await publish(replica, model_of(1), 0)
        received: list[int] = []
        chunks: list[int] = []

        def on_tokens(sample: int, tokens: list[int], logprobs: list[float]) -> None:
            received.extend(tokens)
            chunks.append(len(tokens))

        answer = asyncio.create_task(replica.stream(GenerationRequest(0, PROMPT, GREEDY), on_tokens))
        await until_sampled(replica, 8)
        await publish(replica, model_of(2), 1)
        return received, chunks, (await answer)[0]

    received, chunks, completion = asyncio.run(run())
    assert received == completion.token_ids and len(received) == 24 and [v for v, _ in completion.segments] == [0, 1]
    assert len(chunks) > 20  # while they are sampled
