"""Every implementation of the head's elementwise work against the definition in float64, and Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from tests.conftest import skip_or_fail
from verl.models.head.autograd import make_kernels
from verl.models.head.elementwise import LogitGradientCoefficients, SoftmaxAccumulator

R, C = 5, 37


def block(dtype, seed=0):
    """Logits, inverse temperature or None, shift, log-sum-exp, gradients of log-prob and entropy, entropy."""
    g = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(R, C, generator=g, dtype=torch.float64)).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    inverse = torch.rand(R, 1, generator=g, dtype=torch.float64).to(wide) + 0.5
    rows = [torch.randn(R, generator=g, dtype=torch.float64).to(wide) for _ in range(4)]
    return logits, inverse if dtype == torch.bfloat16 else None, rows


def check(kind, dtype, with_entropy, tolerance):
    logits, inverse, (shift, entropy, a, b) = block(dtype)
    scale, eps = 1.0 if inverse is None else inverse.double(), torch.finfo(dtype).eps
    x = logits.double() * scale
    y = x - shift.double()[:, None]
    accumulator = SoftmaxAccumulator.zeros(shift[:, None].clone(), with_entropy)
    kernel = make_kernels(kind)
    for part, keep in ((logits[:, :20], True), (logits[:, 20:], False)):
        part_block = part.contiguous()
        exponentials = kernel.accumulate(part_block, inverse, accumulator, keep)
        if keep:
            left = (part.double() * scale - shift.double()[:, None]).exp() if exponentials else part.double()
            torch.testing.assert_close(part_block.double(), left, rtol=max(tolerance, 2.0 * eps), atol=0)
    torch.testing.assert_close(accumulator.sum_exp.double(), y.exp().sum(1, keepdim=True), rtol=tolerance, atol=0)
    if with_entropy:
        want = (y * y.exp()).sum(1, keepdim=True)
        torch.testing.assert_close(accumulator.sum_shifted_exp.double(), want, rtol=10 * tolerance, atol=tolerance)
    logsumexp = x.logsumexp(1)
    log_p = x - logsumexp[:, None]
    want = -a.double()[:, None] * log_p.exp()
    if with_entropy:
        want = want - b.double()[:, None] * log_p.exp() * (log_p + entropy.double()[:, None])
    want = want * scale
    coefficients = LogitGradientCoefficients.of(
        logsumexp.to(shift.dtype), entropy, a, b if with_entropy else None, inverse
    )
    kernel.to_gradient(logits, inverse, coefficients)
    rough = 1e-2 if dtype == torch.bfloat16 else 10 * tolerance
    torch.testing.assert_close(logits.double(), want, rtol=rough, atol=rough * 1e-2)
    again = block(dtype)[0]
    kernel.to_gradient(again, inverse, coefficients)
    assert torch.equal(again, logits), "two runs differ"


CASES = [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-6)]


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), CASES)
def test_pieces_equal_the_definition(dtype, tolerance, with_entropy, monkeypatch):
    check("torch", dtype, with_entropy, tolerance)
    monkeypatch.setattr("verl.models.head.elementwise.TILE_BYTES", 24)
    check("torch", dtype, with_entropy, tolerance)


def test_compiled_formulas_equal_the_definition(monkeypatch):
    """Through the tracer, without a code generator: that needs a compiler, and has tests of its own."""
    monkeypatch.setattr(
        "verl.models.head.elementwise.compiled", lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)
    )
    for dtype, tolerance in CASES:
        for with_entropy in (False, True):
            check("compiled", dtype, with_entropy, tolerance)


IN_THE_INTERPRETER = """
import torch
from tests.unit.models.test_head_kernels import CASES, check
from tests.head_cases import random_loss_columns, gradients_of, random_head_inputs, example_loss
from verl.models.head import triton_kernels
from verl.models.head.token_outputs import OutputHead, token_logprobs, token_loss_one_pass

triton_kernels.WIDTH = 16
for dtype, tolerance in CASES:
    for with_entropy in (False, True):
        check("triton", dtype, with_entropy, tolerance)

hidden, weight, tokens, cu_seqlens, needed = random_head_inputs()
columns, results = random_loss_columns(len(tokens)), {}
for kernels in ("torch", "triton"):
    rows, head = (hidden, tokens, cu_seqlens, needed), OutputHead(weight, 0.7, mode="fused", kernels=kernels)
    out = token_logprobs(*rows, head, with_entropy=True)
    two = gradients_of(example_loss(out, columns)[0].sum(), hidden, weight)
    loss, _, _ = token_loss_one_pass(*rows, head, example_loss, columns, with_entropy=True)
    results[kernels] = (*out.values(), *two, loss, *gradients_of(loss, hidden, weight))
for ours, theirs in zip(results["triton"], results["torch"], strict=True):
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
print("equal")
"""


def test_triton_kernels_in_its_interpreter_equal_the_definition():
    try:
        import triton  # noqa: F401
    except ImportError:
        skip_or_fail("triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_INTERPRETER], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
