"""Training on one GPU: an update on packs of 16k and 32k tokens, arm by arm, and the head against Liger's.

MFU counts the products that an update needs, without recomputation, against the vendor's number and against the large
product that the same run measured.
"""

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from head import Case
from prefix_sharing import one_group
from support.gpu_run import Run, Skipped
from support.qwen3_shapes import SHAPES, model_config
from transformers.models.qwen3 import modeling_qwen3

from verl.algorithms.aggregation import loss_weights
from verl.algorithms.losses import make_actor_loss
from verl.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching
from verl.data.trajectory import Trajectory
from verl.models.flops import peak_flops
from verl.models.load import load_causal_lm
from verl.plugin.platform import get_platform
from verl.workers.engine.base import EngineRegistry

NO_RECOMPUTATION = {"enable_gradient_checkpointing": False}
UPDATE_ARMS: dict[str, dict[str, Any]] = {
    "eager": {"compile_layers": "off"},
    "compiled": {"compile_layers": "inductor"},
    "compiled, without recomputation": {"compile_layers": "inductor", **NO_RECOMPUTATION},
    "without recomputation": {"compile_layers": "off", **NO_RECOMPUTATION},
    "liger": {"compile_layers": "off", "use_liger": True},
}
PROMPT = 8


def build_engine(run: Run, name: str, longest: int, **model_keys: Any) -> Any:
    """A training engine whose random weights are drawn on the device."""
    with tempfile.TemporaryDirectory() as folder:
        model_config(name, longest, initializer_range=0.1).save_pretrained(folder)
        engine: Any = EngineRegistry.new(
            "language_model",
            "fsdp2",
            HFModelConfig(path=folder, **{"enable_gradient_checkpointing": True, **model_keys}),
            FSDPEngineConfig(model_dtype="fp32", dtype="fp32" if run.device.type == "cpu" else "bf16"),
            FSDPOptimizerConfig(lr=1e-6),
        )

        def drawn_on_device(path: str, dtype: torch.dtype, config: Any, *_: Any, **__: Any) -> Any:
            with torch.device(run.device):
                return load_causal_lm(path, dtype, config, init_random=True)

        engine.load_model = drawn_on_device
        engine.initialize()
    return engine


def answers(vocabulary: int, tokens: int, longest: int) -> Batch:
    """Answers of the lengths of `one_gpu.py` to prompts of 8 tokens, `tokens` in all."""
    draws, lengths = random.Random(0), list[int]()
    while sum(lengths) + (PROMPT + 1) <= tokens:
        length = PROMPT + max(1, min(longest, round(draws.lognormvariate(6.0, 0.9))))
        lengths.append(min(length, tokens - sum(lengths)))
    generator = torch.Generator().manual_seed(0)
    rows = []
    for group, length in enumerate(lengths):
        ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        old = [-4.0] * (length - PROMPT)
        rows.append(Trajectory.from_completion(ids[:PROMPT], ids[PROMPT:], old, group_id=group))
    batch = Batch.pack(rows)
    old_logprobs = torch.full((batch.num_tokens,), -4.0) * batch["loss_mask"]
    batch = batch.with_columns(old_logprobs=old_logprobs, advantages=torch.randn(batch.num_tokens, generator=generator))
    return batch.with_columns(loss_weights=loss_weights(batch, "token-mean"))


def update(run: Run) -> None:
    """Every arm on a pack of 16k and of 32k tokens, then shared prompts of 1k; 0.6B first, then 1.7B at 16k."""
    small, large, longest, group = (96, 192, 24, (16, 8, 2)) if run.tiny else (16384, 32768, 2048, (1024, 1024, 8))
    for name, packs in (("0.6B", (small, large)), ("1.7B", (small,))):
        shape = "tiny" if run.tiny else name
        batches = {f"{pack} tokens": answers(SHAPES[shape][-1], pack, longest) for pack in packs}
        for arm, keys in UPDATE_ARMS.items():
            run.attempt(f"{name}, {arm}", partial(update_arm, run, shape, keys, batches), 5.0)
        if name == "0.6B":
            run.attempt(f"{name}, shared prompts", partial(shared_prompts, run, shape, group), 5.0)


def update_arm(run: Run, shape: str, keys: dict[str, Any], batches: dict[str, Batch]) -> dict[str, Any]:
    longest = max(int(batch.lengths.max()) for batch in batches.values())
    with arm_of(run, keys) as keys:
        engine = build_engine(run, shape, longest, **keys)
        out = {name: measured(run, engine, batch, MicroBatching()) for name, batch in batches.items()}
        return {**out, "reference pass": reference_pass(run, engine, next(iter(batches.values())))}


