"""The sum of squared probabilities from the head, against a softmax over all logits in float64."""

import os
import subprocess
import sys

import pytest
import torch

from tests.engine_cases import build_engine, random_batch, save_tiny_model
from tests.head_cases import random_head_inputs
from verl.data.micro_batches import MicroBatching
from verl.models.head.token_outputs import OutputHead, token_logprobs

KINDS = [("eager", "torch"), ("chunked", "torch"), ("fused", "torch")]


def naive_squares(hidden, weight, cu_seqlens, needed, temperature, bias=None):
    """Token by token: the probabilities of the whole vocabulary, squared and added up."""
    out = [hidden.new_zeros(())] * len(hidden)
    temperature = torch.as_tensor(temperature, dtype=hidden.dtype).expand(len(hidden))
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for t in range(start + 1, end):
            if needed[t]:
                logits = weight @ hidden[t - 1] + (0 if bias is None else bias)
                out[t] = torch.softmax(logits / temperature[t], 0).square().sum()
    return torch.stack(out)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "column"])
@pytest.mark.parametrize(("mode", "kernels"), KINDS)
def test_value_and_gradient_equal_the_softmax_in_float64(mode, kernels, temperature, with_bias):
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs()
    if temperature == "column":
        temperature = torch.linspace(0.5, 2.0, len(tokens), dtype=torch.float64)
    bias = torch.linspace(-1, 1, len(weight), dtype=torch.float64).requires_grad_() if with_bias else None
    out = token_logprobs(
        hidden,
        tokens,
        cu_seqlens,
        needed,
        OutputHead(weight, temperature, bias=bias, mode=mode, kernels=kernels, chunk_size=3),
        with_entropy=True,
        with_sum_pi_squared=True,
    )
    expected = naive_squares(hidden, weight, cu_seqlens, needed, temperature, bias)
    torch.testing.assert_close(out["sum_pi_squared"], expected, rtol=1e-10, atol=1e-12)
    factors = torch.linspace(-1, 2, len(tokens), dtype=torch.float64)
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    ours, theirs = (torch.autograd.grad((x * factors).sum(), inputs) for x in (out["sum_pi_squared"], expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize(("mode", "kernels"), KINDS)
def test_low_precision_and_large_logits_keep_it_close_to_float64(mode, kernels, scale, dtype):
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs(dtype)
    hidden, weight = (hidden * scale).detach(), weight.detach()
    out = token_logprobs(
        hidden, tokens, cu_seqlens, needed, OutputHead(weight, mode=mode, kernels=kernels), with_sum_pi_squared=True
    )["sum_pi_squared"]
    expected = naive_squares(hidden.double(), weight.double(), cu_seqlens, needed, 1.0)
    if dtype == torch.bfloat16:  # its logits are rounded: compare the distribution that they give
        logits = torch.nn.functional.linear(hidden, weight).double()
        rounded = torch.softmax(logits, 1).square().sum(1).roll(1)
        expected = torch.where(expected > 0, rounded, 0.0)
    torch.testing.assert_close(out.double(), expected, rtol=2e-4, atol=1e-6)
    assert (out[expected == 0] == 0).all() and out.dtype == torch.float32


def test_the_triton_kernels_give_the_same():
    """In a process of its own, because the interpreter is chosen when triton is imported."""
    code = (
        "import torch; from tests.head_cases import random_head_inputs as r;"
        "from verl.models.head.token_outputs import OutputHead, token_logprobs as f;"
        "h, w, t, c, n = r();"
        "kinds = ('triton', 'torch');"
        "a, b = (f(h, t, c, n, OutputHead(w, 0.7, kernels=k), with_sum_pi_squared=True)['sum_pi_squared']"
        " for k in kinds);"
        "torch.testing.assert_close(a, b, rtol=1e-12, atol=0)"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if "No module named 'triton'" in done.stderr:
        pytest.skip("triton is not installed")
    assert done.returncode == 0, done.stderr


class SquaresLoss:
    """A loss with a gradient through the sum of squares."""

    per_token = False
    outputs = ("logprobs", "sum_pi_squared")
    columns = ("loss_mask", "loss_weights")
    optional_columns = ()

    def __call__(self, outputs, columns, cu_seqlens=None):
        return (outputs["logprobs"] * outputs["sum_pi_squared"]) * columns["loss_weights"], {}


def test_the_engine_gives_it_in_both_passes_whatever_the_micro_batches(tmp_path):
    folder = save_tiny_model(tmp_path)
    batch = random_batch()
    batch = batch.with_columns(loss_weights=torch.ones(batch.num_tokens, dtype=torch.float64) * batch["loss_mask"])
    gradients, columns = [], []
    for head_mode, micro in (("eager", None), ("chunked", MicroBatching(max_sequences=1))):
        engine = build_engine(folder, head_mode=head_mode)
        columns.append(engine.forward(batch, ("logprobs", "sum_pi_squared"), micro, 0.8)["sum_pi_squared"])
        result = engine.forward_backward(batch, SquaresLoss(), micro, 0.8)
        torch.testing.assert_close(result.outputs["sum_pi_squared"], columns[-1], rtol=1e-10, atol=1e-12)
        gradients.append({name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(columns[0], columns[1], rtol=1e-10, atol=1e-12)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-9, atol=1e-12)
