"""Decoding on one GPU: which kernels a step runs, its share of the roofline, and the rollout of `one_gpu.py`.

All of it drives the native engine's own loop, so a step includes sampling and what the host does for it. The floor of
a step is the time to read the weights once (or to multiply by them, if that is longer) and the keys and values of all
rows, at the ceilings of the same run.
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from one_gpu import SETTING
from support.gpu_run import Run
from support.qwen3_shapes import model_config, random_model
from transformers import Qwen3ForCausalLM

from verl.config.rollout import RolloutConfig
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import NativeEngine

Arm = Callable[[], contextlib.AbstractContextManager[Any]]
BASELINE = "now"
DECODE_ARMS: dict[str, Arm] = {BASELINE: contextlib.nullcontext}  # the last one is the best
LATER = ("S1", "S2", "S3", "S4")
WARM_STEPS, TOP_KERNELS = 4, 15
ATTENTION = ("flash", "fmha", "attention", "splitkv", "split_kv")


def shape_of(run: Run, name: str) -> str:
    return "tiny" if run.tiny else name


def build_model(run: Run, name: str, longest: int) -> Qwen3ForCausalLM:
    return random_model(model_config(name, longest, initializer_range=0.1), run.device, run.dtype)


def build_engine(
    run: Run, model: Qwen3ForCausalLM, rows: int, longest: int, dtype: torch.dtype | None = None
) -> NativeEngine:
    config = RolloutConfig(
        dtype=str(dtype or run.dtype).removeprefix("torch."),
        prompt_length=longest // 2,
        response_length=longest - longest // 2,
        max_num_seqs=rows,
        gpu_memory_utilization=0.9,
    )
    return NativeEngine(config, model, device=run.device, eos_token_ids=())


class Decoding:
    """Rows of one context that decode until they are aborted."""

    def __init__(self, engine: NativeEngine, rows: int, context: int, steps: int):
        self.core, self.rows, self.context = engine.core, rows, context
        prompt = [3 + i % 97 for i in range(context)]
        params = SamplingParams(max_tokens=steps + 2, n=rows, ignore_eos=True)
        self.core.submit(GenerationRequest(0, prompt, params), ())

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.core.step()
        assert self.core.table is not None and self.core.table.count == self.rows, "a row ended before its time"

    def end(self) -> None:
        self.core.abort()


def step_seconds(run: Run, engine: NativeEngine, rows: int, context: int, count: int) -> float:
    """Seconds of one step, of `count` that are waited for together."""
    decoding = Decoding(engine, rows, context, WARM_STEPS + count)
    try:
        decoding.steps(WARM_STEPS)
        run.synchronize()
        started = time.perf_counter()
        decoding.steps(count)
        run.synchronize()
        return (time.perf_counter() - started) / count
    finally:
        decoding.end()


def floor_seconds(run: Run, engine: NativeEngine, rows: int, cached_tokens: float) -> float:
    """The least time of a step of `rows` rows that reads the keys and values of `cached_tokens` tokens."""
    parameters = list(engine.model.parameters())
    read = sum(p.nbytes for p in parameters) / run.ceiling("bytes_per_s")
    multiplied = 2 * rows * sum(p.numel() for p in parameters) / run.ceiling("flops")
    return max(read, multiplied) + cached_tokens * engine.decoder.bytes_per_token() / run.ceiling("bytes_per_s")


def one_decode(run: Run, engine: NativeEngine, rows: int, context: int, count: int) -> dict[str, float]:
    seconds = step_seconds(run, engine, rows, context, count)
    middle = context + WARM_STEPS + count / 2
    floor = floor_seconds(run, engine, rows, rows * middle)
    return {"ms": 1e3 * seconds, "floor_ms": 1e3 * floor, "share": floor / seconds, "tokens_per_s": rows / seconds}


# --- first numbers ----------------------------------------------------------------------------------------------------


def profile(run: Run) -> None:
    """Five steps under the profiler: kernels a step, the busy share of the device, attention's share, top kernels."""
    cases = [(2, 8)] if run.tiny else [(r, c) for c in (256, 2048) for r in (128, 32, 8, 1)]
    longest = max(context for _, context in cases) + 64
    model = build_model(run, shape_of(run, "0.6B"), longest)
    for name, arm in DECODE_ARMS.items():
        with arm():
            engine = build_engine(run, model, max(rows for rows, _ in cases), longest)
            for rows, context in cases:
                label = f"{name}, {rows} rows, context {context}"
                run.attempt(label, partial(profiled_steps, run, engine, rows, context))
            del engine
            run.free()


