"""The whole GRPO step of `one_gpu.py`, and the same work by `transformers` and TRL, on the same GPU."""

import importlib.util
import os
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from one_gpu import SETTING, prepare, run_arm, summary
from support.gpu_decode import build_engine, build_model, requests, shape_of
from support.gpu_run import Run, Skipped
from support.jobs import ARR, GRPOCase
from support.peer import Peer
from transformers import GenerationConfig


def one_gpu(run: Run) -> None:
    """Three synchronous steps as `one_gpu.py` runs them."""
    setting = replace(SETTING, median=8, most=16, prompts=2, n=2) if run.tiny else SETTING
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["VERL_FILE_LOGGER_ROOT"] = str(folder / "metrics")
        prepare(folder, setting, shape_of(run, "0.6B"), run.device)
        more = [f"trainer.device={run.device.type}"]
        if run.tiny:
            more += [f"{ARR}.actor.fsdp_config.dtype=float32", f"{ARR}.rollout.dtype=float32"]
        done = run_arm(setting, folder, "sync", "sync", 3, more)
    run.add("steps", [{"seconds": row["seconds"], "tokens": row["tokens"]} for row in done["rows"]])
    run.add("third step", summary([done]))


def peers(run: Run) -> None:
    """128 answers of 256 tokens by `generate`, by `generate_batch` and by the native engine; then a step of TRL."""
    rows, tokens = (4, 6) if run.tiny else (128, 256)
    model = build_model(run, shape_of(run, "0.6B"), tokens + 64)
    for name, way in {"native": native, "generate": generate, "generate_batch": generate_batch}.items():
        run.attempt(name, partial(way, run, model, rows, tokens), 10.0)
    del model
    run.free()
    run.attempt("trl", lambda: trl_step(run), 30.0)


def native(run: Run, model: Any, rows: int, tokens: int) -> dict[str, float]:
    engine = build_engine(run, model, rows, tokens + 16)
    engine.core.run(list(requests([4] * rows, 8)))
    return timed(run, lambda: engine.core.run(list(requests([tokens] * rows, 8))), rows * tokens)


def timed(run: Run, work: Any, tokens: int) -> dict[str, float]:
    run.synchronize()
    started = time.perf_counter()
    work()
    run.synchronize()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens_per_s": tokens / seconds}


def prompts(rows: int) -> list[list[int]]:
    return [request.prompt_ids for request in requests([1] * rows, 8)]


def sampling(tokens: int) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, min_new_tokens=tokens,
        eos_token_id=None, pad_token_id=0, use_cache=True,
    )  # fmt: skip


@torch.no_grad()
def generate(run: Run, model: Any, rows: int, tokens: int) -> dict[str, float]:
    ids = torch.tensor(prompts(rows), device=run.device)
    mask = torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, generation_config=sampling(2))
    work = lambda: model.generate(ids, attention_mask=mask, generation_config=sampling(tokens))  # noqa: E731
    return timed(run, work, rows * tokens)


@torch.no_grad()
def generate_batch(run: Run, model: Any, rows: int, tokens: int) -> dict[str, float]:
    if run.device.type != "cuda":
        raise Skipped("continuous batching of transformers needs a GPU")
    asked = prompts(rows)
    model.generate_batch(asked[:2], generation_config=sampling(2), progress_bar=False)
    work = lambda: model.generate_batch(asked, generation_config=sampling(tokens), progress_bar=False)  # noqa: E731
    return timed(run, work, rows * tokens)


def trl_step(run: Run) -> dict[str, Any]:
    """Seconds of TRL's GRPO step on 128 answers of 512 tokens, the second of two."""
    missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"{', '.join(missing)} is not installed")
    case = GRPOCase("gpu", 8 if run.tiny else 512, natural=False, prompts=2 if run.tiny else 16, device=run.device.type)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, replace(SETTING, prompts=case.prompts), shape_of(run, "0.6B"), run.device)
        run.free()
        peer = Peer(sys.executable, folder, case, torch.get_num_threads())
        try:
            steps = [peer.steps(1)[0] for _ in range(2)]
        finally:
            peer.close()
    return {"seconds": steps[-1][0], "tokens": steps[-1][1], "first_seconds": steps[0][0]}
