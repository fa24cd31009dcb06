"""What a GPU computes against float64 on the CPU: attention, head, training passes and sampled log-probs.

Each result has the error, its bound and whether it holds. An error is |got - expected| / |expected| by the Euclidean
norm, and of log-probs the largest difference in nats. Expected values come from plain formulas or `transformers` alone.
"""

import functools
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from head import Case
from support.gpu_decode import DECODE_ARMS, build_engine
from support.gpu_run import Run, Skipped
from support.gpu_update import UPDATE_ARMS, arm_of
from support.qwen3_shapes import expected_logprobs, small_model
from torch import Tensor

from verl.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching
from verl.data.trajectory import Trajectory
from verl.models.attention.packing import Packing
from verl.models.attention.prefix_sharing import PrefixPacking, attend_with_prefixes
from verl.models.attention.sequence_attention import AttentionSpec, attend_sequences
from verl.plugin.platform import get_platform
from verl.workers.engine.base import EngineRegistry
from verl.workers.rollout.base import GenerationRequest, SamplingParams

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of products and attention; bfloat16 has 8 bits
NATS = {torch.float32: 1e-4, torch.bfloat16: 0.15}
TRAINED = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of a whole model's gradient
LENGTHS = (7, 130, 33, 2, 64)
VOCABULARY = 4099


def correctness(run: Run) -> None:
    """Every kernel, a training pass of each arm and a rollout of each arm."""
    dtypes = (torch.float32,) if run.tiny else (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for what, measure in (("attention", attention), ("prefix sharing", prefix_sharing)):
            run.attempt(f"{what}, {name}", functools.partial(judged, BOUNDS[dtype], measure, run, dtype))
        for kernels in ("torch", "triton") if run.tiny else ("torch", "compiled", "triton"):
            work = functools.partial(judged, 2 * BOUNDS[dtype], head_gradients, run, dtype, kernels)
            run.attempt(f"head, {kernels}, {name}", work)
        for arm in DECODE_ARMS:
            run.attempt(f"rollout, {arm}, {name}", functools.partial(judged, NATS[dtype], rollout, run, dtype, arm))
        for arm in UPDATE_ARMS:
            work = functools.partial(judged, TRAINED[dtype], training_pass, run, dtype, arm)
            run.attempt(f"gradient, {arm}, {name}", work)


def judged(bound: float, measure: Callable[..., dict[str, float]], *args: Any) -> dict[str, Any]:
    errors = measure(*args)
    return {**errors, "bound": bound, "holds": all(error <= bound for error in errors.values())}


def apart(got: Any, expected: Any) -> float:
    return float((got.detach().cpu().double() - expected).norm() / expected.norm())


def plain_attention(qkv: Sequence[Tensor], seen: Sequence[Tensor]) -> Tensor:
    """(T, H, D) by the definition, one query after the other; `seen[t]` are the tokens that token t attends to."""
    query, key, value = qkv
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1)[0], value.repeat_interleave(groups, 1)[0]
    rows = []
    for t, tokens in enumerate(seen):
        scores = torch.einsum("hd,hsd->hs", query[0, :, t], key[:, tokens]) / query.shape[-1] ** 0.5
        rows.append(torch.einsum("hs,hsd->hd", scores.softmax(-1), value[:, tokens]))
    return torch.stack(rows)


