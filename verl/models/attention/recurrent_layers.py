"""Layers that carry a state from token to token (linear attention, short convolutions), inside packed models.

Attention, MLP, experts and head run on packed tokens; only such a mixer unpacks them: sequences of about equal length
become the rows of one call. Rows are padded on the right, which a causal layer does not see, so the result is exact.

Shapes: N sequences of a call, L the longest of them, T packed tokens, D hidden.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from verl.models.attention.packing import Packing
from verl.models.attention.ulysses import SplitPacking, gather_tokens

MAX_PADDING = 1.25  # tokens computed in a call, with padding, over real tokens


def run_mixers_per_sequence(model: nn.Module, names: tuple[str, ...]) -> None:
    """Make every submodule whose name is in `names` accept `cu_seqlens`; other modules and parameters stay."""
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in names and not isinstance(module, _PerSequence):
            # Replaces the class, not the method: copies of the module then use their own parameters.
            module.__class__ = _per_sequence_class(type(module))


class _PerSequence:
    """Marks a class made by `_per_sequence_class`."""


@functools.cache
def _per_sequence_class(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        *args: Any,
        cu_seqlens: Packing | SplitPacking | Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        base_forward = functools.partial(kind.forward, self)
        if cu_seqlens is None:
            return base_forward(hidden_states, *args, **kwargs)
        mixer = functools.partial(base_forward, *args, **kwargs)
        if isinstance(cu_seqlens, SplitPacking):  # every rank runs it over all tokens and keeps its own slice
            group = cu_seqlens.group
            mixed = mix_per_sequence(mixer, gather_tokens(hidden_states, group), cu_seqlens.packing.lengths)
            return mixed.chunk(group.size(), 1)[group.rank()]
        return mix_per_sequence(mixer, hidden_states, Packing.of(cu_seqlens, hidden_states.device).lengths)

    return type(kind.__name__, (_PerSequence, kind), {"forward": forward})


def mix_per_sequence(mixer: Any, packed_1TD: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """(1, T, D): the output of a causal `mixer` (N, L, D) -> (N, L, D), run on each sequence alone."""
    groups = similar_length_runs(lengths)
    outputs = []
    for group, part in zip(groups, packed_1TD[0].split([sum(g) for g in groups]), strict=True):
        out_NLD = mixer(pad_sequence(part.split(group), batch_first=True))
        positions = torch.arange(max(group), device=part.device)
        outputs.append(out_NLD[positions < torch.tensor(group, device=part.device)[:, None]])
    return torch.cat(outputs)[None]


def similar_length_runs(lengths: tuple[int, ...]) -> list[list[int]]:
    """Consecutive lengths in groups whose padded size is at most `MAX_PADDING` times their tokens."""
    groups: list[list[int]] = []
    for length in lengths:
        candidate = [*groups[-1], length] if groups else []
        if candidate and max(candidate) * len(candidate) <= MAX_PADDING * sum(candidate):
            groups[-1] = candidate
        else:
            groups.append([length])
    return groups
