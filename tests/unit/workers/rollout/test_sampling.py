"""Counter-based uniforms and inverse-CDF sampling."""

import math

import pytest
import torch

from verl.data.random_streams import stream_key, uniforms
from verl.workers.rollout.native.sampling import SamplingTensors, restrict, sample

NONE = SamplingTensors()


def spread(count: int) -> torch.Tensor:
    """Uniforms laid out evenly in (0, 1)."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def keys(count: int, seed: int = 1) -> torch.Tensor:
    return torch.tensor([stream_key(seed, request, 0) for request in range(count)])


def test_a_uniform_depends_on_its_key_and_position_alone():
    many = uniforms(keys(50), torch.arange(50))
    alone = torch.cat([uniforms(keys(50)[i : i + 1], torch.tensor([i])) for i in range(50)])
    assert torch.equal(many, alone)


def test_seed_request_sample_and_position_each_change_the_uniform():
    keys_ = [stream_key(1, 2, 3), stream_key(2, 2, 3), stream_key(1, 3, 3), stream_key(1, 2, 4), stream_key(1, 3, 2)]
    values = [float(uniforms(torch.tensor([key]), torch.tensor([at]))) for key in keys_ for at in (0, 1)]
    assert len(set(values)) == len(values)


def test_uniforms_are_uniform_along_positions_and_across_requests():
    grid = torch.stack([uniforms(keys(200), torch.full((200,), p)) for p in range(200)])  # (positions, requests)
    assert grid.min() >= 0 and grid.max() < 1
    expected = grid.numel() / 64
    counts = torch.histc(grid.float(), 64, 0, 1)
    assert float(((counts - expected) ** 2 / expected).sum()) < 63 + 5 * math.sqrt(126)  # chi-square, 5 sigma
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
        assert abs(float(correlation)) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("vocab", [7, 128, 5000])
def test_samples_follow_the_softmax(vocab: int):
    torch.manual_seed(0)
    logits = torch.randn(vocab) * 2
    count = 400
    tokens, _ = sample(logits.repeat(count, 1), spread(count), NONE)
    # Evenly spread uniforms reach each token as often as its probability says, to within one sample at each border.
    observed = torch.bincount(tokens, minlength=vocab).double().cumsum(0) / count
    assert (observed - logits.double().softmax(0).cumsum(0)).abs().max() <= 1.01 / count


@pytest.mark.parametrize("vocab", [100, 3000, 3001])
def test_the_inverse_cdf_picks_the_first_token_whose_cumulative_probability_exceeds_the_uniform(vocab: int):
    torch.manual_seed(1)
    logits = torch.randn(64, vocab)
    u = torch.rand(64, dtype=torch.float64)
    tokens, _ = sample(logits.clone(), u, NONE)
    cdf = logits.double().softmax(-1).cumsum(-1)
    expected = [next(i for i, c in enumerate(row.tolist()) if c > at) for row, at in zip(cdf, u.tolist(), strict=True)]
    assert tokens.tolist() == expected


@pytest.mark.parametrize("vocab", [50, 4000])
@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-52])
def test_a_token_of_zero_probability_is_never_sampled(vocab: int, u: float):
    logits = torch.full((1, vocab), -torch.inf)
    logits[0, vocab // 2] = 0.0
    tokens, logprobs = sample(logits, torch.tensor([u], dtype=torch.float64), NONE)
    assert tokens.item() == vocab // 2 and logprobs.item() == 0.0


def test_logprobs_are_of_the_whole_softmax_at_the_temperature_whatever_is_filtered():
    torch.manual_seed(2)
    logits, temperature = torch.randn(32, 60), torch.rand(32) + 0.5
    tensors = SamplingTensors(
        temperature_B=temperature,
        top_k_B=torch.full((32,), 5),
        top_p_B=torch.full((32,), 0.7),
        forbidden_BK=logits.argmax(-1, keepdim=True),
    )
    tokens, logprobs = sample(logits.clone(), torch.rand(32, dtype=torch.float64), tensors)
    expected = (logits / temperature[:, None]).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)
    assert not (tokens == logits.argmax(-1)).any()


def test_greedy_rows_take_the_best_token_with_its_probability_at_temperature_one():
    torch.manual_seed(3)
    logits = torch.randn(4, 20)
    greedy = torch.tensor([True, False, True, False])
    tokens, logprobs = sample(
        logits.clone(), torch.full((4,), 0.999, dtype=torch.float64), SamplingTensors(greedy_B=greedy)
    )
    assert torch.equal(tokens[greedy], logits.argmax(-1)[greedy])
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)


def naive_kept(weights: list[float], top_k: int, top_p: float) -> set[int]:
    order = sorted(range(len(weights)), key=lambda i: -weights[i])[:top_k]
    total, mass, kept = sum(weights[i] for i in order), 0.0, set()
    for i in order:
        if mass >= top_p * total:
            break
        kept.add(i)
        mass += weights[i]
    return kept


def test_top_k_then_top_p_keep_what_the_definition_keeps_row_by_row():
    torch.manual_seed(4)
    weights = torch.randn(40, 1500).exp()
    top_k = torch.randint(1, 1500, (40,))
    top_k[::4] = 1500
    top_p = torch.rand(40) * 0.98 + 0.01
    top_p[::5] = 1.0
    kept = restrict(weights, SamplingTensors(top_k_B=top_k, top_p_B=top_p)) > 0
    for row in range(40):
        expected = naive_kept(weights[row].double().tolist(), int(top_k[row]), float(top_p[row]))
        assert set(kept[row].nonzero().flatten().tolist()) == expected, row


@pytest.mark.parametrize("first_forbidden", [False, True])
def test_min_p_keeps_the_tokens_with_that_share_of_the_likeliest_one(first_forbidden: bool):
    torch.manual_seed(3)
    logits, shares = torch.randn(5, 40) * 2, torch.tensor([0.0, 0.05, 0.3, 0.9, 1.0])
    best = logits.argmax(-1, keepdim=True)
    tensors = SamplingTensors(min_p_B=shares, forbidden_BK=best if first_forbidden else None)
    for row in range(5):
        probabilities = logits[row].double().softmax(-1)
        if first_forbidden:
            probabilities[best[row]] = 0
        allowed = {i for i, p in enumerate(probabilities.tolist()) if p > 0 and p >= shares[row] * max(probabilities)}
        rows = SamplingTensors(**{name: None if value is None else value[[row] * 4000]
                                  for name, value in vars(tensors).items()})  # fmt: skip
        tokens, logprobs = sample(logits[[row] * 4000], spread(4000), rows)
        assert set(tokens.tolist()) <= allowed
        rare = {i for i in allowed if probabilities[i] < 1e-3}
        assert allowed - set(tokens.tolist()) <= rare
        torch.testing.assert_close(logprobs, logits[row].log_softmax(-1)[tokens])  # of the whole softmax


def test_logits_that_are_not_finite_give_a_logprob_of_nan():
    logits = torch.zeros(2, 8)
    logits[1, 3] = torch.nan
    _, logprobs = sample(logits, torch.full((2,), 0.5, dtype=torch.float64), NONE)
    assert logprobs.isnan().tolist() == [False, True]
