"""What publishing costs: in this process, and to a server process over each transport, against moving the bytes alone.

    python benchmarks/weight_sync.py --json benchmarks/results/weight_sync.json      # with vLLM installed

`publish`: until the server samples from the new version, fingerprints on both ends included, without a probe. `move`:
the same bytes over the same transport between two processes that do nothing else. `reload`: the engine's own work, in
the server and in the same publish. Publishes and moves take turns; medians.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from support.jobs import ARR, EQUAL, overrides_1m, prepare_1m, stepper
from support.record import save
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verl.checkpoint_engine.endpoint import TransportEndpoint, TransportSettings
from verl.config.rollout import RolloutConfig, ServerConfig
from verl.models.fingerprint import fingerprint
from verl.runtime.inline import InlineGroup
from verl.weight_sync.copy_sync import CopySync
from verl.weight_sync.weight_transfer import WeightTransfer
from verl.workers.engine_worker import EngineWorker
from verl.workers.rollout.remote_engine import RemoteEngine
from verl.workers.rollout.vllm_engine import VLLMEngine

BACKENDS = ("naive", "nccl", "file")
CONFIG = RolloutConfig(
    name="vllm", dtype="float32", prompt_length=40, response_length=40, max_num_seqs=8, enforce_eager=True,
    kv_cache_bytes=1 << 24,
)  # fmt: skip


def make_30m(folder: Path) -> None:
    """A random Qwen3 of about 30 million parameters."""
    config = Qwen3Config(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=0,
        bos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")


class Rank(EngineWorker):
    """A trainer's rank that holds nothing but weights."""

    def __init__(self, weights: Callable[[], Iterable[tuple[str, Tensor]]]):
        self.endpoint, self.engine = TransportEndpoint(), SimpleNamespace(rank=0, export_weights=weights)


def sink(pipe: Any) -> None:
    """A process that receives, and does nothing with it."""
    torch.set_num_threads(1)
    endpoint = TransportEndpoint()
    while (call := pipe.recv()) is not None:
        step, argument = call
        if step == "receive":
            for _ in endpoint.receive(argument):
                pass
            pipe.send(None)
        else:
            pipe.send(getattr(endpoint, step)(argument))


class Mover:
    """The bytes of the weights, from this process to a sink."""

    def __init__(self, settings: TransportSettings):
        self.pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=sink, args=(theirs,), daemon=True)
        self.process.start()
        transport: Any = settings.transport()
        self.transport = transport(bucket_size=settings.bucket_bytes, **settings.arguments)
        ours = self.transport.prepare()
        ours, theirs = transport.build_topology(1, 1, [ours, self.ask("open", settings)])
        self.pipe.send(("connect", {name: value[0] for name, value in theirs.items()}))
        self.transport.init_process_group(**{name: value[0] for name, value in ours.items()})
        self.pipe.recv()

    def ask(self, *call: Any) -> Any:
        self.pipe.send(call)
        return self.pipe.recv()

    def move(self, weights: list[tuple[str, Tensor]], version: int) -> None:
        if not self.transport.sends_first:
            self.pipe.send(("receive", version))
        asyncio.run(self.transport.send_weights(iter(weights), version))
        if self.transport.sends_first:
            self.pipe.send(("receive", version))
        self.pipe.recv()

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join()
        self.transport.finalize()


def milliseconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - begin)


