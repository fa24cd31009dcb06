"""The packed attention function against attention written out with masks, in float64."""

import math

import pytest
import torch

from verl.models.attention.packed import packed_attention
from verl.models.attention.packing import Packing, equal_length_runs

HEADS, KV_HEADS, SIZE = 4, 2, 8


def tensors(total: int, seed: int = 0, requires_grad: bool = False):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, HEADS, total, SIZE), (1, KV_HEADS, total, SIZE), (1, KV_HEADS, total, SIZE)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [t.requires_grad_() for t in made] if requires_grad else made


def written_out(query, key, value, lengths, window=None, softcap=None, sinks=None):
    """(1, T, H, D) by one big block-diagonal mask."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(ids))
    allowed = (ids[:, None] == ids[None]) & (place[:, None] >= place[None])
    if window is not None:
        allowed &= place[:, None] - place[None] < window
    key, value = key.repeat_interleave(HEADS // KV_HEADS, 1), value.repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(SIZE)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.where(allowed, scores, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp().view(1, HEADS, 1, 1)
    return torch.einsum("bhqk,bhkd->bqhd", weights / total, value)


def attend(query, key, value, lengths, **how):
    packing = Packing.of(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]), query.device)
    return packed_attention(torch.nn.Identity(), query, key, value, None, cu_seqlens=packing, **how)[0]


@pytest.mark.parametrize("lengths", [(5,), (1, 1, 1), (3, 3, 7, 2, 2, 2), (9, 1, 4)])
@pytest.mark.parametrize("how", [{}, {"sliding_window": 3}, {"softcap": 2.0}, {"sliding_window": 2, "softcap": 1.5}])
def test_attention_stays_inside_each_sequence(lengths, how):
    query, key, value = tensors(sum(lengths))
    expected = written_out(query, key, value, lengths, how.get("sliding_window"), how.get("softcap"))
    torch.testing.assert_close(attend(query, key, value, lengths, **how), expected)


def test_attention_sinks_take_their_share():
    query, key, value = tensors(9)
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
    expected = written_out(query, key, value, (4, 5), sinks=sinks)
    torch.testing.assert_close(attend(query, key, value, (4, 5), s_aux=sinks), expected)


def test_gradients_equal_those_of_the_written_out_mask():
    lengths = (4, 4, 1, 6)
    ours, theirs = tensors(15, requires_grad=True), tensors(15, requires_grad=True)
    direction = torch.randn(1, 15, HEADS, SIZE, dtype=torch.float64)
    (attend(*ours, lengths) * direction).sum().backward()
    (written_out(*theirs, lengths) * direction).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_boundary_tensor_is_as_good_as_a_packing():
    query, key, value = tensors(7)
    boundaries = torch.tensor([0, 3, 7], dtype=torch.int32)
    found, _ = packed_attention(torch.nn.Identity(), query, key, value, None, cu_seqlens=boundaries)
    torch.testing.assert_close(found, attend(query, key, value, (3, 4)))


def test_without_boundaries_each_row_is_one_sequence():
    query, key, value = tensors(6)
    found, _ = packed_attention(torch.nn.Identity(), query, key, value, None)
    torch.testing.assert_close(found, written_out(query, key, value, (6,)))


def test_restarting_positions_without_boundaries_are_refused():
    query, key, value = tensors(4)
    with pytest.raises(ValueError, match="cu_seqlens"):
        packed_attention(torch.nn.Identity(), query, key, value, None, position_ids=torch.tensor([[0, 1, 0, 1]]))


def test_a_cache_or_a_second_row_with_boundaries_is_refused():
    query, key, value = tensors(4)
    with pytest.raises(ValueError, match="use_cache=False"):
        packed_attention(torch.nn.Identity(), query[:, :, 3:], key, value, None, cu_seqlens=torch.tensor([0, 4]))


def test_equally_long_neighbours_share_one_call():
    assert equal_length_runs((3, 3, 7, 2, 2, 2)) == [(2, 3), (1, 7), (3, 2)]
