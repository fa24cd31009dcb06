"""The real vLLM: arguments as parsed, weights as computed with, servers, replicas, tensor parallelism, a whole run."""

import asyncio
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.conftest import skip_without_vllm
from tests.contract.test_transports import Rank
from tests.e2e import jobs
from tests.engine_work import work_of
from tests.rollout_adapters import CONFIG, EOS, PROMPT, letters_tokenizer, own_logprobs, small_model
from verl.checkpoint_engine.endpoint import TransportSettings
from verl.commands.quickstart.addition_task import CHARACTERS
from verl.commands.quickstart.small_model import make_model
from verl.config import HFModelConfig
from verl.config.rollout import EngineKwargsConfig, RolloutConfig, ServerConfig
from verl.models.load import build_config, load_causal_lm
from verl.runtime.inline import InlineGroup
from verl.trainer.ppo.rollout_setup import copied_inputs
from verl.utils.errors import ConfigError, WorkerError
from verl.weight_sync.copy_sync import CopySync
from verl.weight_sync.logprob_probe import LogprobProbe, probe_sequences
from verl.weight_sync.weight_transfer import WeightTransfer
from verl.workers.rollout.base import GenerationRequest, RolloutEngine, SamplingParams, StaleWeightsError
from verl.workers.rollout.remote.engine import RemoteEngine
from verl.workers.rollout.router import Router
from verl.workers.rollout.vllm.engine import VLLMEngine, vllm_arguments

SMALL = replace(
    CONFIG, name="vllm", enforce_eager=True, kv_cache_bytes=1 << 24, disable_log_stats=False, prompt_length=1000
)


pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def vllm_is_here() -> None:
    skip_without_vllm()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def opened() -> Iterator[list[VLLMEngine]]:
    """Engines of this process, closed after the test: only one may live at a time."""
    engines: list[VLLMEngine] = []
    yield engines
    for engine in engines:
        engine.close()


def answer(engine: RolloutEngine, number: int = 0, **sampling: Any) -> Any:
    request = GenerationRequest(number, PROMPT, SamplingParams(**{"max_tokens": 16, "ignore_eos": True, **sampling}))
    return asyncio.run(engine.generate(request))


async def trainer_logprobs(model: PreTrainedModel, sequences: Any) -> list[list[float]]:
    return [[0.0, *own_logprobs(model, list(ids[1:]), list(ids[:1])).tolist()] for ids in sequences]


def step(model: PreTrainedModel) -> None:
    """A realistic change: every parameter moves by about 1e-3."""
    torch.manual_seed(int(sum(p.double().sum() for p in model.parameters()) * 1e6) % 2**31)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 2e-3)


def test_every_option_reaches_the_engine(folder: Path):
    from vllm import EngineArgs

    config = RolloutConfig(
        dtype="float32", prompt_length=100, response_length=28, gpu_memory_utilization=0.3, max_num_seqs=12,
        max_num_batched_tokens=345, enforce_eager=False, cudagraph_capture_sizes=[1, 2, 4], enable_chunked_prefill=True,
        enable_prefix_caching=False, disable_log_stats=False, load_format="dummy", seed=7, kv_cache_bytes=1 << 24,
        scheduling_policy="priority", enable_sleep_mode=False,
        engine_kwargs=EngineKwargsConfig(vllm={"block_size": 32, "swap": None}),
    )  # fmt: skip
    args = EngineArgs(**vllm_arguments(config, str(folder), replica=2))
    parsed = args.create_engine_config()
    assert str(parsed.model_config.dtype) == "torch.float32" and parsed.model_config.max_model_len == 128
    assert parsed.model_config.seed == 9 and not parsed.model_config.enforce_eager
    assert parsed.model_config.logprobs_mode == "processed_logprobs"
    assert parsed.scheduler_config.max_num_seqs == 12 and parsed.scheduler_config.max_num_batched_tokens == 345
    assert parsed.scheduler_config.policy == "priority" and parsed.scheduler_config.enable_chunked_prefill
    assert parsed.cache_config.enable_prefix_caching is False and parsed.cache_config.block_size == 32
    assert parsed.cache_config.gpu_memory_utilization == 0.3
    assert parsed.cache_config.kv_cache_memory_bytes == 1 << 24
    assert parsed.load_config.load_format == "dummy" and parsed.parallel_config.tensor_parallel_size == 1
    assert args.cudagraph_capture_sizes == [1, 2, 4] and args.disable_log_stats is False
    sleeping = vllm_arguments(replace(config, enable_sleep_mode=True), str(folder))
    assert sleeping["enable_sleep_mode"] is True and sleeping["seed"] == 7
    assert vllm_arguments(replace(config, tensor_model_parallel_size=2), str(folder))["tensor_parallel_size"] == 2


