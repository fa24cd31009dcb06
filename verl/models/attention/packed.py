"""Attention over packed sequences: the only function in which packed tokens attend to each other.

`model(input_ids=(1, T), position_ids=(1, T), cu_seqlens=Packing | (N+1,) tensor, use_cache=False)` keeps sequences
apart in every model of `transformers` whose attention goes through the attention interface, once `use_packed_attention`
has selected it. The boundaries are a forward argument, so recomputation under gradient checkpointing sees them too.
With a `PrefixPacking` common prompts are computed once; with a `SplitPacking` ranks split the tokens (Ulysses).

Shapes: H query heads, K key/value heads, T packed tokens, D head size.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from verl.models.attention.packing import Packing
from verl.models.attention.prefix_sharing import PrefixPacking, attend_with_prefixes
from verl.models.attention.sequence_attention import (
    AttentionSpec,
    attend,
    attend_eager,
    attend_sequences,
)
from verl.models.attention.ulysses import SplitPacking, attend_split

PACKED_ATTENTION = "verl_packed"


def use_packed_attention(model: nn.Module) -> None:
    """Route every attention layer of `model` through `packed_attention`."""
    model.set_attn_implementation(PACKED_ATTENTION)


def packed_attention(
    module: nn.Module,
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, K, T, D)
    value: Tensor,  # (1, K, T, D)
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seqlens: Packing | PrefixPacking | SplitPacking | Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence -> ((1, T, H, D), None).

    Without `cu_seqlens` every row of the batch is one sequence, and `attention_mask` applies if given (generation with
    a cache). `softcap` bounds scores by tanh; `s_aux` (H,) are attention sinks.
    """
    spec = AttentionSpec(scaling, dropout, sliding_window, softcap, s_aux)
    if cu_seqlens is None:
        return _attend_unpacked(module, query, key, value, attention_mask, spec, kwargs)
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"packed attention takes one row of T tokens and no cache; got queries {tuple(query.shape)} and keys "
            f"{tuple(key.shape)}: pass input_ids (1, T) and use_cache=False"
        )
    if isinstance(cu_seqlens, SplitPacking):
        return attend_split(query, key, value, cu_seqlens, spec, _attend_packed), None
    if not isinstance(cu_seqlens, PrefixPacking):
        cu_seqlens = Packing.of(cu_seqlens, query.device)
    return _attend_packed(query, key, value, cu_seqlens, spec), None


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing | PrefixPacking, spec: AttentionSpec
) -> Tensor:
    if isinstance(packing, PrefixPacking):
        return attend_with_prefixes(query, key, value, packing, spec)
    return attend_sequences(query, key, value, packing, spec)


def _attend_unpacked(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec, kwargs: dict
) -> tuple[Tensor, None]:
    """Attention where each row is one sequence; masks and caches go to the library's function if it supports `spec`."""
    if mask is None and query.shape[2] == key.shape[2]:
        _refuse_reset_positions(kwargs.get("position_ids"))
        return attend(query, key, value, spec).transpose(1, 2).contiguous(), None
    if spec.is_plain_softmax:
        return sdpa_attention_forward(module, query, key, value, mask, spec.dropout, spec.scaling)
    return attend_eager(query, key, value, spec, mask).transpose(1, 2).contiguous(), None


def _refuse_reset_positions(position_ids: Tensor | None) -> None:
    if position_ids is not None and position_ids.device.type == "cpu" and bool((position_ids.diff(dim=-1) < 0).any()):
        raise ValueError(
            "position_ids restart inside a row but no cu_seqlens were passed: sequences would attend to each other. "
            "Pass cu_seqlens=... to the model's forward"
        )


def packed_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """None for whole sequences, whose boundaries `packed_attention` knows; a mask only for caches and padding."""
    if attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(batch_size, q_length, kv_length, q_offset=q_offset, attention_mask=attention_mask, **kwargs)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, packed_mask)