def compare_attention(run: Run, dtype: torch.dtype, attend: Callable[..., Tensor], seen: Any) -> dict[str, float]:
    """Errors of the output and of the gradients by query, key and value."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, heads, len(seen), 64) for heads in (4, 2, 2))
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    oracle = [x.double().requires_grad_() for x in inputs]
    ours = [x.to(run.device).requires_grad_() for x in inputs]
    expected, got = plain_attention(oracle, seen), attend(*ours)[0]
    weights = torch.randn(expected.shape, generator=generator).to(dtype)
    (expected * weights.double()).sum().backward()
    (got * weights.to(run.device)).sum().backward()
    errors = {"output": apart(got, expected.detach())}
    for name, mine, right in zip(("query", "key", "value"), ours, oracle, strict=True):
        errors[name] = apart(mine.grad, right.grad)
    return errors


def attention(run: Run, dtype: torch.dtype) -> dict[str, float]:
    lengths = LENGTHS[3:] if run.tiny else LENGTHS
    packing, spec = Packing.of_lengths(lengths, run.device), AttentionSpec(None, 0.0, None, None, None)
    seen, start = [], 0
    for length in lengths:
        seen += [torch.arange(start, start + i + 1) for i in range(length)]
        start += length
    return compare_attention(run, dtype, lambda q, k, v: attend_sequences(q, k, v, packing, spec), seen)


def prefix_sharing(run: Run, dtype: torch.dtype) -> dict[str, float]:
    """Two groups of answers that share a prompt, and one sequence of its own."""
    prefixes, suffixes, others = (9, 40), ((5, 5, 17), (3, 30)), (21,)
    parts = (prefixes, [n for group in suffixes for n in group], [sum(group) for group in suffixes], others)
    longest = max(p + max(group) for p, group in zip(prefixes, suffixes, strict=True))
    boundaries = [Packing.of_lengths(part, run.device) for part in parts]
    packing = PrefixPacking(boundaries[0], boundaries[1], boundaries[2], boundaries[3], longest)
    spec, seen, starts, start = AttentionSpec(None, 0.0, None, None, None), list[Tensor](), list[int](), 0
    for length in prefixes:
        starts.append(start)
        seen += [torch.arange(start, start + i + 1) for i in range(length)]
        start += length
    for first, prefix, group in zip(starts, prefixes, suffixes, strict=True):
        shared = torch.arange(first, first + prefix)
        for length in group:
            seen += [torch.cat([shared, torch.arange(start, start + i + 1)]) for i in range(length)]
            start += length
    for length in others:
        seen += [torch.arange(start, start + i + 1) for i in range(length)]
        start += length
    return compare_attention(run, dtype, lambda q, k, v: attend_with_prefixes(q, k, v, packing, spec), seen)


def head_gradients(run: Run, dtype: torch.dtype, kernels: str) -> dict[str, float]:
    """Gradients of log-prob and entropy against autograd of a float64 softmax."""
    if kernels == "triton" and not get_platform().compiles_triton():
        raise Skipped("Triton has no compiler for this device")
    tokens = 20 if run.tiny else 900
    case = Case(VOCABULARY, 64, tokens, True, dtype, run.device)
    case.run("one pass", kernels=kernels)
    hidden, weight = (x.detach().cpu().double().requires_grad_() for x in (case.hidden_TD, case.weight_VD))
    logprobs = (hidden[:-1] @ weight.T).log_softmax(-1)
    chosen = logprobs.gather(1, case.where[0].cpu()[1:, None])[:, 0]
    entropy, w = -(logprobs.exp() * logprobs).sum(1), case.columns["w"].cpu().double()[1:]
    (-w * chosen - 0.01 * w * entropy).sum().backward()
    return {"hidden": apart(case.hidden_TD.grad, hidden.grad), "weight": apart(case.weight_VD.grad, weight.grad)}


def rollout(run: Run, dtype: torch.dtype, arm: str) -> dict[str, float]:
    """The largest difference of a sampled token's log-prob from the model's, over ragged prompts and answers."""
    lengths, tokens = ([5, 3], 6) if run.tiny else ([5, 40, 17, 3], 280)
    with DECODE_ARMS[arm]():
        model: Any = small_model()
        oracle = small_model()
        for parameter in oracle.parameters():
            parameter.data = parameter.data.to(dtype).float()
        engine = build_engine(run, model.to(run.device), 12, 400, dtype)
        asked = [
            GenerationRequest(i, list(range(2 + i, 2 + i + n)), SamplingParams(max_tokens=tokens * (5 - i) // 5, n=4))
            for i, n in enumerate(lengths)
        ]
        done = engine.core.run(asked, ())
    largest = 0.0
    for request, samples in zip(asked, done, strict=True):
        for sample in samples[:2]:
            expected = expected_logprobs(oracle, request.prompt_ids + sample.token_ids)[len(request.prompt_ids) - 1 :]
            difference = torch.tensor(sample.logprobs, dtype=torch.float64) - expected
            largest = max(largest, float(difference.abs().max()))
    return {"nats": largest}


class _WeightedLogProbs:
    """The loss sum of -w log p, as an engine takes it."""

    outputs, columns, optional_columns, per_token = ("logprobs",), ("loss_weights",), (), True

    def __call__(self, outputs: dict[str, Tensor], columns: dict[str, Tensor], _: Tensor | None = None) -> Any:
        return -columns["loss_weights"] * outputs["logprobs"], {}


def training_pass(run: Run, dtype: torch.dtype, arm: str) -> dict[str, float]:
    """Log-probs, and the gradient of their weighted sum by all parameters."""
    generator, oracle = torch.Generator().manual_seed(0), small_model().double()
    rows = [torch.randint(2, VOCABULARY, (n,), generator=generator) for n in (LENGTHS[3:4] if run.tiny else LENGTHS)]
    batch = Batch.pack(
        [Trajectory(ids, torch.arange(len(ids)) > 0, torch.zeros(len(ids)), group_id=0, reward=0.0) for ids in rows]
    )
    batch = batch.with_columns(loss_weights=torch.rand(batch.num_tokens, generator=generator) * batch["loss_mask"])
    with tempfile.TemporaryDirectory() as folder, arm_of(run, UPDATE_ARMS[arm]) as keys:
        small_model().save_pretrained(folder)
        engine: Any = EngineRegistry.new(
            "language_model",
            "fsdp2",
            HFModelConfig(path=folder, **keys),
            FSDPEngineConfig(model_dtype="fp32", dtype="fp32" if dtype == torch.float32 else "bf16"),
            FSDPOptimizerConfig(lr=1e-6),
        )
        engine.initialize()
        result = engine.forward_backward(batch, _WeightedLogProbs(), MicroBatching())
    expected = torch.zeros(batch.num_tokens, dtype=torch.float64)
    total, weights = torch.zeros((), dtype=torch.float64), batch["loss_weights"].double()
    for ids, start in zip(rows, batch.cu_seqlens.tolist(), strict=False):
        logprobs = oracle(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        expected[start + 1 : start + len(ids)] = logprobs.detach()
        total = total - (weights[start + 1 : start + len(ids)] * logprobs).sum()
    total.backward()
    right = {name: p.grad for name, p in oracle.named_parameters()}
    ours = {name: gradient.cpu().double() for name, gradient in engine.weights.full_gradients()}
    if set(ours) - set(right):
        raise RuntimeError(f"gradients of other parameters: {sorted(set(ours) - set(right))[:3]}")
    pairs = [(ours[name].flatten(), right[name].flatten()) for name in ours]
    return {
        "gradient": apart(*(torch.cat(part) for part in zip(*pairs, strict=True))),
        "logprobs": apart(result.outputs["logprobs"], expected),
    }