def test_unknown_and_reserved_engine_kwargs_are_refused_by_name(folder: Path):
    unknown = replace(SMALL, engine_kwargs=EngineKwargsConfig(vllm={"max_num_seq": 3}))
    with pytest.raises(ConfigError, match=r"engine_kwargs.vllm.max_num_seq: .*'max_num_seqs'"):
        VLLMEngine(unknown, folder)
    with pytest.raises(ConfigError, match=r"engine_kwargs.vllm.model is set by this library"):
        VLLMEngine(replace(SMALL, engine_kwargs=EngineKwargsConfig(vllm={"model": "x"})), folder)


@pytest.mark.parametrize("tied", [True, False])
def test_publishes_are_used_and_faults_of_the_real_engine_are_caught(
    tied: bool, tmp_path: Path, monkeypatch: Any, opened: list[VLLMEngine]
):
    model = small_model(tied)
    model.save_pretrained(tmp_path)
    opened.append(engine := VLLMEngine(SMALL, tmp_path))
    probe = LogprobProbe(probe_sequences(EOS + 2), lambda sequences: trainer_logprobs(model, sequences))
    sync = CopySync(lambda: model.named_parameters(), engine, probe, probe_every=1)
    for version in range(4):
        step(model)
        receipt = asyncio.run(sync.publish(version))
        [completion] = answer(engine, version)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), own_logprobs(model, completion.token_ids), atol=1e-5, rtol=0
        )
        assert receipt.probes[0].difference < 1e-5 and completion.policy_version == (version, version)
    step(model)
    if tied:  # what a reload of vLLM's leaves behind on a CPU
        import verl.workers.rollout.vllm.worker as worker

        monkeypatch.setattr(worker, "refresh_tied_weights", lambda model: None)
        with pytest.raises(StaleWeightsError, match="lm_head computes with another"):
            asyncio.run(sync.publish(4))
    else:
        sync.weights = lambda: [(n, p) for n, p in model.named_parameters() if n != "model.norm.weight"]
        with pytest.raises(StaleWeightsError, match=r"no value for 1 of .*, first model.norm.weight"):
            asyncio.run(sync.publish(4))
        sync.weights = lambda: model.named_parameters()
        asyncio.run(sync.publish(5))
        sync.weights = lambda: [(n, p) for n, p in model.named_parameters() if "layers.1.mlp.up" not in n]
        step(model)
        with pytest.raises(StaleWeightsError, match=r"first 64 of 128 rows of .*1.mlp.gate_up_proj"):
            asyncio.run(sync.publish(6))


def test_overrides_of_the_models_configuration_reach_the_engine(folder: Path, opened: list[VLLMEngine]):
    override = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rms_norm_eps": 0.5}
    settings = HFModelConfig(path=str(folder), override_config=override)
    oracle = load_causal_lm(folder, config=build_config(settings)[0])
    letters_tokenizer().save_pretrained(folder)
    opened.append(engine := VLLMEngine(copied_inputs(SMALL, settings, letters_tokenizer()).config, folder))
    asyncio.run(engine.update_weights(oracle, 0))
    [completion] = answer(engine, top_p=0.8, temperature=1.3)
    expected = own_logprobs(oracle, completion.token_ids, temperature=1.3)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


def test_statistics_are_reported_when_they_are_wanted(folder: Path, opened: list[VLLMEngine]):
    opened.append(engine := VLLMEngine(SMALL, folder))
    answer(engine, n=4)
    stats = work_of(engine)
    assert stats["generated_tokens"] == 64 and stats["running"] > 1 and 0 < stats["cache_use"] < 1
    assert stats.keys() >= {"waiting", "preemptions", "prefix_cache_hit_rate"}
    assert work_of(engine, asyncio.run(engine.stats()))["generated_tokens"] == 0


