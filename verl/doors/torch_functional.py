"""Functions on padded tensors, where published losses and estimators import them."""

import torch
from torch import Tensor
from torch.nn import functional


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Sum of `values` weighted by `mask`; what is outside of it counts as 0, NaN too."""
    return (torch.where(mask.bool(), values, 0.0) * mask).sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean inside `mask`, whose sum gets 1e-8: 0 where it is empty."""
    return masked_sum(values, mask, axis) / (mask.sum(dim=axis) + 1e-8)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance inside `mask`, of the sample if `unbiased`; ValueError for one value or none, as that has none."""
    count, variance = mask.sum(), masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    if unbiased and count <= 1:
        raise ValueError(
            f"masked_var: the mask's sum is {count.item():g}, and the variance of a sample needs two values"
        )
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """`values` with the variance 1 inside `mask`, and the mean 0 unless `shift_mean` is False, which keeps theirs."""
    mean, variance = masked_mean(values, mask), masked_var(values, mask)
    return (values - mean) * torch.rsqrt(variance + 1e-8) + (0.0 if shift_mean else mean)


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Log-probs (nats, float32 at least) of `labels`, (..., V) and (...) -> (...). `inplace_backward` has no effect."""
    del inplace_backward
    rows = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return -functional.cross_entropy(rows, labels.flatten(), reduction="none").view(labels.shape)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of each distribution, (..., V) -> (...); a logit may be -inf."""
    return torch.distributions.Categorical(logits=logits.to(torch.promote_types(logits.dtype, torch.float32))).entropy()


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """`x` between two tensors, element by element."""
    return torch.clamp(x, tensor_min, tensor_max)


def get_response_mask(response_id: Tensor, eos_token: int | list[int] = 2, dtype: torch.dtype = torch.int64) -> Tensor:
    """1 up to the first `eos_token` of each row and on it, then 0."""
    is_end = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device)).int()
    return (is_end.cumsum(dim=1) - is_end == 0).to(dtype)


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False) -> Tensor:
    """The last dimension padded to `max_seq_len`; longer ones stay as they are."""
    missing = max(max_seq_len - tensors.shape[-1], 0)
    return functional.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)
