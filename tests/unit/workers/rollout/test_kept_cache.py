"""`kv_cache_on_publish=keep_kv`: after a publish answers go on with the keys and values of the weights before it."""

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.mixed_weights import mixed_logprobs
from tests.rollout_adapters import CONFIG, PROMPT, letters_tokenizer, own_logprobs, small_model
from verl.workers.rollout.base import Completion, GenerationRequest, RolloutEngine, SamplingParams
from verl.workers.rollout.native.engine import NativeEngine
from verl.workers.rollout.native.replica import NativeReplica
from verl.workers.rollout.parking import PAUSE, ParkingEngine
from verl.workers.rollout.saved_requests import requests_as_json, requests_from_json

KEEPING = replace(CONFIG, kv_cache_on_publish="keep_kv")
SAMPLING = SamplingParams(n=2, max_tokens=20, ignore_eos=True)
REQUESTS = [GenerationRequest(number, [*PROMPT, number], SAMPLING) for number in range(5)]  # two more than the rows
Publish = Callable[[int], Awaitable[None]]


def version(number: int) -> PreTrainedModel:
    model = small_model()
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * number + place))
            parameter += 0.05 * number * noise
    return model


def load(model: PreTrainedModel, number: int) -> None:
    model.load_state_dict(version(number).state_dict())


def in_this_process(_: Path, continues: bool = True) -> tuple[RolloutEngine, NativeEngine, Publish]:
    model = version(0)
    native = NativeEngine(KEEPING, model, letters_tokenizer())
    engine = ParkingEngine(native, PAUSE, continues)

    async def publish(number: int) -> None:
        await engine.park()
        await engine.sleep()
        load(model, number)
        await engine.wake()
        await engine.update_weights(model, number)
        await engine.resume()

    return engine, native, publish


def with_weights_of_its_own(folder: Path) -> tuple[RolloutEngine, NativeEngine, Publish]:
    small_model().save_pretrained(folder)
    replica = NativeReplica(KEEPING, folder, letters_tokenizer())

    async def publish(number: int) -> None:
        await replica.begin_update()
        await replica.load_bucket(list(version(number).named_parameters()))
        await replica.finish_update(number)

    asyncio.run(publish(0))
    native = replica.native.inner
    assert isinstance(native, NativeEngine)
    return replica, native, publish


ENGINES = [in_this_process, partial(in_this_process, continues=False), with_weights_of_its_own]


async def sampled(native: NativeEngine, count: int) -> None:
    while native.core.counters.generated_tokens < count:
        await asyncio.sleep(0)