@pytest.fixture
def server(folder: Path) -> Iterator[RemoteEngine]:
    python = ServerConfig(python=sys.executable)
    engine = RemoteEngine(replace(SMALL, server=python, load_format="safetensors"), folder, (EOS,), replica=3)
    engine.wait_until_ready()
    yield engine
    engine.close()


def by_transport(
    model: PreTrainedModel, engine: Any, backend: str = "naive", probe: LogprobProbe | None = None
) -> CopySync:
    """Publishing from this process to servers."""
    weight_transfer = WeightTransfer(
        TransportSettings(backend, 1 << 20, {}), InlineGroup(Rank(model.named_parameters)), engine
    )
    return CopySync(lambda: [], engine, probe, 1, weight_transfer)


def test_a_server_answers_publishes_aborts_and_its_death_is_told(server: RemoteEngine):
    model = small_model()
    sync = by_transport(model, server)
    asyncio.run(sync.publish(5))
    step(model)
    sync.weight_transfer.trainer.local_worker.engine.export_weights = lambda: [
        *list(model.named_parameters())[:5],
        ("none", None),
    ]
    with pytest.raises(StaleWeightsError, match="version 6 did not arrive"):
        asyncio.run(sync.publish(6))
    sync = by_transport(model, server)
    asyncio.run(sync.publish(6))
    for completion in answer(server, n=2):
        assert completion.policy_version == (6, 6)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), own_logprobs(model, completion.token_ids), atol=1e-5, rtol=0
        )
    assert asyncio.run(server.compute_logprobs([PROMPT]))[0][1:] == pytest.approx(
        own_logprobs(model, PROMPT[1:], PROMPT[:1]).tolist(), abs=1e-5
    )
    assert work_of(server)["generated_tokens"] == 32

    async def aborted() -> Any:
        task = asyncio.create_task(
            server.generate(GenerationRequest(9, PROMPT, SamplingParams(max_tokens=1000, ignore_eos=True)))
        )
        await asyncio.sleep(0.2)
        await server.abort(9)
        return await task

    [cut] = asyncio.run(aborted())
    assert cut.stop_reason == "aborted" and len(cut.token_ids) == len(cut.logprobs) < 1000

    async def killed() -> None:
        task = asyncio.create_task(
            server.generate(GenerationRequest(10, PROMPT, SamplingParams(max_tokens=1000, ignore_eos=True)))
        )
        await asyncio.sleep(0.1)
        server.server.process.send_signal(signal.SIGKILL)
        await task

    with pytest.raises(WorkerError, match=r"^rollout replica 3: its process ended with signal SIGKILL") as lost:
        asyncio.run(killed())
    assert not lost.value.is_death  # which is of a rank
    with pytest.raises(WorkerError, match="replica 3"):
        answer(server)


def test_a_server_that_cannot_start_says_why(tmp_path: Path):
    engine = RemoteEngine(SMALL, tmp_path / "nothing", (), replica=1)
    with pytest.raises(WorkerError, match=r"(?s)replica 1: .*nothing"):
        engine.wait_until_ready()
    engine.close()


def test_a_killed_server_is_replaced_and_its_requests_have_the_same_answers(folder: Path):
    config = replace(SMALL, server=ServerConfig(python=sys.executable))
    start, model = partial(RemoteEngine, config, folder, (EOS,)), small_model()
    router = Router([start(number) for number in range(2)], start, max_restarts=1)
    for engine in router.engines:
        engine.wait_until_ready()
    try:
        probe = LogprobProbe(probe_sequences(EOS + 2), lambda sequences: trainer_logprobs(model, sequences))
        sync = by_transport(model, router, probe=probe)
        asyncio.run(sync.publish(0))
        sampling = SamplingParams(max_tokens=200, ignore_eos=True)
        requests = [GenerationRequest(number, PROMPT, sampling) for number in range(4)]

        async def ask(kill: bool) -> list[list[int]]:
            server = router.engines[1].server.process
            if kill:
                server.send_signal(signal.SIGSTOP)  # so that it has answered none of its requests
            waiting = [asyncio.create_task(router.generate(request)) for request in requests]
            await asyncio.sleep(0.3)
            if kill:
                server.send_signal(signal.SIGKILL)
            return [completion.token_ids for [completion] in await asyncio.gather(*waiting)]

        undisturbed = asyncio.run(ask(kill=False))
        assert asyncio.run(ask(kill=True)) == undisturbed and len(router.replicas) == 1
        router.starting[1].wait_until_ready()
        step(model)
        receipt = asyncio.run(sync.publish(1))
        assert receipt.num_replicas == len(receipt.probes) == 2 and receipt.num_read_back == receipt.num_tensors
    finally:
        router.close()


