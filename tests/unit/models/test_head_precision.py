"""How exact the head is in float32 and bfloat16: its error beside that of the eager path, against float64."""

import pytest
import torch

from tests.head_cases import V, example_loss, gradients_of, random_head_inputs, random_loss_columns
from verl.models.head.block_sizes import BlockSizes
from verl.models.head.token_outputs import OutputHead, token_logprobs, token_loss_one_pass


def relative(got, want):
    return float((got.detach().double() - want.detach()).norm() / want.detach().norm())


@pytest.mark.parametrize("mode", ["chunked", "one-pass"])
def test_float32_error_is_that_of_the_eager_path(mode):
    """Medians over seeds: of a few numbers, one rounding more or less doubles the error."""
    errors = torch.tensor([float32_errors(mode, seed) for seed in range(15)]).median(0).values
    for ours, eager in errors:
        assert ours <= max(2 * eager, 1e-6)


def float32_errors(mode, seed):
    """(error, error of the eager path) of log-probs, entropy and the gradients of hidden states and weight."""
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs(torch.float32, seed)
    columns = random_loss_columns(len(tokens), torch.float32)
    double = {name: column.double() for name, column in columns.items()}
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = token_logprobs(h, tokens, cu_seqlens, needed, OutputHead(w, mode="eager"), with_entropy=True)
    want = gradients_of(example_loss(exact, double)[0][needed].sum(), h, w)
    eager = token_logprobs(hidden, tokens, cu_seqlens, needed, OutputHead(weight, mode="eager"), with_entropy=True)
    plain = gradients_of(example_loss(eager, columns)[0].sum(), hidden, weight)
    if mode == "chunked":
        out = token_logprobs(hidden, tokens, cu_seqlens, needed, OutputHead(weight, chunk_size=4), with_entropy=True)
        ours = gradients_of(example_loss(out, columns)[0].sum(), hidden, weight)
    else:
        loss, out, _ = token_loss_one_pass(
            hidden, tokens, cu_seqlens, needed, OutputHead(weight), example_loss, columns, with_entropy=True
        )
        ours = gradients_of(loss, hidden, weight)
    assert out["logprobs"].dtype == torch.float32
    names = ("logprobs", "entropy")
    triples = [*((out[name], eager[name], exact[name]) for name in names), *zip(ours, plain, want, strict=True)]
    return [(relative(got, exactly), relative(reference, exactly)) for got, reference, exactly in triples]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_bfloat16_keeps_float32_statistics_and_bfloat16_gradients(temperature):
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs(torch.bfloat16)
    columns = random_loss_columns(len(tokens), torch.float32)
    out = token_logprobs(
        hidden, tokens, cu_seqlens, needed, OutputHead(weight, temperature, chunk_size=4), with_entropy=True
    )
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = token_logprobs(h, tokens, cu_seqlens, needed, OutputHead(w, temperature, mode="eager"), with_entropy=True)
    double = {name: column.double() for name, column in columns.items()}
    want = gradients_of(example_loss(exact, double)[0].sum(), h, w)
    ours = gradients_of(example_loss(out, columns)[0].sum(), hidden, weight)
    loss, outputs, _ = token_loss_one_pass(
        hidden,
        tokens,
        cu_seqlens,
        needed,
        OutputHead(weight, temperature, chunk_size=4),
        example_loss,
        columns,
        with_entropy=True,
    )
    assert out["logprobs"].dtype == out["entropy"].dtype == torch.float32
    for name in ("logprobs", "entropy"):
        assert relative(out[name], exact[name]) < 5e-3
        torch.testing.assert_close(outputs[name], out[name].detach(), rtol=1e-2, atol=1e-2)
    for got, other, exactly in zip(ours, gradients_of(loss, hidden, weight), want, strict=True):
        assert got.dtype == other.dtype == torch.bfloat16
        assert relative(got, exactly) < 2e-2 and relative(other, exactly) < 2e-2


def test_large_logits_neither_overflow_nor_lose_the_entropy():
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs(torch.float32)
    big = 200 * hidden.detach()
    out = token_logprobs(big, tokens, cu_seqlens, needed, OutputHead(weight, chunk_size=3), with_entropy=True)
    exact = token_logprobs(
        big.double(), tokens, cu_seqlens, needed, OutputHead(weight.double(), mode="eager"), with_entropy=True
    )
    torch.testing.assert_close(out["logprobs"].double(), exact["logprobs"], rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(out["entropy"].double(), exact["entropy"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_peaked_distributions_are_as_good_as_eager(dtype, with_entropy, monkeypatch):
    """Logits of some tens, the largest not in the first block, which alone gives the first shift."""
    hidden, weight, tokens, cu_seqlens, needed = random_head_inputs(dtype)
    hidden, weight = hidden.detach(), weight.detach() * (1 + 2 * (torch.arange(V) >= 5))[:, None]
    needed[:] = True
    columns = {name: column.to(torch.float32) for name, column in random_loss_columns(len(tokens)).items()}

    def loss(outputs, columns, cu_seqlens=None):
        entropy = 0.1 * outputs["entropy"] if with_entropy else 0.0
        return -columns["w"] * (outputs["logprobs"] + entropy), {}

    def gradients(one_pass, *inputs, mode="chunked"):
        inputs = [x.clone().requires_grad_() for x in inputs]
        rows, head = (inputs[0], tokens, cu_seqlens, needed), OutputHead(inputs[1], mode=mode)
        if one_pass:
            total = token_loss_one_pass(*rows, head, loss, columns, with_entropy=with_entropy)[0]
        else:
            total = loss(token_logprobs(*rows, head, with_entropy=with_entropy), columns)[0].sum()
        return gradients_of(total, *inputs)

    want = gradients(False, hidden.double(), weight.double(), mode="eager")
    plain = gradients(False, hidden, weight, mode="eager")
    for module in ("head.blockwise", "head.elementwise"):
        monkeypatch.setattr(f"verl.models.{module}.NEEDS_NO_SHIFT", 0.5)
    monkeypatch.setattr("verl.models.head.blockwise.MAX_SUM_EXP", 1e3)
    monkeypatch.setattr("verl.models.head.autograd.narrow_blocks", lambda *_, **__: BlockSizes(rows=6, columns=5))
    for columns_at_once in (5, V):  # logits recomputed, and kept
        blocks = BlockSizes(rows=6, columns=columns_at_once)
        monkeypatch.setattr("verl.models.head.token_outputs.one_pass_blocks", lambda *_, blocks=blocks: blocks)
        for one_pass in (True, False):
            for got, eager, exactly in zip(gradients(one_pass, hidden, weight), plain, want, strict=True):
                assert relative(got, exactly) < 2 * relative(eager, exactly) + max(torch.finfo(dtype).eps, 5e-6)
