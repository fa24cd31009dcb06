"""Unfinished answers outlive a publish, and another process: what was sampled stays, and the rest follows from it."""

import asyncio
import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.rollout_adapters import CONFIG, PROMPT, letters_tokenizer, small_model
from tests.unit.models.test_decoder import GENERIC, tiny_model
from verl.utils.errors import DataError
from verl.workers.rollout.base import Completion, GenerationRequest, SamplingParams
from verl.workers.rollout.native.core import NativeCore
from verl.workers.rollout.native.engine import NativeEngine
from verl.workers.rollout.parking import ASK_AGAIN, PAUSE, ParkingEngine
from verl.workers.rollout.saved_requests import requests_as_json, requests_from_json

POLICIES = (ASK_AGAIN, PAUSE)
SAMPLING = SamplingParams(n=3, max_tokens=20, ignore_eos=True)
REQUESTS = [GenerationRequest(number, PROMPT[: 2 + number % 3], SAMPLING) for number in range(4)]  # more than 8 rows


def engine_of(model: PreTrainedModel, policy: str = ASK_AGAIN) -> ParkingEngine:
    return ParkingEngine(NativeEngine(CONFIG, model, letters_tokenizer()), policy, continues=True)


def core_of(engine: ParkingEngine) -> NativeCore:
    assert isinstance(engine.inner, NativeEngine)
    return engine.inner.core


def changed(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))


async def until(engine: ParkingEngine, num_tokens: int) -> None:
    """Let the engine sample so many tokens since its start, then park it."""
    while core_of(engine).counters.generated_tokens < num_tokens:
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
            sampled = core_of(engine).counters.generated_tokens
            await asyncio.sleep(0.001)
            assert core_of(engine).counters.generated_tokens == sampled  # nothing goes on
            await engine.wake()
            await engine.resume()
        return await asyncio.gather(*answers)

    assert ids(asyncio.run(run())) == ids(whole(small_model()))


def test_to_ask_again_frees_the_cache_and_a_pause_keeps_it():
    async def rows(policy: str) -> int:
        engine = engine_of(small_model(), policy)
        answer = asyncio.ensure_future(engine.generate(REQUESTS[0]))
        await until(engine, 10)
        await engine.sleep()
        kept = core_of(engine).allocated_rows
        await engine.wake()
        await engine.resume()
        await answer
        return kept

    assert asyncio.run(rows(ASK_AGAIN)) == 0
    assert asyncio.run(rows(PAUSE)) == 3


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
        assert gap < 2e-5 if policy == ASK_AGAIN else gap > 1e-4  # keys and values of the older weights


def test_what_was_parked_goes_on_in_another_process_bit_for_bit():
    model = small_model()

    async def first() -> tuple[list[dict], list[list[Completion]]]:
        engine = engine_of(model)
        answers = [asyncio.ensure_future(engine.generate(request)) for request in REQUESTS]
        await until(engine, 100)
        await engine.sleep()
        saved = json.loads(json.dumps(requests_as_json(await engine.in_flight())))
        await engine.wake()
        await engine.update_weights(model, 5)
        await engine.resume()
        return saved, await asyncio.gather(*answers)

    async def second(saved: list[dict]) -> list[list[Completion]]:
        engine = engine_of(copy.deepcopy(model))
        await engine.park()
        engine.restore(requests_from_json(saved))
        answers = [asyncio.ensure_future(engine.generate(request)) for request in REQUESTS]
        await asyncio.sleep(0)
        await engine.update_weights(engine.inner.model, 5)
        await engine.resume()
        completions = await asyncio.gather(*answers)
        [stats] = await engine.stats()
        assert stats.totals["requests"] == len(REQUESTS) - len(saved)  # the first has counted those that go on
        return completions

    saved, uninterrupted = asyncio.run(first())
    assert any(part["tokens"] for request in saved for part in request["samples"] if part["stop_reason"] is None)
    assert asyncio.run(second(saved)) == uninterrupted


def test_a_request_that_comes_back_after_the_engine_went_on_goes_on_at_once():
    model = small_model()

    async def run() -> tuple[Completion, Completion]:
        first, second = engine_of(model), engine_of(model)
        answer = asyncio.ensure_future(first.generate(REQUESTS[2]))
        await until(first, 4)
        await first.park()
        second.restore(await first.in_flight())
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
        assert not later.done() and core_of(engine).counters.prompts_computed == 1
        await engine.resume()
        assert ids([await first, await later]) == ids(expected[:2])

    asyncio.run(run())


