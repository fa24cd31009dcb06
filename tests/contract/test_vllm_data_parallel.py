"""A replica of two data-parallel ranks of the real vLLM: requests, publishes and their receipt reach both.

The model is dense: vLLM's build for CPUs lacks the collective that ranks with experts exchange tokens by.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests import vllm_server
from tests.conftest import skip_without_vllm
from tests.contract import test_rollout as laws
from tests.contract.test_vllm import SMALL, by_transport, step, trainer_logprobs
from tests.contract.test_vllm_receipt import model_with_experts
from tests.rollout_adapters import EOS, PROMPT, letters_tokenizer, own_logprobs, small_model
from tests.rollout_server import python_wrapper
from verl.config.rollout import ServerConfig
from verl.runtime.rank_observation import family
from verl.utils.errors import ReplicaError
from verl.weight_sync.logprob_probe import LogprobProbe, probe_sequences
from verl.workers.rollout.base import Completion, GenerationRequest, SamplingParams, StaleWeightsError
from verl.workers.rollout.remote.engine import RemoteEngine
from verl.workers.rollout.vllm.engine import vllm_arguments

pytestmark = pytest.mark.vllm
TWO = replace(SMALL, data_parallel_size=2, prompt_length=8000, kv_cache_bytes=1 << 26)
LONG = 7000  # tokens of an answer that no machine finishes before the test aborts it


@pytest.fixture(autouse=True)
def vllm_is_here() -> None:
    skip_without_vllm()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RemoteEngine, Path]]:
    skip_without_vllm()
    folder = tmp_path_factory.mktemp("two_ranks")
    model, fault = folder / "model", folder / "fault"
    small_model().save_pretrained(model)
    letters_tokenizer().save_pretrained(model)
    fault.write_text("none")
    python = python_wrapper(folder, "tests.vllm_data_parallel_server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(vllm_server.FAULT_FILE, str(fault))
        server = ServerConfig(python=python, max_start_wait_time=1200)
        engine = RemoteEngine(replace(TWO, load_format="dummy", server=server), model, (EOS,))
        try:
            engine.wait_until_ready()
            yield engine, fault
        finally:
            engine.close()


@pytest.fixture
def model() -> PreTrainedModel:
    return small_model()


@pytest.fixture
def engine(started: tuple[RemoteEngine, Path], model: PreTrainedModel) -> RemoteEngine:
    """It has the weights of `model`."""
    engine, fault = started
    fault.write_text("none")
    asyncio.run(publisher(model, engine).publish(0))
    return engine


def publisher(model: PreTrainedModel, engine: RemoteEngine, backend: str = "naive") -> Any:
    probe = LogprobProbe(probe_sequences(EOS + 2, 12), lambda sequences: trainer_logprobs(model, sequences))
    return by_transport(model, engine, backend, probe)


def ask(number: int, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(number, PROMPT, SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **sampling}))


@pytest.mark.parametrize("experts", [1, 4])
def test_the_arguments_are_those_of_vllm(experts: int, tmp_path: Path):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    model_with_experts().save_pretrained(tmp_path)
    sizes = {"data_parallel_size": 2, "tensor_model_parallel_size": 2, "expert_parallel_size": experts}
    config = replace(SMALL, **sizes, enable_sleep_mode=False)
    arguments = vllm_arguments(config, str(tmp_path))
    assert set(arguments) <= {field.name for field in fields(AsyncEngineArgs)}
    parsed = AsyncEngineArgs(**arguments).create_engine_config().parallel_config
    assert (parsed.data_parallel_size, parsed.world_size) == (2, 2)
    assert parsed.enable_expert_parallel is (experts == 4)
    assert {"data_parallel_rank", "lora_request"} <= signature(AsyncLLM.generate).parameters.keys()
    assert {"mode", "clear_cache"} <= signature(AsyncLLM.pause_generation).parameters.keys()


@pytest.mark.parametrize("backend", ["naive", "gloo"])
def test_a_publish_reaches_both_ranks_and_its_receipt_is_of_both(engine: RemoteEngine, backend: str, model: Any):
    sync = publisher(model, engine, backend)
    for version in (1, 2):
        step(model)
        receipt = asyncio.run(sync.publish(version))
        assert receipt.num_replicas == len(receipt.probes) == 1 and not receipt.unread
        assert receipt.num_read_back == receipt.num_tensors == len(list(model.parameters()))
    first, again = torch.tensor(asyncio.run(engine.compute_logprobs([PROMPT] * 2))).chunk(2)
    expected = own_logprobs(model, PROMPT[1:], PROMPT[:1])
    for rank in (first, again):
        torch.testing.assert_close(rank[:, 1:], expected.repeat(2, 1), atol=1e-5, rtol=0)


def test_requests_go_to_both_ranks_and_answers_do_not_depend_on_which(engine: RemoteEngine, model: PreTrainedModel):
    before = asyncio.run(engine.stats())
    [alone] = laws.complete(engine, ask(7, n=2))
    crowd = laws.complete(engine, *(ask(number, n=2) for number in range(20)))
    assert [c.token_ids for c in crowd[7]] == [c.token_ids for c in alone]
    for completion in (c for group in crowd for c in group):
        own = own_logprobs(model, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs), own, atol=1e-5, rtol=0)
    both = [now.since(then) for now, then in zip(asyncio.run(engine.stats()), before, strict=True)]
    assert len(both) == 2 and all(stats.ratios["running"][0] > 24 for stats in both)


LAWS = [
    laws.test_a_completion_ends_with_its_eos_token_or_at_max_tokens,
    laws.test_stop_strings_end_at_the_token_that_completes_them_and_keep_every_token,
    laws.test_sleep_refuses_to_generate_and_wake_continues_as_before,
    laws.test_a_request_id_in_flight_is_refused,
    laws.test_stats_count_generated_tokens,
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_law_of_every_engine_holds(law: Callable[..., None], engine: RemoteEngine):
    law(engine)


@pytest.mark.parametrize("wrong", laws.WRONG[:3])
def test_a_request_that_cannot_be_answered_leaves_the_others_alone(engine: RemoteEngine, wrong: dict):
    laws.test_a_request_that_cannot_be_answered_leaves_the_others_alone(engine, wrong)


def test_abort_ends_what_is_still_on_its_way_to_a_rank(engine: RemoteEngine):
    laws.test_abort_ends_what_is_still_on_its_way_to_the_engine(engine, max_tokens=LONG)


def test_an_abort_does_not_wait_until_every_output_was_read(engine: RemoteEngine, started: tuple[RemoteEngine, Path]):
    started[1].write_text("slow")

    async def scenario() -> list[Completion]:
        streamed = asyncio.Event()
        answer = asyncio.create_task(engine.stream(ask(0, n=4, max_tokens=LONG), lambda *tokens: streamed.set()))
        await streamed.wait()
        await engine.abort()
        return await answer

    assert all(c.stop_reason == "aborted" and len(c.token_ids) < 1000 for c in asyncio.run(scenario()))


def test_streams_of_both_ranks_go_on_through_a_publish_and_end_at_an_abort(engine: RemoteEngine, model: Any):
    """Each sample has tokens of the old version and of the new one; what was streamed is what is returned."""
    streamed: dict[int, list[int]] = {number: [] for number in range(4)}

    async def until(least: int) -> None:
        while min(map(len, streamed.values())) < least:
            await asyncio.sleep(0.005)

    async def scenario() -> list[list[Completion]]:
        def receive(number: int) -> Callable[..., None]:
            return lambda sample, token_ids, *more: streamed[number].extend(token_ids)

        answers = [asyncio.create_task(engine.stream(ask(i, max_tokens=LONG), receive(i))) for i in streamed]
        await until(3)
        step(model)
        await publisher(model, engine).publish(1)
        await until(min(map(len, streamed.values())) + 3)
        await engine.abort(0)
        [[first]] = await asyncio.gather(answers[0])
        assert first.stop_reason == "aborted" and not any(answer.done() for answer in answers[1:])
        await engine.abort()
        return [[first], *await asyncio.gather(*answers[1:])]

    for number, [completion] in enumerate(asyncio.run(asyncio.wait_for(scenario(), 120))):
        assert completion.stop_reason == "aborted" and completion.policy_version == (0, 1)
        assert 6 <= len(completion.token_ids) == len(completion.logprobs) < LONG
        assert completion.token_ids[: len(streamed[number])] == streamed[number]
    assert asyncio.run(publisher(model, engine).publish(2)).num_replicas == 1  # nothing runs on


def test_a_tensor_that_one_rank_loads_wrongly_is_named_with_it(
    engine: RemoteEngine, started: tuple[RemoteEngine, Path], model: PreTrainedModel
):
    sync, wrong = publisher(model, engine), "model.layers.1.mlp.down_proj.weight"
    for rank in (0, 1):
        started[1].write_text(f"{rank} {wrong}")
        with pytest.raises(StaleWeightsError, match=f"replica 0, rank {rank}: .* computes with another {wrong} than"):
            asyncio.run(sync.publish(1))
    started[1].write_text("none")
    assert asyncio.run(sync.publish(2)).num_replicas == 1
    assert laws.complete(engine, ask(0))[0][0].policy_version == (2, 2)


def test_a_rank_that_dies_ends_its_replica_so_that_another_takes_its_place(engine: RemoteEngine):
    """The last of this file: the engine is lost."""
    ranks = [pid for pid in family({engine.server.process.pid}) if "EngineCor" in Path(f"/proc/{pid}/comm").read_text()]
    assert len(ranks) == 2

    async def killed() -> None:
        answers = [asyncio.create_task(engine.generate(ask(i, max_tokens=LONG))) for i in range(2)]
        await asyncio.sleep(0.1)
        os.kill(ranks[1], signal.SIGKILL)
        await asyncio.gather(*answers)
        while True:
            await engine.generate(ask(0))

    with pytest.raises(ReplicaError, match=r"(?s)its process ended with exit code 1.*a data-parallel rank of vLLM"):
        asyncio.run(killed())
    assert engine.lost is not None
