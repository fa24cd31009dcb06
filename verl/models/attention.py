"""Attention over sequences laid end to end: the one door through which packed tokens meet each other.

`model(input_ids=(1, T), position_ids=(1, T), cu_seqlens=Packing | (N+1,) tensor, use_cache=False)` keeps sequences
apart in every model of `transformers` whose attention goes through the attention interface, once `use_packed_attention`
has selected it. The boundaries are a forward argument, so recomputation under gradient checkpointing sees them too.
A `SharedPacking` in their place lays common prompts out once; a `SplitPacking` shares the tokens with other ranks.

Shapes: H query heads, K key/value heads, T packed tokens, D head size.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from verl.models.attention_kernels import Manner, Packing, attend, attend_sequences, scores_by_hand
from verl.models.prefix_sharing import SharedPacking, attend_shared
from verl.models.sequence_parallel import SplitPacking, attend_split

PACKED = "verl_packed"


def use_packed_attention(model: nn.Module) -> None:
    """Route every attention layer of `model` through `packed_attention`."""
    model.set_attn_implementation(PACKED)


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
    cu_seqlens: Packing | SharedPacking | SplitPacking | Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence -> ((1, T, H, D), None).

    Without `cu_seqlens` every row of the batch is one sequence and `attention_mask`, if any, decides (generation with
    a cache). `softcap` bounds scores by tanh, `s_aux` (H,) are attention sinks.
    """
    manner = Manner(scaling, dropout, sliding_window, softcap, s_aux)
    if cu_seqlens is None:
        return _unpacked(module, query, key, value, attention_mask, manner, kwargs)
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"packed attention takes one row of T tokens and no cache; got queries {tuple(query.shape)} and keys "
            f"{tuple(key.shape)}: pass input_ids (1, T) and use_cache=False"
        )
    if isinstance(cu_seqlens, SplitPacking):
        return attend_split(query, key, value, cu_seqlens, manner, _attend_packed), None
    if not isinstance(cu_seqlens, SharedPacking):
        cu_seqlens = Packing.of(cu_seqlens, query.device)
    return _attend_packed(query, key, value, cu_seqlens, manner), None


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing | SharedPacking, manner: Manner
) -> Tensor:
    if isinstance(packing, SharedPacking):
        return attend_shared(query, key, value, packing, manner)
    return attend_sequences(query, key, value, packing, manner)


def _unpacked(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, manner: Manner, kwargs: dict
) -> tuple[Tensor, None]:
    """Rows that are one sequence each: plain causal rows here, masks and caches by the library's own function."""
    if mask is None and query.shape[2] == key.shape[2]:
        _refuse_reset_positions(kwargs.get("position_ids"))
        return attend(query, key, value, manner).transpose(1, 2).contiguous(), None
    if manner.plain:
        return sdpa_attention_forward(module, query, key, value, mask, manner.dropout, manner.scaling)
    return scores_by_hand(query, key, value, manner, mask).transpose(1, 2).contiguous(), None


def _refuse_reset_positions(position_ids: Tensor | None) -> None:
    if position_ids is not None and position_ids.device.type == "cpu" and bool((position_ids.diff(dim=-1) < 0).any()):
        raise ValueError(
            "position_ids restart inside a row but no cu_seqlens were passed: the sequences would see each other. "
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
    """No mask for whole sequences: `packed_attention` knows what may see what. Masks only for caches and padding."""
    if attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(batch_size, q_length, kv_length, q_offset=q_offset, attention_mask=attention_mask, **kwargs)


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, packed_mask)
