"""Log-probs at given ids and the most likely tokens from the head, against a softmax over all logits in float64."""

import os
import subprocess
import sys

import pytest
import torch

from tests.head_cases import D, V, random_head_inputs
from verl.models.head.chosen_tokens import TopLogits
from verl.models.head.token_outputs import OutputHead, token_logprobs, token_top

K = 5


def all_logprobs(hidden, weight, cu_seqlens, needed, temperature, bias=None):
    """(T, V) token by token, 0 in rows that are not needed."""
    rows = [hidden.new_zeros(len(weight))] * len(hidden)
    temperature = torch.as_tensor(temperature, dtype=hidden.dtype).expand(len(hidden))
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for t in range(start + 1, end):
            if needed[t]:
                logits = weight @ hidden[t - 1] + (0 if bias is None else bias)
                rows[t] = torch.log_softmax(logits / temperature[t], 0)
    return torch.stack(rows)


def random_ids(tokens, seed=3):
    """K distinct ids a row; the token itself is among them in about every second row."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(V, generator=g)[:K] for _ in tokens])
    for t in range(0, len(tokens), 2):
        if tokens[t] not in ids[t]:
            ids[t, t % K] = tokens[t]
    return ids


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "column"])
@pytest.mark.parametrize(("mode", "chunk"), [("eager", None), ("chunked", 3), ("chunked", None), ("fused", 4)])
def test_value_and_gradient_equal_the_softmax_in_float64(mode, chunk, temperature, with_bias):
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs()
    if temperature == "column":
        temperature = torch.linspace(0.5, 2.0, len(tokens), dtype=torch.float64)
    bias = torch.linspace(-1, 1, V, dtype=torch.float64).requires_grad_() if with_bias else None
    ids = random_ids(tokens)
    out = token_logprobs(
        hidden,
        tokens,
        cu_seqlens,
        needed,
        OutputHead(weight, temperature, bias=bias, mode=mode, chunk_size=chunk),
        with_entropy=True,
        ids_Tk=ids,
    )
    whole = all_logprobs(hidden, weight, cu_seqlens, needed, temperature, bias)
    used = whole.any(1, keepdim=True)
    expected = {
        "logprobs_at_ids": whole.gather(1, ids),
        "logprobs": whole.gather(1, tokens[:, None])[:, 0],
        "entropy": -(whole.exp() * whole * used).sum(1),
    }
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    g = torch.Generator().manual_seed(5)
    factors = {name: torch.randn(x.shape, generator=g, dtype=torch.float64) for name, x in expected.items()}
    for names in (["logprobs_at_ids"], ["logprobs_at_ids", "logprobs"], [*expected], ["logprobs"]):
        for name in names:
            torch.testing.assert_close(out[name], expected[name], rtol=1e-10, atol=1e-12)
        ours, theirs = (
            torch.autograd.grad(sum((x[n] * factors[n]).sum() for n in names), inputs, retain_graph=True)
            for x in (out, expected)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_and_large_logits_stay_close_to_float64(dtype, scale):
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs(dtype)
    hidden = (hidden * scale).detach().requires_grad_()
    ids = random_ids(tokens)
    out = token_logprobs(
        hidden, tokens, cu_seqlens, needed, OutputHead(weight, 0.7, mode="chunked", chunk_size=3), ids_Tk=ids
    )["logprobs_at_ids"]
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = all_logprobs(*wide, cu_seqlens, needed, 0.7).gather(1, ids)
    loose = dtype == torch.bfloat16
    close = 5e-2 if loose else 1e-5
    torch.testing.assert_close(out.double(), expected, rtol=close, atol=scale * close)
    if loose and scale > 1:
        return  # rounded logits of this size give another distribution
    sources = ((out, hidden), (expected, wide[0]))
    ours, theirs = (torch.autograd.grad(x.exp().sum(), source)[0] for x, source in sources)
    largest = theirs.abs().max()
    torch.testing.assert_close(ours.double() / largest, theirs / largest, rtol=0, atol=0.1 if loose else 1e-4)


@pytest.mark.parametrize("num_ids", [V, 20])
@pytest.mark.parametrize("chunk", [3, None])
def test_the_most_likely_tokens_are_those_of_a_sort(chunk, num_ids):
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs()
    bias = torch.linspace(-1, 1, V, dtype=torch.float64)
    out = token_top(
        hidden, tokens, cu_seqlens, needed, OutputHead(weight, 0.7, bias=bias, chunk_size=chunk), TopLogits(K, num_ids)
    )
    whole = all_logprobs(hidden, weight, cu_seqlens, needed, 0.7, bias).detach()
    logprobs, ids = whole[:, :num_ids].sort(1, descending=True)
    used = whole.any(1)
    torch.testing.assert_close(out["top_logprobs"], logprobs[:, :K], rtol=1e-10, atol=1e-12)
    assert torch.equal(out["top_ids"][used], ids[used, :K]) and not out["top_ids"][~used].any()


def test_the_most_likely_tokens_are_found_over_many_blocks_of_columns():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, D, generator=g)
    weight = torch.randn(70_000, D, generator=g)
    tokens, cu_seqlens = torch.zeros(40, dtype=torch.int64), torch.tensor([0, 40])
    out = token_top(hidden, tokens, cu_seqlens, None, OutputHead(weight, 1.0, chunk_size=1024), TopLogits(K, 69_000))
    logits = hidden[:-1] @ weight.T
    values, ids = logits[:, :69_000].topk(K, 1)
    assert torch.equal(out["top_ids"][1:], ids)
    torch.testing.assert_close(
        out["top_logprobs"][1:], values - logits.logsumexp(1, keepdim=True), rtol=1e-5, atol=1e-5
    )


def test_neither_holds_the_logits_of_all_tokens():
    """1,500 rows x 50,000 tokens of the vocabulary would be 300 MB in float32."""
    code = (
        "import resource, torch;"
        "from verl.models.head.token_outputs import OutputHead, token_logprobs, token_top;"
        "from verl.models.head.chosen_tokens import TopLogits;"
        "h, w = torch.randn(1500, 8, requires_grad=True), torch.randn(50_000, 8, requires_grad=True);"
        "t, c = torch.zeros(1500, dtype=torch.int64), torch.tensor([0, 1500]);"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "(torch.randn(600, 600) @ torch.randn(600, 600)).sum(); before = peak();"
        "ids = token_top(h, t, c, None, OutputHead(w), TopLogits(32, 50_000))['top_ids'];"
        "token_logprobs(h, t, c, None, OutputHead(w), ids_Tk=ids)['logprobs_at_ids'].sum().backward();"
        "print((peak() - before) / 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 150, f"{done.stdout} MiB"


def test_the_triton_kernels_give_the_same():
    """In a process of its own, because the interpreter is chosen when triton is imported."""
    code = (
        "import torch; from tests.head_cases import random_head_inputs as r;"
        "from tests.unit.models.test_head_at_ids import random_ids;"
        "from verl.models.head.token_outputs import OutputHead, token_logprobs as f;"
        "h, w, t, c, n = r(); i = random_ids(t);"
        "a, b = (f(h, t, c, n, OutputHead(w, 0.7, kernels=k), ids_Tk=i)['logprobs_at_ids']"
        " for k in ('triton', 'torch'));"
        "torch.testing.assert_close(a, b, rtol=1e-12, atol=0);"
        "x, y = (torch.autograd.grad(o.exp().sum(), [h, w]) for o in (a, b));"
        "torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    if "No module named 'triton'" in done.stderr:
        pytest.skip("triton is not installed")
    assert done.returncode == 0, done.stderr