def measure(model: nn.Module, folder: Path, rounds: int, runner: asyncio.Runner) -> dict[str, Any]:
    """Milliseconds of one model."""
    weights = list(model.named_parameters())
    num_bytes = sum(tensor.nbytes for _, tensor in weights)
    engine = VLLMEngine(CONFIG, folder / "model")
    here = CopySync(lambda: weights, engine, None, 0)
    seconds: dict[str, list[float]] = {"in process": [], "reload": [], "fingerprints": []}

    async def reload() -> None:
        await engine.begin_update()
        with patch("verl.workers.rollout.vllm_worker.fingerprint", lambda tensor: ""):
            await engine.load_bucket(weights)
        await engine.finish_update(0)

    for number in range(rounds + 1):
        run = {
            "in process": milliseconds(partial(runner.run, here.publish(number))),
            "reload": milliseconds(partial(runner.run, reload())),
            "fingerprints": milliseconds(lambda: [fingerprint(tensor) for _, tensor in weights]),
        }
        if number:
            for name, value in run.items():
                seconds[name].append(value)
    figures: dict[str, Any] = {name: statistics.median(values) for name, values in seconds.items()}
    engine.close()
    figures |= {"parameters": num_bytes // 4, "bytes": num_bytes}
    reloads_file = folder / "reload"
    os.environ["VERL_BENCHMARK_RELOADS"] = str(reloads_file)
    server = RemoteEngine(replace(CONFIG, server=ServerConfig(python=None)), folder / "model")
    del os.environ["VERL_BENCHMARK_RELOADS"]
    server.ready()
    for backend in BACKENDS:
        arguments = {"folder": str(folder / "shared")} if backend == "file" else {}
        settings = TransportSettings(backend, 1 << 30, arguments, "support.reload_clock")
        weight_transfer, mover = WeightTransfer(settings, InlineGroup(Rank(lambda: weights)), server), Mover(settings)
        sync = CopySync(lambda: [], server, None, 0, weight_transfer)
        publishes, moves, reloads = [], [], []
        for number in range(rounds + 2):
            moves.append(milliseconds(partial(mover.move, weights, number)))
            publishes.append(milliseconds(partial(runner.run, sync.publish(number))))
            reloads.append(1000 * float(reloads_file.read_text()))
        publish, move, reload_there = (statistics.median(values[2:]) for values in (publishes, moves, reloads))
        share = (publish - reload_there) / move
        figures[backend] = {"publish": publish, "reload": reload_there, "move": move, "share": share}
        print(f"  {backend:6} publish {publish:.1f} ms, reload {reload_there:.1f}, move {move:.1f}: {share:.2f} of it")
        mover.close()
        runner.run(weight_transfer._close())
    server.close()
    return figures


def share_of_a_step(folder: Path, steps: int) -> dict[str, float]:
    """What the receipt adds to a GRPO step of the 1M model on vLLM in this process, at the default cadence."""
    rollout = f"{ARR}.rollout"
    job = [
        *overrides_1m(folder, EQUAL), f"{rollout}.name=vllm", f"{rollout}.enforce_eager=True",
        f"{rollout}.kv_cache_bytes=67108864", f"{rollout}.max_num_seqs=128",
    ]  # fmt: skip
    with stepper(job) as run:
        seconds = [run.step().seconds for _ in range(steps)][1:]
        sync: Any = run.run.trainer.weight_sync
        weights = list(sync.weights())
        prints = milliseconds(lambda: [fingerprint(tensor) for _ in range(2) for _, tensor in weights])
        loop = run.run.trainer.runner
        probes = [milliseconds(partial(loop.run, sync.probe.check(sync.engine.replicas, 0))) for _ in range(5)]
        step, probe = 1000 * statistics.median(seconds), statistics.median(probes)
    share = (prints + probe / sync.probe_every) / step
    print(f"step {step:.0f} ms; fingerprints {prints:.1f}, probe {probe:.1f} every {sync.probe_every}: {share:.2%}")
    return {"step": step, "fingerprints": prints, "probe": probe, "every": sync.probe_every, "share": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=("1M", "30M", "step"))
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as place:
        os.environ["VERL_FILE_LOGGER_ROOT"] = place
        for name, make in (("1M", prepare_1m), ("30M", make_30m)):
            folder = Path(place) / name
            make(folder)
            if options.only in (None, name):
                model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
                figures[name] = measure(model, folder, options.rounds, runner)
                print(name, {k: v for k, v in figures[name].items() if not isinstance(v, dict)})
        if options.only in (None, "step"):
            figures["step"] = share_of_a_step(Path(place) / "1M", 8)
    if options.json:
        known = json.loads(options.json.read_text())["milliseconds"] if options.json.exists() else {}
        save(options.json, {"milliseconds": known | figures})


if __name__ == "__main__":
    main()