@pytest.mark.parametrize("build", ENGINES, ids=["in this process", "asked for the rest", "weights of its own"])
def test_older_tokens_keep_the_keys_and_values_of_the_weights_that_read_them(build: Callable, tmp_path: Path):
    engine, native, publish = build(tmp_path)

    async def run() -> list[Completion]:
        answers = [asyncio.ensure_future(engine.generate(request)) for request in REQUESTS]
        for number, count in enumerate((30, 80), start=1):
            await sampled(native, count)
            await publish(number)
        return [completion for answer in answers for completion in await answer]

    models = {number: version(number).double() for number in range(3)}
    completions = asyncio.run(run())
    assert len(completions) == 10 and {len(c.segments) for c in completions} >= {0, 3}
    for place, completion in enumerate(completions):
        prompt, recorded = REQUESTS[place // 2].prompt_ids, torch.tensor(completion.logprobs).double()
        segments = completion.segments or ((completion.policy_version[0], 20),)
        expected = mixed_logprobs(models, prompt, completion.token_ids, segments)
        torch.testing.assert_close(recorded, expected, atol=1e-5, rtol=0)
        if len(segments) == 1:  # whoever begins after a publish finds nothing of the weights before it
            expected = own_logprobs(models[segments[0][0]], completion.token_ids, prompt)
            torch.testing.assert_close(recorded, expected, atol=1e-5, rtol=0)
        else:  # not what the newest weights make of all tokens
            last = recorded[-segments[-1][1] :]
            anew = own_logprobs(models[segments[-1][0]], completion.token_ids, prompt)[-segments[-1][1] :]
            assert (last - anew).abs().max() > 1e-4
    assert native.core.counters.prompts_computed <= len(REQUESTS) * 2  # nothing was read twice


@pytest.mark.parametrize("continues", [True, False])
def test_what_is_in_flight_has_the_tokens_that_wait_in_the_engine_and_goes_on_elsewhere(continues: bool):
    greedy = replace(SAMPLING, temperature=0.0)
    requests = [replace(request, sampling=greedy) for request in REQUESTS[:2]]

    def engine() -> tuple[ParkingEngine, NativeEngine]:
        native = NativeEngine(KEEPING, small_model(tied=False), letters_tokenizer())
        return ParkingEngine(native, PAUSE, continues), native

    async def first() -> tuple[list[dict], list[list[Completion]]]:
        kept, native = engine()
        answers = [asyncio.ensure_future(kept.generate(request)) for request in requests]
        await sampled(native, 30)
        await kept.park()
        saved = json.loads(json.dumps(requests_as_json(await kept.in_flight())))
        await kept.resume()
        return saved, [await answer for answer in answers]

    saved, whole = asyncio.run(first())
    tokens = [sample["tokens"] for one in saved for sample in one["samples"]]
    assert sum(map(len, tokens)) >= 30
    for one, group in zip(saved, whole, strict=True):
        for sample, completion in zip(one["samples"], group, strict=True):
            count = len(sample["tokens"])
            assert sample["tokens"] == completion.token_ids[:count] and sample["segments"] == [[0, count]]
            assert sample["logprobs"] == completion.logprobs[:count] and sample["stop_reason"] is None

    async def second() -> tuple[list[list[Completion]], float]:
        kept, native = engine()
        await kept.park()
        kept.restore(requests_from_json(saved))
        answers = [asyncio.ensure_future(kept.generate(request)) for request in requests]
        await asyncio.sleep(0)
        await kept.resume()
        await sampled(native, 12)
        again = [sample.token_ids for one in await kept.in_flight() for sample in one.sampled]
        assert all(now[: len(then)] == then for now, then in zip(again, tokens, strict=True))
        assert sum(map(len, again)) == sum(map(len, tokens)) + native.core.counters.generated_tokens
        return [await answer for answer in answers], native.core.counters.generated_tokens

    resumed, count = asyncio.run(second())
    assert [[c.token_ids for c in group] for group in resumed] == [[c.token_ids for c in group] for group in whole]
    assert count == 4 * 20 - sum(map(len, tokens))


def test_an_engine_sleeps_once_nothing_waits_in_its_cache():
    async def run() -> tuple[int, int]:
        native = NativeEngine(KEEPING, small_model(), letters_tokenizer())
        engine = ParkingEngine(native, PAUSE)
        answer = asyncio.ensure_future(engine.generate(REQUESTS[0]))
        await sampled(native, 10)
        await engine.park()
        await engine.sleep_until_update()
        held = native.core.allocated_rows
        await engine.wake()
        await engine.resume()
        await answer
        await engine.park()
        await engine.sleep_until_update()
        return held, native.core.allocated_rows

    assert asyncio.run(run()) == (2, 0)


@pytest.mark.parametrize("parks", [True, False])
def test_a_request_that_is_complete_is_in_flight_until_its_caller_knows(parks: bool):
    """Asked at any turn of the event loop, engine and callers together know every token once."""

    async def run(turns: int) -> None:
        native = NativeEngine(KEEPING, copy.deepcopy(small_model()), letters_tokenizer())
        engine = ParkingEngine(native, PAUSE, continues=True) if parks else native
        done: list[int] = []

        async def one(request: GenerationRequest) -> None:
            await engine.generate(request)
            done.append(request.request_id)

        short = [replace(r, sampling=replace(SAMPLING, max_tokens=2 + r.request_id)) for r in REQUESTS]
        tasks = [asyncio.create_task(one(request)) for request in short]
        for _ in range(turns):
            await asyncio.sleep(0)
        running = {request.request_id for request in await engine.in_flight()}
        assert running | set(done) == set(range(5)) and not running & set(done)
        await asyncio.gather(*tasks)

    for turns in range(2, 9):
        asyncio.run(run(turns))
