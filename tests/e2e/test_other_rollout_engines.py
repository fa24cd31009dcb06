"""Rollout engines of somebody else: registered by a module of theirs, chosen by name, trained with."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.e2e import jobs
from verl.config import load_config
from verl.models.load import load_tokenizer
from verl.runtime.pools import WorkerPools
from verl.trainer.ppo import rollout_setup
from verl.utils.errors import ConfigError, PluginError, VerlError
from verl.workers.rollout import registry
from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.engines import find_rollout_engine
from verl.workers.rollout.native.engine import NativeEngine
from verl.workers.rollout.registry import EngineInputs, Weights, register_rollout_engine

THEIRS = '''
import copy
import pathlib

from verl.models.load import load_causal_lm
from verl.workers.rollout.base import CopyingEngine
from verl.workers.rollout.native.engine import NativeEngine
from verl.workers.rollout.registry import register_rollout_engine


class Copying(CopyingEngine):
    """Samples from a model of its own, and writes down how often it was given weights."""

    bucket_bytes = 1 << 20

    def __init__(self, inputs):
        self.model = load_causal_lm(inputs.model_path).requires_grad_(False)
        self.log = pathlib.Path(inputs.config.custom["log"])
        self.inner = NativeEngine(inputs.config, self.model, inputs.tokenizer, eos_token_ids=inputs.eos_token_ids)

    async def generate(self, request):
        return await self.inner.generate(request)

    async def begin_update(self):
        self.by_name = dict(self.model.named_parameters())

    async def load_bucket(self, bucket):
        from verl.models.fingerprint import fingerprint

        for name, tensor in bucket:
            self.by_name[name].copy_(tensor)
        return [{name: fingerprint(tensor) for name, tensor in bucket}]

    async def finish_update(self, version):
        await self.inner.update_weights(self.model, version)
        with self.log.open("a") as log:
            log.write(f"{version}\\n")

    async def compute_logprobs(self, sequences):
        import torch

        out = []
        for ids in sequences:
            logits = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0, :-1].log_softmax(-1)
            out.append([0.0, *logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()])
        return out

    async def sleep(self):
        await self.inner.sleep()

    async def wake(self):
        await self.inner.wake()

    async def abort(self, request_id=None):
        await self.inner.abort(request_id)

    async def stats(self):
        return await self.inner.stats()

    @property
    def version(self):
        return self.inner.version

    def close(self):
        with self.log.open("a") as log:
            log.write("closed\\n")


@register_rollout_engine("their_copy", weights="copied")
def build_copying(inputs):
    return Copying(inputs)


@register_rollout_engine("their_view", weights="in_place")
def build_in_place(inputs):
    with pathlib.Path(inputs.config.custom["log"]).open("a") as log:
        log.write("built\\n")
    return NativeEngine(inputs.config, inputs.module, inputs.tokenizer, inputs.device, inputs.eos_token_ids)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    find_rollout_engine("native")  # ours are registered; what a test adds is gone afterwards
    monkeypatch.setattr(registry.ENGINES, "_items", dict(registry.ENGINES._items))
    (tmp_path / "their_engines.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_engines", raising=False)
    jobs.prepare(tmp_path)
    return tmp_path


def train(folder: Path, run: str, *extra: str) -> dict[int, dict]:
    jobs.train(folder, run, "trainer.total_training_steps=2", *extra)
    return jobs.without_timings(jobs.metrics(folder, run))


def theirs(folder: Path, name: str) -> list[str]:
    keys = (f"rollout.name={name}", "model.external_lib=their_engines", f"rollout.custom={{log: {folder / 'log'}}}")
    return [f"{jobs.ARR}.{key}" for key in keys]


def test_engines_of_a_module_of_the_users_train_as_the_native_one_does(folder: Path):
    own = train(folder, "own")
    copied = train(folder, "copied", *theirs(folder, "their_copy"))
    assert (folder / "log").read_text().split() == ["0", "1", "2", "closed"]  # each version arrived
    for step in (1, 2):
        assert copied[step]["actor/grad_norm"] == pytest.approx(own[step]["actor/grad_norm"], rel=1e-5)
        assert copied[step]["critic/score/mean"] == own[step]["critic/score/mean"]
        assert copied[step]["weight_sync/tensors_sent"] > 0
    (folder / "log").unlink()
    assert train(folder, "in_place", *theirs(folder, "their_view")) == own
    assert (folder / "log").read_text().split() == ["built"]


@pytest.mark.parametrize(
    ("word", "error", "closed"),
    [
        (f"{jobs.ARR}.rollout.checkpoint_engine.backend=nccl", "backend=nccl has nothing to carry", "closed\n"),
        ("trainer.logger=[console,file]", "tracker 'file' could not start", ""),  # before the engine starts
    ],
    ids=["weight sync", "tracker"],
)
def test_what_had_started_is_closed_where_a_run_cannot_begin(
    word: str, error: str, closed: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    if not closed:
        (folder / "metrics").write_text("a file, where the tracker wants a folder")
    log, close = folder / "log", WorkerPools.close
    log.touch()

    def close_ranks(pools: WorkerPools) -> None:
        assert log.read_text() == closed  # by the engine, which starts after them
        close(pools)
        log.write_text("all closed")

    monkeypatch.setattr(WorkerPools, "close", close_ranks)
    with pytest.raises(VerlError, match=error):
        train(folder, "run", *theirs(folder, "their_copy"), word)
    assert log.read_text() == "all closed"


def test_throughput_is_per_device_also_of_a_rollout_apart(folder: Path):
    apart = ["hybrid_engine=False", "rollout.n_gpus_per_node=2"]
    words = [*theirs(folder, "their_copy"), *(f"{jobs.ARR}.{word}" for word in apart), "trainer.n_gpus_per_node=1"]
    jobs.train(folder, "apart", "trainer.total_training_steps=1", "trainer.device=cpu", *words)
    found = jobs.metrics(folder, "apart")[1]
    devices = found["perf/total_num_tokens"] / (found["perf/throughput"] * found["perf/time_per_step"])
    assert devices == pytest.approx(3)


def test_replicas_without_a_trainer_get_devices_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def devices(*words: str, visible: int = 4, kind: str = "cuda") -> tuple[tuple[int, ...], ...]:
        platform = SimpleNamespace(device_name=kind, device_count=lambda: visible)
        monkeypatch.setattr(rollout_setup, "get_platform", lambda: platform)
        keys = ["rollout.name=noted", f"model.path={folder / 'model'}", *words]
        config = load_config([f"{jobs.ARR}.{key}" for key in keys])
        return rollout_setup.build_standalone_engine(config, load_tokenizer(config.actor_rollout_ref.model)).devices

    register_rollout_engine("noted", weights=Weights.COPIED)(lambda inputs: inputs)
    monkeypatch.setattr(registry.RegisteredEngine, "build", lambda engine, inputs: engine.builder(inputs))
    two, tensor = "rollout.num_replicas=2", "rollout.tensor_model_parallel_size=2"
    assert devices(two) == ((0,), (1,)) and devices(two, tensor) == ((0, 1), (2, 3))
    assert devices() == devices(tensor) == ()  # one replica sees all
    assert devices(two, kind="cpu", visible=1) == ()
    with pytest.raises(ConfigError, match=r"2 replicas with .*=2 take 4 devices, and 3 are.*num_replicas to at most 1"):
        devices(two, tensor, visible=3)


def test_an_engine_in_place_is_built_on_every_rank(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{':'.join(sys.path)}")
    ranks = ["trainer.n_gpus_per_node=2", "trainer.device=cpu"]
    assert train(folder, "ranks", *theirs(folder, "their_view"), *ranks)[2]["rollout/generated_tokens"] > 0
    assert set((folder / "log").read_text().split()) == {"built"}


def test_what_is_not_registered_or_built_as_another_class_is_refused(folder: Path):
    with pytest.raises(
        ConfigError,
        match=r"rollout.name=vlm is no rollout engine \(did you mean 'vllm'\?\); known: .*hf.*, vllm.*external_lib",
    ):
        find_rollout_engine("vlm")

    @register_rollout_engine("wrong", weights=Weights.COPIED)
    def build_wrong(inputs: EngineInputs) -> RolloutEngine:
        return NativeEngine.__new__(NativeEngine)

    with pytest.raises(PluginError, match=r"'wrong' with weights=copied was built as NativeEngine, .*CopyingEngine"):
        find_rollout_engine("wrong").build(None)  # type: ignore[arg-type]
    assert find_rollout_engine("hf") is not find_rollout_engine("vllm")
    assert find_rollout_engine("hf").name == "native"