@pytest.mark.parametrize("backend", ["naive", "nccl"])
def test_a_replica_of_two_devices_holds_one_version(folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    config = replace(SMALL, tensor_model_parallel_size=2)
    engine = RemoteEngine(config, folder, (EOS,))
    engine.wait_until_ready()
    model = small_model()
    probe = LogprobProbe(probe_sequences(EOS + 2), lambda sequences: trainer_logprobs(model, sequences))
    sync = by_transport(model, Router([engine]), backend, probe)
    for version in range(2):
        step(model)
        receipt = asyncio.run(sync.publish(version))
    assert receipt.num_read_back == receipt.num_tensors and answer(engine)[0].policy_version == (1, 1)
    engine.close()
    engine.server.process.wait(60)  # a limit on a hang


ROLLOUT = "actor_rollout_ref.rollout"
SMALL_RUN = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.enforce_eager=True", f"{ROLLOUT}.kv_cache_bytes=16777216"]


def test_replicas_beside_two_ranks_or_apart_train_as_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    make_model(tmp_path / "model", CHARACTERS, 0, hidden=128, layers=2)
    fixed = ["trainer.device=cpu", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=3"]
    fixed += [*SMALL_RUN, f"{ROLLOUT}.checkpoint_engine.probe_every=1"]
    jobs.train(tmp_path, "one", *fixed)
    one = jobs.metrics(tmp_path, "one")
    two, apart = (
        [f"{ROLLOUT}.num_replicas=2"],
        ["actor_rollout_ref.hybrid_engine=False", f"{ROLLOUT}.n_gpus_per_node=2"],
    )
    data_ranks = [*apart, f"{ROLLOUT}.data_parallel_size=2"]
    for run, words, replicas in (("two", two, 2), ("apart", apart, 2), ("data_ranks", data_ranks, 1)):
        jobs.train(tmp_path, run, *fixed, *words)
        rows = jobs.metrics(tmp_path, run)
        for step in (1, 2, 3):
            row, expected = rows[step], one[step]
            for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm"):
                assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), (run, step, name)
            assert row["weight_sync/bytes_moved"] == replicas * expected["weight_sync/bytes_moved"]
            assert row["weight_sync/tensors_read_back"] == row["weight_sync/tensors_sent"] > 0
            assert row["weight_sync/probe_difference"] <= row["weight_sync/probe_bound"]


@pytest.mark.parametrize(("replicas", "ranks", "backend"), [(1, 1, "naive"), (2, 1, "nccl"), (2, 2, "file")])
def test_grpo_learns_on_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int, ranks: int, backend: str):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    make_model(tmp_path / "model", CHARACTERS, 0, hidden=128, layers=1)  # vLLM wants heads of at least 32 on a CPU
    jobs.train(
        tmp_path, "run", *SMALL_RUN, f"{ROLLOUT}.disable_log_stats=False", f"{ROLLOUT}.num_replicas={replicas}",
        f"{ROLLOUT}.n=8", f"{ROLLOUT}.checkpoint_engine.probe_every=2", "trainer.total_training_steps=12",
        f"trainer.n_gpus_per_node={ranks}", "trainer.device=cpu", f"{ROLLOUT}.checkpoint_engine.backend={backend}",
        f"{ROLLOUT}.checkpoint_engine.engine_kwargs.file.folder={tmp_path / 'shared'}",
    )  # fmt: skip
    rows = jobs.metrics(tmp_path, "run")
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for step, row in rows.items() if step)
    assert all(row["rollout/generated_tokens"] > 0 for step, row in rows.items() if step)
    score = [rows[step]["critic/score/mean"] for step in range(1, 13)]
    assert sum(score[-4:]) / 4 > sum(score[:4]) / 4 + 0.05
