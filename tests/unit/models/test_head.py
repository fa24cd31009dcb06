"""The head against an oracle written here: naive loops over sequences, full logits, float64 and finite differences."""

import pytest
import torch

from tests.head_cases import V, example_loss, gradients_of, naive_head, random_head_inputs, random_loss_columns
from verl.config import FSDPEngineConfig, HFModelConfig
from verl.config.model import FusedKernelConfig
from verl.models.head.autograd import Budget
from verl.models.head.block_sizes import BlockSizes
from verl.models.head.blockwise import BlockwiseHead
from verl.models.head.token_outputs import (
    OutputHead,
    head_kernels,
    head_mode,
    needed_positions,
    token_logprobs,
    token_loss_one_pass,
)
from verl.plugin.platform.cpu import PlatformCPU
from verl.utils.errors import ConfigError


@pytest.mark.parametrize("mode", ["eager", "chunked", "fused"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, "column"])
def test_value_and_gradient_equal_the_naive_definition(mode, temperature):
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs()
    rows = (hidden, tokens, cu_seqlens, needed)
    if temperature == "column":
        temperature = torch.linspace(0.4, 2.0, len(tokens), dtype=torch.float64)
    bias = torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    head = OutputHead(weight, temperature, bias, mode, chunk_size=3)
    out = token_logprobs(*rows, head, with_entropy=True)
    logprobs, entropy = naive_head(hidden, weight, tokens, cu_seqlens, needed, temperature, bias=bias)
    torch.testing.assert_close(out["logprobs"], logprobs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out["entropy"], entropy, rtol=1e-12, atol=1e-12)
    columns = random_loss_columns(len(tokens))
    ours = example_loss(out, columns)[0].sum()
    oracle = example_loss({"logprobs": logprobs, "entropy": entropy}, columns)[0].sum()
    for got, want in zip(
        gradients_of(ours, hidden, weight, bias), gradients_of(oracle, hidden, weight, bias), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("output", ["logprobs", "entropy"])
def test_gradient_equals_finite_differences(output):
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs()

    def value(h, w):
        return token_logprobs(h, tokens, cu_seqlens, needed, OutputHead(w, 0.8, chunk_size=4), with_entropy=True)[
            output
        ]

    assert torch.autograd.gradcheck(value, (hidden, weight), eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_size", [None, 1, 4, 1000])
def test_one_pass_equals_the_loss_of_two_passes(temperature, chunk_size):
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs()
    rows = (hidden, tokens, cu_seqlens, needed)
    columns = random_loss_columns(len(tokens))
    out = token_logprobs(*rows, OutputHead(weight, temperature, mode="eager"), with_entropy=True)
    keep = needed.clone()
    keep[cu_seqlens[:-1]] = False
    losses, metrics = example_loss(out, columns)
    loss, outputs, ours = token_loss_one_pass(
        *rows, OutputHead(weight, temperature, chunk_size=chunk_size), example_loss, columns, with_entropy=True
    )
    torch.testing.assert_close(loss, losses[keep].sum())
    for name in ("logprobs", "entropy"):
        torch.testing.assert_close(outputs[name], out[name].detach())
        assert not outputs[name].requires_grad
    for name, column in metrics.items():
        torch.testing.assert_close(ours[name], torch.where(keep, column.detach(), 0))
    oracle = gradients_of(losses[keep].sum(), hidden, weight)
    for got, want in zip(gradients_of(loss, hidden, weight), oracle, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, -0.25])
def test_one_pass_scales_with_the_upstream_gradient(scale):
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs()
    rows = (hidden, tokens, cu_seqlens, needed)
    columns = random_loss_columns(len(tokens))

    def gradients(factor):
        loss, _, _ = token_loss_one_pass(*rows, OutputHead(weight), example_loss, columns, with_entropy=True)
        return gradients_of(factor * loss, hidden, weight)

    for got, want in zip(gradients(scale), gradients(1.0), strict=True):
        torch.testing.assert_close(got, scale * want)


def test_one_pass_refuses_a_second_backward():
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs()
    rows = (hidden, tokens, cu_seqlens, needed)
    loss, _, _ = token_loss_one_pass(
        *rows, OutputHead(weight), example_loss, random_loss_columns(len(tokens)), with_entropy=True
    )
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed over once"):
        loss.backward()


def test_one_pass_of_logprobs_alone_equals_eager():
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs()
    rows = (hidden, tokens, cu_seqlens, needed)
    columns = random_loss_columns(len(tokens))

    def loss(outputs, columns, cu_seqlens=None):
        return -columns["w"] * outputs["logprobs"], {}

    ours, _, metrics = token_loss_one_pass(*rows, OutputHead(weight), loss, columns)
    eager = loss(token_logprobs(*rows, OutputHead(weight, mode="eager")), columns)[0].sum()
    torch.testing.assert_close(ours, eager)
    assert metrics == {}
    for got, want in zip(gradients_of(ours, hidden, weight), gradients_of(eager, hidden, weight), strict=True):
        torch.testing.assert_close(got, want)


def test_entropy_that_only_is_a_metric_leaves_the_gradient_alone():
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs()
    rows = (hidden, tokens, cu_seqlens, needed)
    columns = random_loss_columns(len(tokens))

    def loss(outputs, columns, cu_seqlens=None):
        return columns["w"] * outputs["logprobs"], {"entropy": outputs.get("entropy", outputs["logprobs"])}

    args = (*rows, OutputHead(weight), loss, columns)
    with_entropy = gradients_of(token_loss_one_pass(*args, with_entropy=True)[0], hidden, weight)
    without = gradients_of(token_loss_one_pass(*args)[0], hidden, weight)
    for got, want in zip(with_entropy, without, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 1000])
