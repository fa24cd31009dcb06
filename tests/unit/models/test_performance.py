"""Every option of memory and speed leaves the gradient of the plain run as it is."""

import ctypes
import functools
import itertools
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.conftest import skip_or_fail
from tests.engine_cases import SquaredLogprob, build_engine, random_batch, save_tiny_model
from verl.data.micro_batches import MicroBatching
from verl.models.performance import OffloadedActivations, ParameterStorages
from verl.utils.errors import ConfigError

PLAIN = {"head_mode": "eager", "model": {"enable_gradient_checkpointing": False}}
OPTIONS = {
    "checkpointing": {"model": {"enable_gradient_checkpointing": True}},
    "offload": {"model": {"enable_activation_offload": True}},
    "padded": {"model": {"use_remove_padding": False}},
    "chunked entropy": {"entropy_from_logits_with_chunking": True, "entropy_from_logits_chunk_size": 5},
    "entropy checkpointing": {"entropy_checkpointing": True},
    "fused": {"model": {"use_fused_kernels": True}},
    "compiled": {"kernels": "compiled"},
}


@pytest.fixture(scope="module", autouse=True)
def compile_without_generating_code():
    """torch.compile's tracer is what may go wrong here; its code generator needs a compiler and takes a minute."""
    traced = functools.cache(lambda function: torch.compile(function, backend="aot_eager", dynamic=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.models.head.elementwise.compiled", traced)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def gradient_with(folder, *settings, dtype="fp64"):
    """Gradients by name and outputs of one mini-batch in micro-batches, under the union of the settings."""
    model = {"enable_gradient_checkpointing": False}
    engine_settings = {}
    for setting in settings:
        model.update(setting.get("model", {}))
        engine_settings.update({k: v for k, v in setting.items() if k not in ("model", "kernels")})
    engine = build_engine(folder, dtype, model=model, **engine_settings)
    kernels = next((s["kernels"] for s in settings if "kernels" in s), engine.head_settings.kernels)
    engine.head_settings = engine.head_settings._replace(kernels=kernels)
    result = engine.forward_backward(random_batch(), SquaredLogprob(), MicroBatching(max_tokens=20), temperature=0.7)
    return {name: p.grad for name, p in engine.weights.named_parameters}, result.outputs


@pytest.fixture(scope="module")
def plain(folder):
    return gradient_with(folder, PLAIN)


def assert_same(found, expected):
    for name, want in expected[0].items():
        assert float((found[0][name] - want).norm() / want.norm()) < 1e-10, name
    for name, want in expected[1].items():
        torch.testing.assert_close(found[1][name], want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("pair", list(itertools.combinations_with_replacement(OPTIONS, 2)), ids="+".join)
def test_an_option_alone_and_with_another_leaves_the_float64_gradient_as_it_is(folder, plain, pair):
    assert_same(gradient_with(folder, *(OPTIONS[name] for name in pair)), plain)


def error(found, exact):
    """Of all gradients together, relative to their norm."""
    difference = sum(float((found[name].double() - want).square().sum()) for name, want in exact.items())
    return (difference / sum(float(want.square().sum()) for want in exact.values())) ** 0.5


@pytest.mark.parametrize("option", OPTIONS)
def test_the_float32_error_of_an_option_is_at_most_twice_that_of_the_plain_run(folder, plain, option):
    ours, _ = gradient_with(folder, OPTIONS[option], dtype="fp32")
    without, _ = gradient_with(folder, PLAIN, dtype="fp32")
    assert 0 < error(ours, plain[0]) <= 2 * error(without, plain[0])


def test_all_options_at_once_leave_the_float64_gradient_as_it_is(folder, plain):
    packed = {name: setting for name, setting in OPTIONS.items() if name != "padded"}
    assert_same(gradient_with(folder, *packed.values()), plain)


def test_offload_keeps_activations_and_leaves_parameters_where_they_are():
    layers = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4))
    inputs = torch.randn(3, 6, requires_grad=True)
    expected = torch.autograd.grad(layers(inputs).square().sum(), [inputs, *layers.parameters()])
    saved = OffloadedActivations(torch.device("cpu"), ParameterStorages(layers))
    with saved:
        loss = layers(inputs).square().sum()
    assert sorted(kept.host.shape for kept in saved.offloaded) == [(3, 4), (3, 5), (3, 6)]  # tanh's output travels once
    found = torch.autograd.grad(loss, [inputs, *layers.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_offload_gives_back_what_was_saved_even_when_the_original_is_overwritten():
    inputs = torch.randn(4, requires_grad=True)
    with OffloadedActivations(torch.device("cpu")):
        product = inputs * 2.0
        loss = (product * product).sum()
    product.data.zero_()
    torch.testing.assert_close(torch.autograd.grad(loss, inputs)[0], 8 * inputs.detach())


def test_offload_knows_parameters_that_a_module_holds_only_while_it_is_called():
    layer = nn.Linear(3, 3, bias=False)
    storages = ParameterStorages(layer)
    layer.weight = nn.Parameter(torch.randn(3, 3))  # as sharded layers gather theirs
    saved = OffloadedActivations(torch.device("cpu"), storages)
    with saved:
        layer(torch.randn(2, 3, requires_grad=True))
    assert [kept.host.shape for kept in saved.offloaded] == [(2, 3)]


def test_liger_without_a_gpu_is_refused_with_the_reason(folder):
    with pytest.raises(ConfigError, match=r"use_liger=True needs a GPU: .* Triton"):
        build_engine(folder, model={"use_liger": True})


FREED = """
import ctypes, torch
from verl.models.device_moves import keep_freed_memory

class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

ask = ctypes.CDLL(None).mallinfo2
ask.restype = Counts
keep_freed_memory()
held = [torch.ones(4 << 20) for _ in range(16)]  # 16 MiB each
before = ask().fordblks
del held
print(before, ask().fordblks)  # bytes that were freed and not given back
"""


def test_memory_that_a_step_freed_is_there_for_the_next():
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        skip_or_fail("needs glibc 2.33")
    out = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True).stdout
    before, after = map(int, out.split())
    assert after - before >= 250 << 20
