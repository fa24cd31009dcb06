"""Random numbers that are a hash of what they are for, so that no order of work can change them."""

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection on 64 bits whose every output bit depends on every input bit."""
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK64
    return value ^ (value >> 31)


def stream_key(seed: int, request_id: int, sample: int) -> int:
    """The signed 64-bit key of one completion's random stream."""
    key = _mix((seed + _GOLDEN) & _MASK64)
    key = _mix((key + request_id * _GOLDEN + 1) & _MASK64)
    return _signed(_mix((key + sample * _GOLDEN + 2) & _MASK64))


def mixed(x: Tensor) -> Tensor:
    """`_mix` of each signed 64-bit number."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_MIX1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_MIX2)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def token_draws(seed: int, step: int, sequence: Tensor, position: Tensor) -> Tensor:
    """Uniform random numbers (T,) of tokens, by the seed, the step, and each token's sequence and position in it."""
    return uniforms(mixed(sequence + stream_key(seed, step, 0)), position)


def sequence_draws(seed: int, step: int, count: int) -> Tensor:
    """Uniform random numbers (count,) by the seed, the step, and the number of a sequence; apart from token_draws."""
    return uniforms(mixed(torch.arange(count) + stream_key(seed, step, 1)), torch.zeros(count, dtype=torch.int64))


def uniforms(keys_B: Tensor, positions_B: Tensor) -> Tensor:
    """Uniform random numbers (B,), float64 in [0, 1), that depend on (key, position) alone.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014), used as a counter-based hash.
    """
    x = mixed(positions_B * _signed(_GOLDEN) + keys_B)
    return ((x >> 12) & ((1 << 52) - 1)).to(torch.float64) * 2.0**-52
