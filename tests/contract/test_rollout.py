"""One suite for every rollout engine: token ids in; token ids, log-probs and versions out."""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator

import pytest
import torch
from transformers import PreTrainedModel

from tests.conftest import skip_without_vllm
from tests.engine_work import work_of
from tests.rollout_adapters import (
    ADAPTERS,
    CONFIG,
    EOS,
    FAKE_SERVERS,
    PROMPT,
    Adapter,
    letters_tokenizer,
    own_logprobs,
    small_model,
)
from verl.config.rollout import RolloutConfig
from verl.utils.errors import ConfigError, DataError, WorkerError
from verl.workers.rollout.base import Completion, GenerationRequest, RolloutEngine, SamplingParams


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> Iterator[Adapter]:
    if request.param.name == "vllm":
        skip_without_vllm()
    reason = LACKING.get(request.param.name, {}).get(request.function.__name__)
    if reason is not None:
        pytest.skip(reason)
    yield request.param
    while FAKE_SERVERS:
        FAKE_SERVERS.pop().close()


@pytest.fixture
def model() -> PreTrainedModel:
    return small_model()


@pytest.fixture
def engine(adapter: Adapter, model: PreTrainedModel) -> RolloutEngine:
    return adapter.build(CONFIG, model)


@contextlib.contextmanager
def few_tokens(samples: float) -> Iterator[Callable[[], Awaitable[None]]]:
    """Of so many samples that are asked for meanwhile, a few tokens, as soon as what this yields was awaited; no more
    come before the end."""
    if not FAKE_SERVERS:
        yield a_few_turns
        return
    server = FAKE_SERVERS[-1]

    async def paused() -> None:
        while not server.paused:
            await asyncio.sleep(0.001)

    server.pause_after(samples, steps=4)
    yield paused
    server.resume()


async def a_few_turns() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


NO_PUSH = "weights cannot be pushed to such a server"
NO_IDS = "the server speaks text only"
LACKING = {
    "tgi": {
        "test_update_weights_is_sampled_and_stamped": NO_PUSH,
        "test_an_update_between_two_tokens_stamps_both_versions": NO_PUSH,
        "test_min_p_of_one_is_greedy_and_a_bias_forces_or_forbids_a_token": "TGI has neither",
        "test_min_tokens_holds_back_every_stop": NO_IDS,
        "test_log_probs_are_the_policys_whatever_restricts_or_changes_sampling": NO_IDS,
        "test_stop_token_ids_end_a_completion_beside_eos": NO_IDS,
        "test_ignore_eos_goes_on_to_max_tokens": NO_IDS,
        "test_stop_strings_end_at_the_token_that_completes_them_and_keep_every_token": NO_IDS,
        "test_abort_returns_what_was_produced": "a cut connection leaves nothing",
        "test_greedy_takes_the_likeliest_token_every_time": NO_IDS,
        "test_abort_all_also_ends_what_waits": NO_IDS,
    },
    "openai": {
        "test_update_weights_is_sampled_and_stamped": NO_PUSH,
        "test_an_update_between_two_tokens_stamps_both_versions": NO_PUSH,
        "test_abort_returns_what_was_produced": "a cut connection leaves nothing",
    },
}


def ask(number: int = 0, prompt: list[int] | None = None, **sampling: object) -> GenerationRequest:
    return GenerationRequest(number, prompt or PROMPT, SamplingParams(**{"max_tokens": 24, **sampling}))


def complete(engine: RolloutEngine, *requests: GenerationRequest) -> list[list[Completion]]:
    async def together() -> list[list[Completion]]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return asyncio.run(together())


def test_n_completions_come_back_with_one_logprob_per_token(engine: RolloutEngine, model: PreTrainedModel):
    [completions] = complete(engine, ask(n=5))
    assert len(completions) == 5
    assert len({tuple(c.token_ids) for c in completions}) == 5, "samples of a group repeat each other"
    for c in completions:
        torch.testing.assert_close(torch.tensor(c.logprobs), own_logprobs(model, c.token_ids), atol=1e-5, rtol=0)


