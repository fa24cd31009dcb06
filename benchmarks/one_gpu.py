"""GRPO of a Qwen3-0.6B shape on one GPU: seconds and memory of each phase, and colocated asynchronous against sync.

    python benchmarks/one_gpu.py [--pairs 3] [--steps 6] [--profile] [--json benchmarks/results/one_gpu.json]

Weights are random, and so are rewards: only time and memory are measured. Answers have the lengths of a log-normal
distribution (median 410 tokens, at most 2048), 16 prompts x 8 answers a step, with log-probs of a reference; old ones
are those of the update or of the rollout. The arms take turns in one process. Their first two steps compile and warm
up, and are left out.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.jobs import stepper, unattended
from support.qwen3_shapes import model_config, random_model
from support.record import save
from support.schedule_runs import ARR, COLOCATED, Setting, overrides, prepare_data

from verl.commands.quickstart.addition_task import CHARACTERS
from verl.commands.quickstart.small_model import make_tokenizer
from verl.models.decoder.device_graphs import GraphedDecode
from verl.observe.trackers import read_metrics
from verl.plugin.platform import get_platform
from verl.workers.rollout.native.engine import NativeEngine

SETTING = Setting("one GPU", COLOCATED, 1, True, median=410, sigma=0.9, most=2048, prompts=16, n=8, lr=1e-6)
NOISE = "import random\n\n\ndef compute_score(*args, **kwargs):\n    return random.random()\n"
WARM = 2  # steps left out
CUDA = torch.device("cuda")
ARMS = {"sync": SETTING.sync(), "async": SETTING.asynchronous()}
PROFILER = f"{ARR}.actor.profiler"
SHOWN = (
    "timing_s/",
    "perf/",
    "training/off_policy/lag",
    "fully_async/",
    "rollout_probs_diff",
    "rollout_corr",
)


def prepare(folder: Path, setting: Setting, shape: str = "0.6B", device: torch.device = CUDA) -> None:
    """A Qwen3 model of `shape` with random weights, and what `prepare_data` writes."""
    tokenizer = make_tokenizer(CHARACTERS)
    config = model_config(
        shape, 40960, initializer_range=0.1, dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
    random_model(config, device, torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    prepare_data(folder, setting, NOISE)


def words(setting: Setting, folder: Path, run: str, arm: str, steps: int, more: list[str]) -> list[str]:
    """Overrides of one arm: those of `schedule.py`, with what a GPU has by default, and all passes of a step."""
    own = [
        "algorithm.rollout_correction.bypass_mode=False",
        f"{ARR}.model.enable_gradient_checkpointing=True",
        f"{ARR}.actor.use_kl_loss=True",
        f"{ARR}.actor.fsdp_config.dtype=bfloat16",
        f"{ARR}.actor.ppo_max_token_len_per_gpu=32768",
        f"{ARR}.rollout.dtype=bfloat16",
        f"{ARR}.rollout.max_num_seqs={setting.prompts * setting.n}",
        f"{ARR}.rollout.gpu_memory_utilization=0.7",
        f"{ARR}.rollout.free_cache_engine=True",
        "trainer.device=cuda",
        f"trainer.total_training_steps={steps}",
        *unattended(folder, run),
        *more,
    ]
    keys = {word.split("=")[0] for word in own}
    return [w for w in overrides(folder, setting, run, 1, ARMS[arm]) if w.split("=")[0] not in keys] + own


@contextmanager
def timed_switches() -> Iterator[dict[str, list[float]]]:
    """Seconds of each sleep, wake, publish and capture of the native engine, by name."""
    seconds: dict[str, list[float]] = {"sleep": [], "wake": [], "update_weights": [], "capture": []}
    originals = {name: getattr(NativeEngine, name) for name in ("sleep", "wake", "update_weights")}
    capture = GraphedDecode._replay

    def timed(name: str) -> Any:
        async def call(self: NativeEngine, *args: Any) -> None:
            get_platform().synchronize()
            started = time.perf_counter()
            await originals[name](self, *args)
            get_platform().synchronize()
            seconds[name].append(time.perf_counter() - started)

        return call

    def timed_capture(self: GraphedDecode, size: int, num_columns: int) -> Any:
        if (size, num_columns) in self._replays and self._addresses == self.decoder.addresses():
            return capture(self, size, num_columns)
        get_platform().synchronize()
        started = time.perf_counter()
        replay = capture(self, size, num_columns)
        get_platform().synchronize()
        seconds["capture"].append(time.perf_counter() - started)
        return replay

    for name in originals:
        setattr(NativeEngine, name, timed(name))
    GraphedDecode._replay = timed_capture  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        for name, original in originals.items():
            setattr(NativeEngine, name, original)
        GraphedDecode._replay = capture  # type: ignore[method-assign]


def run_arm(setting: Setting, folder: Path, run: str, arm: str, steps: int, more: list[str]) -> dict[str, Any]:
    """One arm in this process: seconds, tokens, metrics and switches of each step."""
    rows = []
    with timed_switches() as switches, stepper(words(setting, folder, run, arm, steps, more)) as job:
        for number in range(1, steps + 1):
            for values in switches.values():
                values.clear()
            step = job.step()
            row = {"step": number, "seconds": step.seconds, "tokens": step.tokens, "rollout": step.rollout}
            rows.append({**row, "switches": {name: list(values) for name, values in switches.items()}})
            stages = ", ".join(f"{name} {s:.2f}" for name, s in step.timing_s.items() if s > 0.01 * step.seconds)
            print(
                run, number, f"{step.seconds:.2f} s, {step.tokens / step.seconds:,.0f} tokens/s ({stages})", flush=True
            )
    for metrics in read_metrics(Path(os.environ["VERL_FILE_LOGGER_ROOT"]) / "benchmark" / f"{run}.jsonl"):
        if 1 <= metrics["step"] <= steps:
            shown = {k: v for k, v in metrics["data"].items() if any(part in k for part in SHOWN)}
            rows[metrics["step"] - 1]["metrics"] = shown
    return {"arm": arm, "rows": rows}


def summary(arms: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps after the first `WARM`, of all runs of an arm."""
    rows = [row for arm in arms for row in arm["rows"][WARM:]]
    names = sorted({name for row in rows for name in row.get("metrics", {})})
    switches = {name: statistics.median(sum(row["switches"][name]) for row in rows) for name in rows[0]["switches"]}
    return {
        "tokens_per_s": sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows),
        "step_s": statistics.median(row["seconds"] for row in rows),
        "switch_s": switches,
        "captures": statistics.median(len(row["switches"]["capture"]) for row in rows),
        "metrics": {
            name: statistics.median(row["metrics"][name] for row in rows if name in row["metrics"]) for name in names
        },
    }


