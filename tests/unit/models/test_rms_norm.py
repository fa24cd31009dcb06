"""Norms in closed form: which norms are taken over, and their values and gradients against autograd's in float64."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from verl.commands.certify.float64 import keep_float64
from verl.models import rms_norm
from verl.models.rms_norm import is_plain_rms_norm, use_fused_rms_norm


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm, "fastest", lambda name, ways: "fused")


EPS = 0.1  # large, so that where it stands matters


def by_definition(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def make(size: int, dtype: torch.dtype) -> nn.Module:
    norm = Qwen3RMSNorm(size, eps=EPS).to(dtype)
    norm.weight.data.uniform_(0.5, 2)
    if dtype == torch.float64:
        keep_float64(norm)
    use_fused_rms_norm(norm)
    return norm


@pytest.mark.parametrize("layout", ["rows", "heads", "heads first"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_values_and_gradients_are_those_of_the_definition(layout, dtype, tolerance):
    torch.manual_seed(0)
    shape = (1, 50, 8) if layout == "rows" else (1, 50, 3, 8)
    norm, x, grad = make(8, dtype), torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    if layout == "heads first":  # as attention hands its gradients back
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    exact = [t.double().detach().requires_grad_() for t in (x, norm.weight)]
    expected = [by_definition(*exact), *torch.autograd.grad(by_definition(*exact), exact, grad.double())]
    x.requires_grad_()
    found = [norm(x), *torch.autograd.grad(norm(x), (x, norm.weight), grad)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


def test_a_compiled_norm_keeps_its_gradient():
    torch.manual_seed(0)
    norm, x = make(8, torch.float64), torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    inputs = (x, norm.weight)
    found = torch.autograd.grad(torch.compile(norm, backend="aot_eager")(x).sin().sum(), inputs)
    for ours, theirs in zip(found, torch.autograd.grad(by_definition(*inputs).sin().sum(), inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_class_keeps_its_forward_where_that_is_faster(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rms_norm, "fastest", lambda name, ways: "plain")
    norm = Qwen3RMSNorm(8)
    use_fused_rms_norm(norm)
    assert type(norm) is Qwen3RMSNorm


def test_only_norms_that_compute_the_same_are_taken_over():
    plain = (LlamaRMSNorm, Qwen3RMSNorm, Olmo2RMSNorm)
    others = (GemmaRMSNorm, Qwen3NextRMSNorm, Qwen3NextRMSNormGated, nn.RMSNorm, nn.LayerNorm)
    assert all(map(is_plain_rms_norm, plain)) and not any(map(is_plain_rms_norm, others))


def test_narrow_types_are_normed_as_their_class_does():
    torch.manual_seed(0)
    theirs = Qwen3RMSNorm(8).to(torch.bfloat16)
    ours, x = copy.deepcopy(theirs), torch.randn(5, 8, dtype=torch.bfloat16)
    use_fused_rms_norm(ours)
    assert type(ours) is not type(theirs) and torch.equal(ours(x), theirs(x))


def test_a_frozen_norm_takes_no_gradient_and_copies_have_weights_of_their_own():
    norm, x = make(8, torch.float32), torch.randn(5, 8, requires_grad=True)
    twin = copy.deepcopy(norm)
    twin.weight.data.mul_(2)
    torch.testing.assert_close(twin(x), 2 * norm(x))
    norm.weight.requires_grad_(False)
    norm(x).sum().backward()
    assert norm.weight.grad is None and x.grad is not None