def test_a_completion_ends_with_its_eos_token_or_at_max_tokens(engine: RolloutEngine):
    groups = complete(engine, *(ask(i, n=4) for i in range(10)))
    for c in (c for group in groups for c in group):
        assert EOS not in c.token_ids[:-1]
        assert (c.stop_reason == "stop") == (c.token_ids[-1] == EOS)
        assert c.stop_reason == "stop" or (c.stop_reason == "length" and len(c.token_ids) == 24)
    assert {c.stop_reason for group in groups for c in group} == {"stop", "length"}


def test_ignore_eos_goes_on_to_max_tokens(engine: RolloutEngine):
    groups = complete(engine, *(ask(i, n=4, ignore_eos=True) for i in range(10)))
    assert {len(c.token_ids) for group in groups for c in group} == {24}
    assert any(EOS in c.token_ids[:-1] for group in groups for c in group)


def test_max_tokens_of_one_gives_one_token(engine: RolloutEngine):
    assert [len(c.token_ids) for c in complete(engine, ask(n=3, max_tokens=1))[0]] == [1, 1, 1]


def test_min_tokens_holds_back_every_stop(engine: RolloutEngine):
    stops = tuple(range(8))
    groups = complete(engine, *(ask(i, n=4, min_tokens=6, stop_token_ids=stops) for i in range(10)))
    for c in (c for group in groups for c in group):
        assert not set(c.token_ids[:6]) & {*stops, EOS}
        assert len(c.token_ids) >= 7  # a stop may be the seventh token at the earliest
    assert min(len(c.token_ids) for group in groups for c in group) < 12


def test_stop_token_ids_end_a_completion_beside_eos(engine: RolloutEngine):
    groups = complete(engine, *(ask(i, n=4, stop_token_ids=(7, 9), ignore_eos=True) for i in range(10)))
    for c in (c for group in groups for c in group):
        assert not {7, 9} & set(c.token_ids[:-1])
        assert (c.stop_reason == "stop") == (c.token_ids[-1] in (7, 9))


def test_stop_strings_end_at_the_token_that_completes_them_and_keep_every_token(engine: RolloutEngine):
    [[free]] = complete(engine, ask(1, ignore_eos=True))
    text = letters_tokenizer().decode(free.token_ids)
    stop = text[9:12]
    [[stopped]] = complete(engine, ask(1, ignore_eos=True, stop=("never", stop)))
    assert stopped.stop_reason == "stop"
    ends = [n for n in range(1, 25) if stop in letters_tokenizer().decode(free.token_ids[:n])]
    assert stopped.token_ids == free.token_ids[: ends[0]]


def test_greedy_takes_the_likeliest_token_every_time(engine: RolloutEngine, model: PreTrainedModel):
    [[c]] = complete(engine, ask(temperature=0.0, ignore_eos=True))
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + c.token_ids]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    assert c.token_ids == logits.argmax(-1).tolist()


def test_top_k_of_one_and_a_tiny_top_p_are_greedy(engine: RolloutEngine):
    [[greedy]] = complete(engine, ask(temperature=0.0))
    [[top_k]] = complete(engine, ask(top_k=1))
    [[top_p]] = complete(engine, ask(top_p=1e-6))
    assert greedy.token_ids == top_k.token_ids == top_p.token_ids