def profiled_steps(run: Run, engine: NativeEngine, rows: int, context: int, count: int = 5) -> dict[str, Any]:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    on_gpu = run.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    plain_s = step_seconds(run, engine, rows, context, 20)
    decoding = Decoding(engine, rows, context, WARM_STEPS + 2 * count)
    try:
        decoding.steps(WARM_STEPS)
        run.synchronize()
        with torch.profiler.profile(activities=activities) as profiler:
            started = time.perf_counter()
            decoding.steps(count)
            run.synchronize()
            seconds = (time.perf_counter() - started) / count
    finally:
        decoding.end()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    kernels = [e for e in profiler.key_averages() if e.device_type == wanted and not e.is_user_annotation]
    times = {e.key: (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / count / 1e3 for e in kernels}
    busy = sum(times.values())
    attention = sum(ms for key, ms in times.items() if any(word in key.lower() for word in ATTENTION))
    top = sorted(kernels, key=lambda e: -times[e.key])[:TOP_KERNELS]
    return {
        "kernels_a_step": sum(e.count for e in kernels) / count,
        "ms": 1e3 * plain_s,
        "profiled_ms": 1e3 * seconds,
        "device_ms": busy,
        "busy_share": busy / (1e3 * plain_s),
        "attention_share": attention / max(busy, 1e-9),
        "top": [{"kernel": e.key[:110], "a_step": e.count / count, "ms": round(times[e.key], 4)} for e in top],
    }


# --- ablation ---------------------------------------------------------------------------------------------------------


def decode(run: Run) -> None:
    """A step of each arm, at several numbers of rows and contexts, against the roofline."""
    rows_of, contexts = ((1, 3), (8, 12)) if run.tiny else ((1, 8, 32, 128), (256, 1024, 2048))
    count = 3 if run.tiny else 30
    longest = max(contexts) + WARM_STEPS + count + 16
    for name in LATER:
        if name not in DECODE_ARMS:
            run.add(name, {"skipped": "this tree has no such arm"})
    model = build_model(run, shape_of(run, "0.6B"), longest)
    for name, arm in DECODE_ARMS.items():
        with arm():
            engine = build_engine(run, model, max(rows_of), longest)
            for context in contexts:
                for rows in rows_of:
                    label = f"{name}, {rows} rows, context {context}"
                    run.attempt(label, partial(one_decode, run, engine, rows, context, count), 1.0)
            del engine
            run.free()


# --- rollout ----------------------------------------------------------------------------------------------------------


def rollout(run: Run) -> None:
    """The rollout of `one_gpu.py`, baseline and best arm in turns; then a step of larger models."""
    setting = replace(SETTING, median=8, most=24, prompts=2, n=2) if run.tiny else SETTING
    lengths = [length for prompt in setting.lengths()[: setting.prompts] for length in prompt]
    best = list(DECODE_ARMS)[-1]
    in_turns(run, best, shape_of(run, "0.6B"), lengths)
    for name, rows, context in (("1.7B", 128, 1024), ("1.7B", 64, 1024), ("4B", 64, 1024)):
        rows, context = (2, 8) if run.tiny else (rows, context)
        label = f"{best}, {name}, {rows} rows, context {context}"
        run.attempt(label, partial(larger_model, run, best, name, rows, context), 3.0)


def in_turns(run: Run, best: str, shape: str, lengths: list[int]) -> None:
    model, last_s = build_model(run, shape, max(lengths) + 64), 0.0
    for turn in range(2):
        for name in dict.fromkeys((BASELINE, best)):
            work = partial(one_rollout, run, DECODE_ARMS[name], model, lengths)
            value = run.attempt(f"{name}, turn {turn + 1}", work, 1.3 * last_s)
            last_s = value["seconds"] if value else last_s


def larger_model(run: Run, arm: str, name: str, rows: int, context: int) -> dict[str, float]:
    longest = context + 64
    model = build_model(run, shape_of(run, name), longest)
    with DECODE_ARMS[arm]():
        return one_decode(run, build_engine(run, model, rows, longest), rows, context, 3 if run.tiny else 30)


def one_rollout(run: Run, arm: Arm, model: Qwen3ForCausalLM, lengths: list[int]) -> dict[str, float]:
    """Seconds to sample answers of these lengths to prompts of 8 tokens, and what the roofline allows."""
    prompt = 8
    with arm():
        engine = build_engine(run, model, len(lengths), max(lengths) + prompt)
        engine.core.run(list(requests([4] * len(lengths), prompt)))
        run.synchronize()
        started = time.perf_counter()
        done = engine.core.run(list(requests(lengths, prompt)))
        run.synchronize()
        seconds = time.perf_counter() - started
        if [len(samples[0].token_ids) for samples in done] != lengths:
            raise RuntimeError("the answers do not have the lengths that were asked for")
        floor = sum(
            floor_seconds(run, engine, len(rows), sum(prompt + step for _ in rows))
            for step in range(1, max(lengths))
            if (rows := [length for length in lengths if length > step])
        )
    tokens = sum(lengths)
    return {"seconds": seconds, "floor_s": floor, "share": floor / seconds, "tokens_per_s": tokens / seconds}


def requests(lengths: Iterable[int], prompt: int) -> Iterable[GenerationRequest]:
    for number, length in enumerate(lengths):
        ids = [3 + (number + i) % 97 for i in range(prompt)]
        yield GenerationRequest(number, ids, SamplingParams(max_tokens=length, ignore_eos=True))