def profile(folder: Path, setting: Setting) -> None:
    """Two short steps, of which the second leaves a trace of one mini-batch's update, and of all allocations."""
    for tool, more in (("torch", [f"{PROFILER}.tool_config.torch.schedule.active=1"]), ("torch_memory", [])):
        inputs = folder / tool
        inputs.mkdir()
        (inputs / "model").symlink_to(folder / "model")
        prepare_data(inputs, setting, NOISE)
        wanted = [f"{PROFILER}.enable=True", f"{PROFILER}.all_ranks=True", "global_profiler.steps=[2]"]
        run_arm(setting, inputs, tool, "sync", 2, [*wanted, f"global_profiler.tool={tool}", *more])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--most", type=int, default=SETTING.most, help="tokens of an answer; the median is a fifth")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "one_gpu.json")
    parser.add_argument("--profile", action="store_true", help="then leave profiles of short steps in outputs/profile")
    parser.add_argument("overrides", nargs="*", help="further key=value overrides of both arms")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("nothing is measured: one_gpu.py needs an NVIDIA GPU and a torch that is built for CUDA")
        return
    setting = replace(SETTING, median=args.most / 5, most=args.most)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["VERL_FILE_LOGGER_ROOT"] = str(folder / "metrics")
        prepare(folder, setting)
        arms: dict[str, list[dict[str, Any]]] = {"sync": [], "async": []}
        for pair in range(args.pairs):
            for arm in ("sync", "async") if pair % 2 == 0 else ("async", "sync"):
                arms[arm].append(run_arm(setting, folder, f"{arm}_{pair}", arm, args.steps, args.overrides))
                gc.collect()  # the next arm has the whole device
                torch.cuda.empty_cache()
                facts = {"device": torch.cuda.get_device_name(), "steps": args.steps, "left_out": WARM}
                sums = {name: summary(done) for name, done in arms.items() if done}
                save(args.json, {**facts, "summary": sums, "arms": arms})
            print(f"pairs {pair + 1}: async / sync {speed(sums, 'async') / speed(sums, 'sync'):.2f}", flush=True)
        if args.profile:
            profile(folder, replace(setting, median=100, most=100))


def speed(sums: dict[str, Any], arm: str) -> float:
    return sums[arm]["tokens_per_s"]


if __name__ == "__main__":
    main()