def test_min_p_of_one_is_greedy_and_a_bias_forces_or_forbids_a_token(engine: RolloutEngine):
    [greedy], [min_p] = complete(engine, ask(temperature=0.0), ask(1, min_p=1.0))
    assert greedy.token_ids == min_p.token_ids
    never, always = ((i, -100.0) for i in range(EOS // 2)), ((5, 50.0), (EOS, -50.0))
    [without], [forced] = complete(engine, ask(2, logit_bias=tuple(never)), ask(3, logit_bias=always))
    assert min(without.token_ids) >= EOS // 2 and forced.token_ids == [5] * 24


def test_log_probs_are_the_policys_whatever_restricts_or_changes_sampling(
    engine: RolloutEngine, model: PreTrainedModel
):
    options = [
        {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.8}, {"min_tokens": 20}, {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5}, {"logit_bias": ((3, 2.0), (4, -2.0))},
        {"temperature": 0.7}, {"temperature": 1.5, "top_p": 0.6, "top_k": 9, "min_tokens": 9},
        {"temperature": 0.0, "min_tokens": 20}, {"top_p": 0.9, "stop_token_ids": (7, 9)},
    ]  # fmt: skip
    answers = complete(engine, *(ask(number, n=2, **option) for number, option in enumerate(options)))
    for option, completions in zip(options, answers, strict=True):
        for c in completions:
            expected = own_logprobs(model, c.token_ids, temperature=option.get("temperature") or 1.0)
            torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-5, rtol=0, msg=str(option))


def test_a_request_gives_the_same_tokens_alone_and_in_a_crowd_of_any_size(adapter: Adapter, model: PreTrainedModel):
    mine = ask(7, n=2, prompt=[9, 8, 7])
    crowd = [ask(100 + i, prompt=[i % 26] * (1 + i % 16), n=1 + i % 3, top_p=0.9, temperature=1.3) for i in range(20)]
    answers = []
    for rows, order in ((8, [mine]), (8, [*crowd, mine]), (3, [mine, *crowd]), (64, [*crowd[:9], mine, *crowd[9:]])):
        engine = adapter.build(RolloutConfig(dtype="float32", max_model_len=40, max_num_seqs=rows), model)
        got = complete(engine, *order)[order.index(mine)]
        answers.append([c.token_ids for c in got])
    assert all(answer == answers[0] for answer in answers)


def test_another_seed_or_request_id_gives_other_tokens(engine: RolloutEngine):
    got = complete(engine, ask(0), ask(1)) + complete(engine, ask(0, seed=7))
    assert len({tuple(group[0].token_ids) for group in got}) == 3


def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(engine: RolloutEngine):
    with pytest.raises(DataError, match=r"17 prompt tokens \+ max_tokens=24 exceed the 40 .*at most 23 here"):
        complete(engine, ask(prompt=[1] * 17))


WRONG = [{"prompt": [10**6]}, {"prompt": [-1]}, {"temperature": 1e-300}, {"temperature": math.nan}, {"min_p": 2.0}]
WRONG += [{"logit_bias": ((10**6, 1.0),)}]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_request_that_cannot_be_answered_leaves_the_others_alone(engine: RolloutEngine, wrong: dict):
    async def together() -> list:
        requests = [ask(0, n=4), ask(1, **wrong), ask(2)]
        return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

    first, refused, last = asyncio.run(together())
    assert isinstance(refused, ConfigError | DataError | WorkerError) and len(first) == 4 and len(last) == 1


def test_update_weights_is_sampled_and_stamped(adapter: Adapter):
    for tied in (True, False):
        model = small_model(tied)
        engine = adapter.build(CONFIG, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for version in range(1, 4):
            model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
            optimizer.step()
            asyncio.run(engine.update_weights(model, version))
            [[c]] = complete(engine, ask(version))
            assert c.policy_version == (version, version) and engine.version == version
            torch.testing.assert_close(torch.tensor(c.logprobs), own_logprobs(model, c.token_ids), atol=1e-5, rtol=0)


def test_an_update_between_two_tokens_stamps_both_versions(engine: RolloutEngine, model: PreTrainedModel):
    async def scenario() -> list[Completion]:
        with few_tokens(samples=1) as are_there:
            task = asyncio.create_task(engine.generate(ask(ignore_eos=True)))
            await are_there()
            await engine.update_weights(model, 3)
        return await task

    [c] = asyncio.run(scenario())
    assert c.policy_version == (0, 3) and len(c.token_ids) == 24


def test_abort_returns_what_was_produced(engine: RolloutEngine):
    whole = complete(engine, ask(0, n=2, ignore_eos=True), ask(1, ignore_eos=True))

    async def scenario() -> list[list[Completion]]:
        with few_tokens(samples=3) as are_there:
            tasks = [asyncio.create_task(engine.generate(ask(i, n=2 - i, ignore_eos=True))) for i in range(2)]
            await are_there()
            await engine.abort(0)
        return await asyncio.gather(*tasks)

    (first, second), [other] = asyncio.run(scenario())
    assert other.stop_reason == "length" and other.token_ids == whole[1][0].token_ids
    for c, reference in zip((first, second), whole[0], strict=True):
        assert c.stop_reason == "aborted" and 0 < len(c.token_ids) < 24
        assert c.token_ids == reference.token_ids[: len(c.token_ids)] and len(c.logprobs) == len(c.token_ids)


def test_abort_all_also_ends_what_waits(adapter: Adapter, model: PreTrainedModel):
    engine = adapter.build(RolloutConfig(dtype="float32", max_model_len=40, max_num_seqs=2), model)

    async def scenario() -> list[list[Completion]]:
        with few_tokens(samples=12) as are_there:
            tasks = [asyncio.create_task(engine.generate(ask(i, n=3, ignore_eos=True))) for i in range(4)]
            await are_there()
            await engine.abort()
        return await asyncio.gather(*tasks)

    got = asyncio.run(scenario())
    assert {c.stop_reason for group in got for c in group} == {"aborted"}
    assert [len(group) for group in got] == [3, 3, 3, 3]
    [[after]] = complete(engine, ask(0))
    assert after.stop_reason != "aborted"


def test_abort_ends_what_is_still_on_its_way_to_the_engine(engine: RolloutEngine, max_tokens: int = 24):
    async def scenario() -> list[list[Completion]]:
        with few_tokens(samples=math.inf):
            for server in FAKE_SERVERS:
                server.delay = 0.2
            requests = [ask(i, n=2, ignore_eos=True, max_tokens=max_tokens) for i in range(2)]
            tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
            await asyncio.sleep(0)
            await engine.abort(0)
            await engine.abort()
            return await asyncio.wait_for(asyncio.gather(*tasks), 60)

    assert {c.stop_reason for group in asyncio.run(scenario()) for c in group} == {"aborted"}


def test_sleep_refuses_to_generate_and_wake_continues_as_before(engine: RolloutEngine):
    before = complete(engine, ask(), ask(1))
    asyncio.run(engine.sleep())
    with pytest.raises(WorkerError, match="asleep"):
        complete(engine, ask())
    asyncio.run(engine.wake())
    for [again], [first] in zip(complete(engine, ask(), ask(1)), before, strict=True):
        assert (again.token_ids, again.stop_reason) == (first.token_ids, first.stop_reason)
        assert again.logprobs == pytest.approx(first.logprobs, abs=1e-5)


def test_a_request_id_in_flight_is_refused(engine: RolloutEngine):
    with pytest.raises(DataError, match="request_id 0 is already in flight"):
        complete(engine, ask(0), ask(0))


def test_stats_count_generated_tokens(engine: RolloutEngine):
    readings = [asyncio.run(engine.stats())]
    for first in (0, 4):
        groups = complete(engine, *(ask(first + i, n=3) for i in range(4)))
        tokens = sum(len(c.token_ids) for group in groups for c in group)
        assert work_of(engine, readings[-1])["generated_tokens"] == tokens
        readings.append(asyncio.run(engine.stats()))
    assert work_of(engine, readings[-1])["generated_tokens"] == 0
    assert work_of(engine, readings[0])["generated_tokens"] > tokens  # a reader takes nothing from another