def test_chunk_size_does_not_change_the_result(chunk_size):
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs()
    rows = (hidden, tokens, cu_seqlens, needed)

    def result(size):
        out = token_logprobs(*rows, OutputHead(weight, 0.7, chunk_size=size), with_entropy=True)
        return out["logprobs"], out["entropy"], *gradients_of((out["logprobs"] * out["entropy"]).sum(), hidden, weight)

    for got, want in zip(result(chunk_size), result(None), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("columns", [1, 5, 52, 53])
def test_vocabulary_blocks_do_not_change_the_result(columns, monkeypatch):
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs()
    rows = (hidden, tokens, cu_seqlens, needed)

    def result():
        out = token_logprobs(*rows, OutputHead(weight, 0.7), with_entropy=True)
        two = gradients_of(example_loss(out, loss_columns)[0][needed].sum(), hidden, weight)
        loss, outputs, _ = token_loss_one_pass(
            *rows, OutputHead(weight, 0.7), example_loss, loss_columns, with_entropy=True
        )
        return *out.values(), *two, *outputs.values(), *gradients_of(loss, hidden, weight)

    loss_columns = random_loss_columns(len(tokens))
    whole = result()
    blocks = BlockSizes(rows=4, columns=columns)
    monkeypatch.setattr("verl.models.head.autograd.narrow_blocks", lambda *_, **__: blocks)
    monkeypatch.setattr("verl.models.head.token_outputs.one_pass_blocks", lambda *_: blocks)
    monkeypatch.setattr("verl.models.head.elementwise.TILE_BYTES", 24)
    for got, want in zip(result(), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("rows_that_fit", "times"), [(2, 2), (100, 1)])
def test_one_pass_computes_whole_rows_of_logits_once(rows_that_fit, times, monkeypatch):
    """In low precision on a CPU, logits are computed twice where fewer rows fit than are worth storing."""
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs(torch.bfloat16)
    rows = (hidden, tokens, cu_seqlens, needed)
    columns, computed, logits = random_loss_columns(len(tokens), torch.float32), [], BlockwiseHead._logits

    def counting(head, rows, columns):
        computed.append(len(rows.scaled_RD) * (columns.stop - columns.start))
        return logits(head, rows, columns)

    monkeypatch.setattr(BlockwiseHead, "_logits", counting)
    row_bytes = weight.shape[0] * weight.itemsize
    monkeypatch.setattr("verl.models.head.autograd.MIN_BLOCK_SIDE", 1)
    monkeypatch.setattr("verl.models.head.autograd.STORED_LOGIT_BYTES", rows_that_fit * row_bytes)
    monkeypatch.setattr("verl.models.head.autograd.CPU_LOW_PRECISION", Budget(1 << 20, rows_that_fit * row_bytes, 1024))
    token_loss_one_pass(*rows, OutputHead(weight, 0.7), example_loss, columns, with_entropy=True)
    assert sum(computed) == times * V * len(needed_positions(cu_seqlens, needed, tokens))


@pytest.mark.parametrize("columns_at_once", [5, V], ids=["recomputed", "stored"])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, "column"])
def test_one_pass_in_several_blocks_equals_the_definition(temperature, with_entropy, columns_at_once, monkeypatch):
    """Three blocks of rows, with a bias."""
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs()
    needed[:] = True
    if temperature == "column":
        temperature = torch.linspace(0.4, 2.0, len(tokens), dtype=torch.float64)
    bias = torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    columns = random_loss_columns(len(tokens))

    def loss_of(outputs, columns, cu_seqlens=None):
        entropy = columns["w"] * outputs["entropy"] if with_entropy else 0.0
        return -columns["w"] * outputs["logprobs"].exp() + entropy, {}

    args = (tokens, cu_seqlens, needed, temperature)
    logprobs, entropy = naive_head(hidden, weight, *args, bias=bias)
    keep = torch.ones(len(tokens), dtype=torch.bool)
    keep[cu_seqlens[:-1]] = False
    want = loss_of({"logprobs": logprobs, "entropy": entropy}, columns)[0][keep].sum()
    blocks = BlockSizes(rows=4, columns=columns_at_once)
    assert len(list(blocks.row_slices(int(keep.sum())))) > 2
    monkeypatch.setattr("verl.models.head.token_outputs.one_pass_blocks", lambda *_: blocks)
    loss = token_loss_one_pass(
        hidden, *args[:3], OutputHead(weight, temperature, bias), loss_of, columns, with_entropy=with_entropy
    )[0]
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12)
    inputs = (hidden, weight, bias)
    for got, exact in zip(gradients_of(loss, *inputs), gradients_of(want, *inputs), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("num_rows", [0, 1, 4, 9, 13, 27])
def test_blocks_take_every_row_once(num_rows):
    parts = list(BlockSizes(rows=4, columns=5).row_slices(num_rows))
    assert parts and [row for part in parts for row in range(part.start, part.stop)] == list(range(num_rows))
    assert all(part.stop - part.start <= 4 for part in parts)


def test_sums_that_overflow_are_taken_again_from_the_largest_logit(monkeypatch):
    """The first block of columns holds the smallest logits by far."""
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs(torch.float32)
    hidden, weight = torch.ones_like(hidden), 0.01 * weight.detach() + 20 * (torch.arange(V) >= 5)[:, None]
    monkeypatch.setattr("verl.models.head.autograd.narrow_blocks", lambda *_, **__: BlockSizes(rows=4, columns=5))
    out = token_logprobs(hidden, tokens, cu_seqlens, needed, OutputHead(weight), with_entropy=True)
    exact = token_logprobs(
        hidden.double(), tokens, cu_seqlens, needed, OutputHead(weight.double(), mode="eager"), with_entropy=True
    )
    for name in ("logprobs", "entropy"):
        torch.testing.assert_close(out[name].double(), exact[name], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_are_bitwise_equal(dtype):
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs(dtype)
    rows = (hidden, tokens, cu_seqlens, needed)
    columns = random_loss_columns(len(tokens), torch.float32)

    def run():
        out = token_logprobs(*rows, OutputHead(weight, 0.7, chunk_size=3), with_entropy=True)
        two = gradients_of(example_loss(out, columns)[0].sum(), hidden, weight)
        loss, outputs, _ = token_loss_one_pass(
            *rows, OutputHead(weight, 0.7, chunk_size=3), example_loss, columns, with_entropy=True
        )
        return (*out.values(), *two, *outputs.values(), loss, *gradients_of(loss, hidden, weight))

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


def test_a_tied_weight_gets_both_gradients():
    _, weight, tokens, cu_seqlens, needed = random_head_inputs()

    def loss(mode):
        hidden = torch.tanh(torch.nn.functional.embedding(tokens, weight))
        return token_logprobs(hidden, tokens, cu_seqlens, needed, OutputHead(weight, mode=mode))["logprobs"].sum()

    (ours,), (oracle,) = gradients_of(loss("chunked"), weight), gradients_of(loss("eager"), weight)
    torch.testing.assert_close(ours, oracle, rtol=1e-11, atol=1e-12)

    hidden = torch.tanh(torch.nn.functional.embedding(tokens, weight))
    one_pass, _, _ = token_loss_one_pass(
        hidden, tokens, cu_seqlens, needed, OutputHead(weight), lambda o, c, _: (o["logprobs"], {}), {}
    )
    torch.testing.assert_close(gradients_of(one_pass, weight)[0], oracle, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient_and_changes_nothing_for_the_other(frozen):
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs()
    rows = (hidden, tokens, cu_seqlens, needed)
    columns = random_loss_columns(len(tokens))

    def gradients():
        hidden.grad = weight.grad = None
        out = token_logprobs(*rows, OutputHead(weight), with_entropy=True)
        example_loss(out, columns)[0].sum().backward()
        two = hidden.grad if frozen == "weight" else weight.grad
        hidden.grad = weight.grad = None
        token_loss_one_pass(*rows, OutputHead(weight), example_loss, columns, with_entropy=True)[0].backward()
        return (
            two,
            hidden.grad if frozen == "weight" else weight.grad,
            {"hidden": hidden, "weight": weight}[frozen].grad,
        )

    two, one, _ = gradients()
    {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    frozen_two, frozen_one, none = gradients()
    assert none is None
    torch.testing.assert_close(frozen_two, two)
    torch.testing.assert_close(frozen_one, one)


def test_nothing_needed_gives_zeros_and_zero_gradients():
    hidden, weight, tokens, cu_seqlens, _ = random_head_inputs()
    needed = torch.zeros(len(tokens), dtype=torch.bool)
    needed[cu_seqlens[:-1]] = True  # first tokens have nothing before them
    out = token_logprobs(hidden, tokens, cu_seqlens, needed, OutputHead(weight), with_entropy=True)
    assert not out["logprobs"].any() and not out["entropy"].any()
    loss, outputs, metrics = token_loss_one_pass(
        hidden,
        tokens,
        cu_seqlens,
        needed,
        OutputHead(weight),
        example_loss,
        random_loss_columns(len(tokens)),
        with_entropy=True,
    )
    assert loss == 0 and not outputs["logprobs"].any()
    assert set(metrics) == {"ratio", "entropy_twice"} and metrics["ratio"].shape == tokens.shape
    for total in (out["logprobs"].sum(), loss):
        for gradient in gradients_of(total, hidden, weight):
            assert not gradient.any()


def test_rows_that_are_not_needed_get_no_gradient():
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs()
    rows = (hidden, tokens, cu_seqlens, needed)
    out = token_logprobs(*rows, OutputHead(weight))["logprobs"]
    (gradient,) = gradients_of(out.sum(), hidden)
    predicts = torch.zeros(len(tokens), dtype=torch.bool)
    predicts[:-1] = needed[1:]
    predicts[cu_seqlens[1:] - 1] = False
    assert torch.equal(gradient.any(1), predicts)


def test_the_seed_keys_choose_mode_and_kernels(monkeypatch):
    fused = HFModelConfig(use_fused_kernels=True)
    for chunking, checkpointing in [(False, False), (True, False), (False, True)]:
        keys = {"entropy_from_logits_with_chunking": chunking, "entropy_checkpointing": checkpointing}
        assert head_mode(HFModelConfig(), FSDPEngineConfig(**keys)) == "chunked"
        assert head_mode(fused, FSDPEngineConfig(**keys)) == "fused"
    for key in ("entropy_from_logits_with_chunking", "entropy_checkpointing"):
        with pytest.raises(ConfigError, match="eager holds all logits"):
            head_mode(HFModelConfig(), FSDPEngineConfig(head_mode="eager", **{key: True}))
    assert head_kernels(fused, FSDPEngineConfig()) == "torch"
    monkeypatch.setattr(PlatformCPU, "compiles_triton", lambda self: True)
    assert head_kernels(fused, FSDPEngineConfig()) == "compiled"
    assert head_kernels(fused, FSDPEngineConfig(use_torch_compile=False)) == "torch"


def test_triton_kernels_without_a_gpu_are_refused_with_the_reason(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = HFModelConfig(use_fused_kernels=True, fused_kernel_options=FusedKernelConfig(impl_backend="triton"))
    with pytest.raises(ConfigError, match=r"impl_backend=triton needs a GPU.*'cpu'.*impl_backend=torch"):
        head_kernels(model, FSDPEngineConfig())
    monkeypatch.setattr(PlatformCPU, "compiles_triton", lambda self: True)
    assert head_kernels(model, FSDPEngineConfig()) == "triton"


def test_an_unknown_mode_and_a_zero_temperature_are_refused():
    hidden, weight, *where = random_head_inputs()
    with pytest.raises(ConfigError, match="'liger' is unknown; use one of eager, chunked, fused"):
        token_logprobs(hidden, *where, OutputHead(weight, mode="liger"))
    with pytest.raises(ConfigError, match="temperature must be above 0"):
        token_logprobs(hidden, *where, OutputHead(weight, temperature=0.0))


def test_one_pass_of_a_loss_that_ignores_the_model_has_zero_gradient():
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs()
    rows = (hidden, tokens, cu_seqlens, needed)
    torch.use_deterministic_algorithms(True)  # memory that nobody wrote is NaN, not a lucky zero
    try:
        loss, _, _ = token_loss_one_pass(
            *rows, OutputHead(weight), lambda o, c, _: (c["w"], {}), random_loss_columns(len(tokens))
        )
        gradients = gradients_of(loss, hidden, weight)
    finally:
        torch.use_deterministic_algorithms(False)
    assert loss > 0
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)