SEAMS = {
    "stop strings": {"stop": ("ab", "zq", "ef")},
    "stop tokens": {"stop_token_ids": (3, 17), "min_tokens": 9},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "greedy penalties": {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    "alternatives": {"top_logprobs": 2, "min_p": 0.2, "top_k": 9, "logit_bias": ((5, 2.0),)},
}


@pytest.mark.parametrize("settings", SEAMS.values(), ids=SEAMS)
def test_conditions_see_the_tokens_before_every_seam(settings: dict[str, Any]):
    """Parked after each token, an answer ends where an uninterrupted one ends, and for the same reason."""
    requests = [replace(r, sampling=replace(SAMPLING, ignore_eos=False, **settings)) for r in REQUESTS]

    async def run(parks: bool) -> list[Completion]:
        engine = engine_of(small_model(tied=False))
        answers = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        while parks and not all(answer.done() for answer in answers):
            sampled = core_of(engine).counters.generated_tokens
            while core_of(engine).counters.generated_tokens == sampled and core_of(engine).busy:
                await asyncio.sleep(0)
            await engine.park()
            await engine.resume()
            await asyncio.sleep(0)
        return [completion for group in await asyncio.gather(*answers) for completion in group]

    parked, expected = asyncio.run(run(True)), asyncio.run(run(False))
    assert [(c.token_ids, c.stop_reason) for c in parked] == [(c.token_ids, c.stop_reason) for c in expected]
    lengths = {len(c.token_ids) for c in expected}
    assert min(lengths) >= settings.get("min_tokens", 0)
    assert len(lengths) > 3 or not any("stop" in name for name in settings)
    for mine, theirs in zip(parked, expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), atol=2e-5, rtol=0)
        assert [[token for token, _ in best] for best in mine.alternatives or ()] == [
            [token for token, _ in best] for best in theirs.alternatives or ()
        ]
        assert len(mine.alternatives or ()) == (len(mine.token_ids) if "top_logprobs" in settings else 0)


def test_a_model_that_takes_prompts_of_one_length_at_a_time_goes_on_too():
    asked = [replace(r, sampling=replace(SAMPLING, max_tokens=8)) for r in REQUESTS[:3]]

    async def run(stops: tuple[int, ...]) -> list[list[Completion]]:
        model = tiny_model(*GENERIC["qwen3_next: recurrent layers"])
        with torch.no_grad():
            for parameter in (parameter for parameter in model.parameters() if parameter.dim() > 1):
                parameter *= 5  # else the tokens before hardly matter
        native = NativeEngine(CONFIG, model)
        assert native.generic_reason and not native.decoder.supports_padded_prompts
        engine = ParkingEngine(native, continues=True)
        answers = [asyncio.ensure_future(engine.generate(request)) for request in asked]
        for stop in stops:
            await until(engine, stop)
            await engine.resume()
        return await asyncio.gather(*answers)

    parked, expected = asyncio.run(run((5, 30, 50))), asyncio.run(run(()))
    assert ids(parked) == ids(expected)
    flat = [torch.tensor([c.logprobs for group in answers for c in group]) for answers in (parked, expected)]
    torch.testing.assert_close(*flat, atol=2e-5, rtol=0)


def test_an_aborted_request_keeps_the_tokens_of_samples_that_did_not_go_on_yet():
    sampled = tuple(Completion.of([number], [-1.0], "aborted", [(0, 1)]) for number in range(3))

    async def run() -> list[Completion]:
        engine = NativeEngine(CONFIG, small_model(), letters_tokenizer())
        first = [
            asyncio.ensure_future(engine.generate(request)) for request in REQUESTS[:3]
        ]  # as many as there are rows
        waiting = asyncio.ensure_future(engine.generate(replace(REQUESTS[3], sampled=sampled)))
        while engine.core.counters.generated_tokens < 30:
            await asyncio.sleep(0)
        await engine.abort(REQUESTS[3].request_id)
        await asyncio.gather(*first)
        return await waiting

    assert asyncio.run(run()) == list(sampled)


