"""Time of a publish: in this process, and to a server over each transport, against moving only the bytes.

    python benchmarks/weight_sync.py --json benchmarks/results/weight_sync.json      # with vLLM installed

`publish`: until the server samples from the new version, with fingerprints on both sides, without a probe. `move`: the
same bytes over the same transport between two processes without other work. `reload`: the engine's own work, in the
server and in the same publish; `read_back`: its check that the layers compute with what arrived. Publishes and moves
run in turns; medians.
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
from support.jobs import ARR, EQUAL, grpo_overrides, prepare_1m, stepper
from support.record import save
from support.reload_clock import milliseconds_of_update
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verl.checkpoint_engine.endpoint import TransportEndpoint, TransportSettings
from verl.config.rollout import RolloutConfig, ServerConfig
from verl.models.fingerprint import fingerprint
from verl.runtime.driver_loop import DriverLoop
from verl.runtime.inline import InlineGroup
from verl.weight_sync.copy_sync import CopySync
from verl.weight_sync.weight_transfer import WeightTransfer
from verl.workers.engine_worker import EngineWorker
from verl.workers.rollout.base import ReadBack
from verl.workers.rollout.remote.engine import RemoteEngine
from verl.workers.rollout.vllm.engine import VLLMEngine

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


class WeightsRank(EngineWorker):
    """A trainer's rank that has only weights."""

    def __init__(self, weights: Callable[[], Iterable[tuple[str, Tensor]]]):
        self.endpoint, self.engine = TransportEndpoint(), SimpleNamespace(rank=0, export_weights=weights)


