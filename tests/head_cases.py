"""An oracle of the language-model head: naive loops over sequences and full logits, and what to feed it."""

import torch

V, D = 53, 7
LENGTHS = [1, 6, 2, 1, 9]  # sequences of one token have nothing to predict


def random_head_inputs(dtype=torch.float64, seed=0):
    """hidden (T, D), weight (V, D), tokens, cu_seqlens, needed; both of the first requiring gradients."""
    g = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    hidden = torch.randn(total, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    tokens = torch.randint(V, (total,), generator=g)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    needed = torch.rand(total, generator=g) < 0.7
    return hidden, weight, tokens, cu_seqlens, needed


def naive_head(hidden, weight, tokens, cu_seqlens, needed, temperature, bias=None):
    """One sequence and one token at a time."""
    logprobs, entropy = [], []
    temperature = torch.as_tensor(temperature, dtype=hidden.dtype).expand(len(tokens))
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for t in range(start, end):
            if t == start or not needed[t]:
                logprobs.append(hidden.new_zeros(()))
                entropy.append(hidden.new_zeros(()))
                continue
            logits = torch.stack([(hidden[t - 1] * w).sum() for w in weight])
            p = torch.softmax((logits if bias is None else logits + bias) / temperature[t], 0)
            logprobs.append(p[tokens[t]].log())
            entropy.append(-(p * p.log()).sum())
    return torch.stack(logprobs), torch.stack(entropy)


def example_loss(outputs, columns, cu_seqlens=None):
    """A per-token loss with curvature in both outputs."""
    losses = columns["w"] * (torch.exp(outputs["logprobs"] * columns["a"]) - 0.3 * outputs["entropy"] ** 2)
    return losses, {"ratio": outputs["logprobs"].exp(), "entropy_twice": 2 * outputs["entropy"]}


def random_loss_columns(total, dtype=torch.float64):
    g = torch.Generator().manual_seed(5)
    return {name: torch.rand(total, generator=g, dtype=torch.float64).to(dtype) for name in ("w", "a")}


def gradients_of(loss, *inputs):
    return torch.autograd.grad(loss, inputs)