@pytest.mark.parametrize("form", ["native", "reissued"])
def test_what_earlier_versions_saved_goes_on(form: str):
    """The two JSON forms that checkpoints had: sampled answers of the native engine, and greedy ones that were aborted
    and asked for again. Each file has what was under way at two parks, under versions 0 and 1."""
    model = small_model(tied=False)
    temperature = 1.0 if form == "native" else 0.0
    requests = [replace(r, sampling=replace(SAMPLING, temperature=temperature)) for r in REQUESTS]
    file = Path(__file__).resolve().parents[3] / "data" / "unfinished" / f"{form}.json"

    async def run(saved: list[dict[str, Any]]) -> list[list[Completion]]:
        engine = engine_of(model)
        await engine.update_weights(model, 7)
        restored = requests_from_json(saved)
        engine.restore(restored)
        answers = await asyncio.gather(*(engine.generate(request) for request in requests))
        for one in restored:
            for before, now in zip(one.sampled, answers[one.request_id], strict=False):
                count = len(before.token_ids)
                assert now.token_ids[:count] == before.token_ids
                assert now.logprobs[:count] == pytest.approx(before.logprobs, abs=1e-6)
                begun = before.all_segments if count else ()
                assert now.all_segments == (*begun, *([(7, 20 - count)] if count < 20 else []))
        kept = sum(len(sample.token_ids) for one in restored for sample in one.sampled)
        assert kept > 50 and core_of(engine).counters.generated_tokens == 12 * 20 - kept
        return answers

    whole = asyncio.run(run_whole(model, requests))
    snapshots = json.loads(file.read_text())
    versions = {v for snap in snapshots for one in requests_from_json(snap) for s in one.sampled for v, _ in s.segments}
    assert versions == {0, 1} and any(s.stop_reason == "length" for s in requests_from_json(snapshots[1])[0].sampled)
    for saved in snapshots:
        assert ids(asyncio.run(run(saved))) == ids(whole)


async def run_whole(model: PreTrainedModel, requests: list[GenerationRequest]) -> list[list[Completion]]:
    engine = NativeEngine(CONFIG, model, letters_tokenizer())
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def test_a_run_with_other_limits_takes_what_fits_them():
    """Fewer tokens and other numbers of answers than those that were saved."""

    async def run(n: int, max_tokens: int) -> list[Completion]:
        first = engine_of(small_model())
        answer = asyncio.ensure_future(first.generate(REQUESTS[2]))
        await until(first, 24)
        second = engine_of(small_model())
        second.restore(await first.in_flight())
        sampling = replace(SAMPLING, n=n, max_tokens=max_tokens)
        found = await second.generate(replace(REQUESTS[2], sampling=sampling))
        await first.resume()
        await answer
        return found

    for n, max_tokens in ((2, 6), (4, 12)):
        completions = asyncio.run(run(n, max_tokens))
        assert [(len(c.token_ids), c.stop_reason) for c in completions] == [(max(8, max_tokens), "length")] * min(
            n, 3
        ) + [(max_tokens, "length")] * max(n - 3, 0)


def test_a_saved_request_comes_back_as_it_was():
    sampled = (
        Completion.of([1, 2, 3], [-0.5, -1.25, -2.0], "aborted", [(3, 1), (5, 2)], [[(1, -0.5), (7, -1.0)]] * 3),
        Completion.of([4], [-0.5], "stop", [(5, 1)]),
        Completion.empty(5),
    )
    saved = json.loads(json.dumps(requests_as_json([GenerationRequest(9, [6, 6], SAMPLING, sampled=sampled)])))
    assert requests_from_json(saved) == [GenerationRequest(9, [6, 6], sampled=sampled)]


@pytest.mark.parametrize("reasons", [["aborted"], ["stop", "length", "stop"]])
def test_a_request_with_part_of_its_samples_or_only_whole_ones_is_refused(reasons: list[str]):
    engine = NativeEngine(CONFIG, small_model(), letters_tokenizer())
    sampled = tuple(Completion.of([5], [-1.0], reason, [(0, 1)], None) for reason in reasons)
    with pytest.raises(DataError, match=f"comes with {len(reasons)} samples, n=3; give none or all"):
        asyncio.run(engine.generate(replace(REQUESTS[0], sampled=sampled)))