def sink(pipe: Any) -> None:
    """Main function of a process that receives weights and discards them."""
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
    """Transfers the bytes of the weights from this process to sinks."""

    def __init__(self, settings: TransportSettings, sinks: int = 1):
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for _ in range(sinks):
            pipe, sink_pipe = context.Pipe()
            self.pipes.append(pipe)
            self.processes.append(context.Process(target=sink, args=(sink_pipe,), daemon=True))
            self.processes[-1].start()
        transport: Any = settings.transport()
        self.transport = transport(bucket_size=settings.bucket_bytes, **settings.arguments)
        addresses = [self.transport.prepare(), *self.call("open", settings)]
        sender, receivers = transport.build_topology(1, sinks, addresses)
        for number, pipe in enumerate(self.pipes):
            pipe.send(("connect", {name: value[number] for name, value in receivers.items()}))
        self.transport.init_process_group(**{name: value[0] for name, value in sender.items()})
        self.answers()

    def call(self, *message: Any) -> list[Any]:
        self.send(*message)
        return self.answers()

    def send(self, *message: Any) -> None:
        for pipe in self.pipes:
            pipe.send(message)

    def answers(self) -> list[Any]:
        return [pipe.recv() for pipe in self.pipes]

    def move(self, weights: list[tuple[str, Tensor]], version: int) -> None:
        if not self.transport.sends_first:
            self.send("receive", version)
        asyncio.run(self.transport.send_weights(iter(weights), version))
        if self.transport.sends_first:
            self.send("receive", version)
        self.answers()

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join()
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
    in_process = CopySync(lambda: weights, engine, None, 0)
    seconds: dict[str, list[float]] = {"in process": [], "reload": [], "fingerprints": []}

    async def reload() -> None:  # without the receipt: neither fingerprints nor reading back
        await engine.begin_update()
        read_nothing = {"record": lambda *of: None, "compare_and_reset": lambda reader: ReadBack(0)}
        with (
            patch("verl.workers.rollout.vllm.worker.fingerprint", lambda tensor: ""),
            patch.multiple("verl.workers.rollout.vllm.weight_readback.WeightReader", **read_nothing),
        ):
            await engine.load_bucket(weights)
            await engine.finish_update(0)

    for number in range(rounds + 1):
        run = {
            "in process": milliseconds(partial(runner.run, in_process.publish(number))),
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
    server.wait_until_ready()
    for backend in BACKENDS:
        arguments = {"folder": str(folder / "shared")} if backend == "file" else {}
        settings = TransportSettings(backend, 1 << 30, arguments, "support.reload_clock")
        transfer, mover = WeightTransfer(settings, InlineGroup(WeightsRank(lambda: weights)), server), Mover(settings)
        sync = CopySync(lambda: [], server, None, 0, transfer)
        publishes, moves, updates = [], [], []
        for number in range(rounds + 2):
            moves.append(milliseconds(partial(mover.move, weights, number)))
            publishes.append(milliseconds(partial(runner.run, sync.publish(number))))
            updates.append(milliseconds_of_update(reloads_file))
        publish, move = (statistics.median(values[2:]) for values in (publishes, moves))
        parts = {name: statistics.median(update[name] for update in updates[2:]) for name in ("reload", "read_back")}
        share = (publish - parts["reload"]) / move
        moving = (publish - parts["reload"] - parts["read_back"]) / move
        figures[backend] = {"publish": publish, **parts, "move": move, "share": share, "without_read_back": moving}
        print(
            f"  {backend:6} publish {publish:.1f} ms, reload {parts['reload']:.1f}, "
            f"read back {parts['read_back']:.1f}, move {move:.1f}: {share:.2f} of it, without reading back {moving:.2f}"
        )
        mover.close()
        runner.run(transfer._close())
    server.close()
    return figures


def share_of_a_step(folder: Path, steps: int) -> dict[str, float]:
    """The receipt's share of a GRPO step of the 1M model on vLLM in this process, with the default `probe_every`."""
    rollout = f"{ARR}.rollout"
    job = [
        *grpo_overrides(folder, EQUAL), f"{rollout}.name=vllm", f"{rollout}.enforce_eager=True",
        f"{rollout}.kv_cache_bytes=67108864", f"{rollout}.max_num_seqs=128",
    ]  # fmt: skip
    with stepper(job) as run:
        seconds = [run.step().seconds for _ in range(steps)][1:]
        sync: Any = run.run.trainer.weight_sync
        weights = list(sync.weights())
        prints = milliseconds(lambda: [fingerprint(tensor) for _ in range(2) for _, tensor in weights])
        loop = run.run.trainer.loop
        probes = [milliseconds(partial(loop.run, sync.probe.check(sync.engine.replicas, 0))) for _ in range(5)]
        step, probe = 1000 * statistics.median(seconds), statistics.median(probes)
        read_back = statistics.median(time_of_read_back(sync, loop) for _ in range(5))
    share = (prints + read_back + probe / sync.probe_every) / step
    figures = {"step": step, "fingerprints": prints, "read_back": read_back, "probe": probe, "every": sync.probe_every}
    print({name: round(value, 1) for name, value in figures.items()}, f"{share:.2%}")
    return figures | {"share": share}


def time_of_read_back(sync: CopySync, loop: DriverLoop) -> float:
    """Milliseconds of one publish in which the layers are read back and what they should hold is noted."""
    from verl.workers.rollout.vllm.weight_readback import WeightReader

    spent: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args)
            finally:
                spent.append(1000 * (time.perf_counter() - begin))

        return call

    with patch.multiple(
        WeightReader, compare_and_reset=timed(WeightReader.compare_and_reset), record=timed(WeightReader.record)
    ):
        loop.run(sync.engine.update_weights(sync.weights(), 0))
    return sum(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=("1M", "30M", "step"))
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as root:
        os.environ["VERL_FILE_LOGGER_ROOT"] = root
        for name, make in (("1M", prepare_1m), ("30M", make_30m)):
            folder = Path(root) / name
            make(folder)
            if options.only in (None, name):
                model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
                figures[name] = measure(model, folder, options.rounds, runner)
                print(name, {k: v for k, v in figures[name].items() if not isinstance(v, dict)})
        if options.only in (None, "step"):
            figures["step"] = share_of_a_step(Path(root) / "1M", 8)
    if options.json:
        known = json.loads(options.json.read_text())["milliseconds"] if options.json.exists() else {}
        save(options.json, {"milliseconds": known | figures})


if __name__ == "__main__":
    main()
