"""`kv_cache_on_publish=keep_kv` with the real vLLM: what runs goes on with its KV cache, and nobody else finds it."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.conftest import skip_without_vllm
from tests.contract.test_vllm import SMALL, by_transport, trainer_logprobs
from tests.mixed_weights import mixed_logprobs
from tests.rollout_adapters import EOS, letters_tokenizer, own_logprobs, small_model
from tests.unit.workers.rollout.test_kept_cache import version
from verl.weight_sync.logprob_probe import LogprobProbe, probe_sequences
from verl.workers.rollout.base import Completion, GenerationRequest, RolloutEngine, SamplingParams
from verl.workers.rollout.native.engine import NativeEngine
from verl.workers.rollout.parking import PAUSE, ParkingEngine
from verl.workers.rollout.remote.engine import RemoteEngine
from verl.workers.rollout.vllm.engine import VLLMEngine

pytestmark = pytest.mark.vllm
KEEPING = replace(SMALL, kv_cache_on_publish="keep_kv", max_num_seqs=4)
LONG = [(7 * place) % 26 for place in range(300)]  # more than two blocks of the cache
SAMPLING = SamplingParams(n=3, max_tokens=24, ignore_eos=True)
MODELS = {number: version(number).double() for number in range(3)}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    skip_without_vllm()
    folder = tmp_path_factory.mktemp("model")
    small_model().save_pretrained(folder)
    engine = VLLMEngine(KEEPING, folder, letters_tokenizer(), (EOS,))
    yield engine
    engine.close()


def request(number: int, prompt: list[int] = LONG, **sampling: object) -> GenerationRequest:
    return GenerationRequest(number, prompt, replace(SAMPLING, **sampling))


async def num_in_flight(engine: RolloutEngine) -> int:
    return sum(len(sample.token_ids) for one in await engine.in_flight() for sample in one.sampled)


async def sampled(engine: RolloutEngine, count: int) -> None:
    """Wait until `count` tokens are in flight."""
    while await num_in_flight(engine) < count:
        await asyncio.sleep(0)


async def go_on_under(engine: RolloutEngine, number: int) -> None:
    await engine.park()
    await engine.sleep()
    await engine.wake()
    await engine.update_weights(version(number), number)
    await engine.resume()


def probe_of(model: PreTrainedModel) -> LogprobProbe:
    return LogprobProbe(probe_sequences(EOS + 2, 12), lambda sequences: trainer_logprobs(model, sequences))


def assert_mixed(completion: Completion, prompt: list[int]) -> None:
    segments = completion.segments or ((completion.policy_version[0], len(completion.token_ids)),)
    recorded = torch.tensor(completion.logprobs).double()
    expected = mixed_logprobs(MODELS, prompt, completion.token_ids, segments)
    torch.testing.assert_close(recorded, expected, atol=2e-5, rtol=0)
    if len(segments) > 1:
        last = segments[-1][1]
        anew = own_logprobs(MODELS[segments[-1][0]], completion.token_ids, prompt)
        assert (recorded - anew)[-last:].abs().max() > 1e-4


def test_what_runs_keeps_its_cache_and_what_waits_or_comes_later_begins_with_the_new_weights(vllm: VLLMEngine):
    engine = ParkingEngine(vllm, PAUSE)

    async def run() -> list[list[Completion]]:
        await vllm.update_weights(version(0), 0)
        answers = [asyncio.ensure_future(engine.generate(request(number))) for number in range(2)]  # 2 of 6 wait
        for number, count in enumerate((12, 30), start=1):
            await sampled(engine, count)
            await go_on_under(engine, number)
        answers.append(asyncio.ensure_future(engine.generate(request(2))))
        return [await answer for answer in answers]

    first, second, later = asyncio.run(run())
    for completion in (*first, *second, *later):
        assert len(completion.token_ids) == 24
        assert_mixed(completion, LONG)
    assert all([v for v, _ in c.segments] == [0, 1, 2] for c in first)
    assert any(c.policy_version[0] > 0 for c in second)  # those that waited
    assert all(c.policy_version == (2, 2) and not c.segments for c in later)


def test_the_next_turn_of_a_mixed_answer_finds_nothing_of_it(vllm: VLLMEngine):
    """Blocks that hold keys of old weights, and blocks computed after them by new ones, are for who runs alone."""

    engine = ParkingEngine(vllm, PAUSE)

    async def run() -> tuple[Completion, Completion]:
        await vllm.update_weights(version(0), 0)
        first = asyncio.ensure_future(engine.generate(request(0, n=1, max_tokens=200)))
        await sampled(engine, 20)
        await go_on_under(engine, 1)
        [answer] = await first
        [turn] = await engine.generate(request(1, [*LONG, *answer.token_ids, 5], n=1))
        return answer, turn

    answer, turn = asyncio.run(run())
    assert_mixed(answer, LONG)
    assert_mixed(turn, [*LONG, *answer.token_ids, 5])


def test_greedy_answers_are_those_of_the_native_engine(vllm: VLLMEngine):
    async def answered(engine: RolloutEngine) -> tuple[Completion, int]:
        answer = asyncio.ensure_future(engine.generate(request(0, n=1, temperature=0.0)))
        await sampled(engine, 8)
        await engine.park()
        [saved] = await engine.in_flight()
        await go_on_under(engine, 1)
        return (await answer)[0], len(saved.sampled[0].token_ids)

    async def run() -> None:
        await vllm.update_weights(version(0), 0)
        by_vllm, count = await answered(ParkingEngine(vllm, PAUSE))
        model = version(0)
        native = NativeEngine(replace(KEEPING, name="native"), model, letters_tokenizer())
        parked = ParkingEngine(native, PAUSE)
        answer = asyncio.ensure_future(parked.generate(request(0, n=1, temperature=0.0)))
        await sampled(parked, count)
        await parked.park()
        model.load_state_dict(version(1).state_dict())
        await parked.update_weights(model, 1)
        await parked.resume()
        [own] = await answer
        assert own.token_ids == by_vllm.token_ids and own.segments == by_vllm.segments
        torch.testing.assert_close(torch.tensor(own.logprobs), torch.tensor(by_vllm.logprobs), atol=2e-5, rtol=0)

    asyncio.run(run())


def test_a_probe_of_a_parked_engine_computes_with_the_new_weights(vllm: VLLMEngine):
    async def run() -> list[Completion]:
        await vllm.update_weights(version(0), 0)
        answer = asyncio.ensure_future(vllm.generate(request(0)))
        await sampled(vllm, 9)
        await vllm.park()
        await vllm.update_weights(version(1), 1)
        [probed] = await vllm.compute_logprobs([LONG])
        expected = own_logprobs(MODELS[1], LONG[1:], LONG[:1])
        torch.testing.assert_close(torch.tensor(probed[1:]).double(), expected, atol=2e-5, rtol=0)
        count = await num_in_flight(vllm)
        await asyncio.sleep(0.02)
        assert count == await num_in_flight(vllm)  # parked again
        await vllm.resume()
        return await answer

    for completion in asyncio.run(run()):
        assert_mixed(completion, LONG)


@pytest.mark.slow
def test_data_parallel_ranks_in_a_server_keep_theirs(tmp_path: Path):
    skip_without_vllm()
    small_model().save_pretrained(tmp_path)
    inner = RemoteEngine(replace(KEEPING, data_parallel_size=2, kv_cache_bytes=1 << 26), tmp_path, (EOS,))
    engine = ParkingEngine(inner, PAUSE)

    async def publish(number: int) -> None:
        model = version(number)
        await by_transport(model, inner, "naive", probe_of(model)).publish(number)

    async def run() -> list[Completion]:
        await publish(0)
        answers = [asyncio.ensure_future(engine.generate(request(number, max_tokens=200))) for number in range(4)]
        await sampled(engine, 60)
        await engine.park()
        before = await engine.in_flight()
        await publish(1)
        await engine.resume()
        completions = [completion for answer in answers for completion in await answer]
        samples = [sample for one in before for sample in one.sampled]
        for sample, completion in zip(samples, completions, strict=True):
            count = len(sample.token_ids)
            assert sample.token_ids == completion.token_ids[:count]
            assert count <= sum(n for v, n in completion.segments if v == 0)
        return completions

    try:
        completions = asyncio.run(run())
    finally:
        engine.close()
    for completion in completions:
        assert_mixed(completion, LONG)
    assert {completion.policy_version for completion in completions} >= {(0, 1), (1, 1)}
