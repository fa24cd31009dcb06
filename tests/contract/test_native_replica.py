"""The native engine with weights of its own: it samples while new ones arrive, and goes on under them."""

import asyncio
import json
from pathlib import Path

import pytest
import torch

from tests.rollout_adapters import CONFIG, letters_tokenizer, small_model
from verl.workers.rollout.base import Completion, GenerationRequest, SamplingParams, StaleWeightsError
from verl.workers.rollout.native.replica import NativeReplica

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

    async def first() -> tuple[list[list[Completion]], list[dict]]:
        await publish(replica, model_of(1), 0)
        answers = [asyncio.create_task(replica.generate(request)) for request in requests]
        await until_sampled(replica, 30)
        saved = json.loads(json.dumps(await replica.in_flight()))
        return await asyncio.gather(*answers), saved

    whole, saved = asyncio.run(first())
    by_request = {one["request_id"]: one for one in saved}
    assert all(len(part["tokens"]) >= 4 for one in saved for part in one["unfinished"]) and len(by_request) == 3
    by_request[2]["prompt"] = [9]  # the conversation came to another turn: this is not what was sampled

    async def second() -> list[list[Completion]]:
        again = NativeReplica(CONFIG, tmp_path, letters_tokenizer())
        await publish(again, model_of(1), 0)
        calls = (again.generate(request, by_request[request.request_id]) for request in requests)
        resumed = await asyncio.gather(*calls)
        done = (await again.stats())[0].totals
        assert done["generated_tokens"] == 6 * 24 - sum(
            len(part["tokens"]) for one in saved[:2] for part in one["unfinished"]
        )
        return resumed

    resumed = asyncio.run(second())
    assert [[c.token_ids for c in group] for group in resumed] == [[c.token_ids for c in group] for group in whole]