@contextlib.contextmanager
def arm_of(run: Run, keys: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The arm's keys here, where what an earlier arm compiled is forgotten, and Liger's functions leave in the end."""
    torch._dynamo.reset()
    if run.device.type == "cpu" and keys["compile_layers"] == "inductor":
        keys = {**keys, "compile_layers": "aot_eager"}  # traced; code for a CPU takes a minute
    if keys.get("use_liger"):
        liger_or_skip(run)
    before = dict(vars(modeling_qwen3))
    try:
        yield keys
    finally:
        vars(modeling_qwen3).update(before)


def shared_prompts(run: Run, shape: str, group: tuple[int, int, int]) -> dict[str, Any]:
    engine = build_engine(run, shape, group[0] + group[1])
    batch, out = one_group(SHAPES[shape][-1], *group), {}
    for label, share in (("not shared", False), ("shared", True)):
        out[label] = measured(run, engine, batch, MicroBatching(share_prefixes=share))
    return {**out, "speed_up": out["not shared"]["ms"] / out["shared"]["ms"]}


def measured(run: Run, engine: Any, batch: Batch, micro: MicroBatching) -> dict[str, Any]:
    """Forward and backward of a batch, three times after two that warm up; the optimiser step apart."""
    loss, restarts = make_actor_loss(ActorConfig()), 0.0

    def work() -> None:
        nonlocal restarts
        engine.weights.zero_grad()
        done = engine.forward_backward(batch, loss, micro)
        restarts = max(restarts, done.metrics.values().get("out_of_memory_restarts", 0.0))

    first_s = run.seconds(work, 1, warm=0)  # compiles, finds the kernels
    engine.optim_step()
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = run.seconds(work, 3)
    flops = engine.flops.update(batch.lengths.tolist(), int(batch["loss_mask"].sum()))
    out = {"ms": 1e3 * seconds, "first_s": first_s, "tokens": batch.num_tokens, **speeds(run, flops, seconds)}
    if run.device.type == "cuda":
        out["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    if engine.layer_graphs is not None:
        out["layer_graphs"] = engine.layer_graphs.count
    out["optimizer_ms"] = 1e3 * run.seconds(engine.optim_step, 1, warm=0)
    if restarts:
        out["out_of_memory_restarts"] = restarts  # it ran in smaller pieces: compare with no other arm
    return out


def reference_pass(run: Run, engine: Any, batch: Batch) -> dict[str, float]:
    seconds = run.seconds(lambda: engine.forward(batch, ("logprobs",), MicroBatching()), 3, warm=2)
    flops = engine.flops.forward(batch.lengths.tolist(), int(batch["loss_mask"].sum()))
    return {"ms": 1e3 * seconds, **speeds(run, flops, seconds)}


def speeds(run: Run, flops: float, seconds: float) -> dict[str, float]:
    """FLOP/s, and on a GPU their share of the vendor's number and of what this run's large product reached."""
    reached = flops / seconds
    if run.device.type != "cuda":
        return {"tflops": reached / 1e12}
    nominal, measured = peak_flops(run.device, run.dtype), run.ceiling("flops")
    return {"tflops": reached / 1e12, "mfu": reached / nominal, "mfu_of_measured": reached / measured}


def liger_or_skip(run: Run) -> None:
    if not get_platform().compiles_triton():
        raise Skipped("Liger's kernels need a GPU that Triton compiles for")
    if find_spec("liger_kernel") is None:
        raise Skipped("liger-kernel is not installed")


# --- head -------------------------------------------------------------------------------------------------------------


def head(run: Run) -> None:
    """The one-pass head on 16k tokens at D 1024 and 4096, with and without entropy, against Liger's fused loss."""
    tokens, vocabulary, sizes = (24, 300, (16, 32)) if run.tiny else (16384, 151936, (1024, 4096))
    for size in sizes:
        head_of(run, Case(vocabulary, size, tokens, False, run.dtype, run.device))
        run.free()


def head_of(run: Run, case: Case) -> None:
    size = case.hidden_TD.shape[1]
    run.attempt(f"D {size}, three plain products", partial(ms, run, partial(plain_products, case)), 2.0)
    for kernels in ("torch", "triton") if run.tiny else ("torch", "compiled", "triton"):
        for entropy in (False, True):
            label = f"D {size}, {kernels}{', entropy' * entropy}"
            run.attempt(label, partial(one_pass, run, case, kernels, entropy), 2.0)
    run.attempt(f"D {size}, liger", lambda: ms(run, liger_loss(run, case)), 2.0)


def ms(run: Run, work: Callable[[], Any]) -> dict[str, float]:
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    out = {"ms": 1e3 * run.seconds(work, 3, warm=2)}
    if run.device.type == "cuda":
        out["extra_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
    return out


def one_pass(run: Run, case: Case, kernels: str, entropy: bool) -> dict[str, float]:
    if kernels == "triton" and not get_platform().compiles_triton():
        raise Skipped("Triton has no compiler for this device")
    case.with_entropy = entropy
    return ms(run, lambda: case.run("one pass", kernels=kernels))


@torch.no_grad()
def plain_products(case: Case) -> None:
    logits = case.hidden_TD @ case.weight_VD.T
    logits @ case.weight_VD
    logits.T @ case.hidden_TD


def liger_loss(run: Run, case: Case) -> Callable[[], None]:
    liger_or_skip(run)
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused, targets = LigerFusedLinearCrossEntropyLoss(), case.where[0]

    def work() -> None:
        case.hidden_TD.grad = case.weight_VD.grad = None
        fused(case.weight_VD, case.hidden_TD, targets).backward()

    return work
