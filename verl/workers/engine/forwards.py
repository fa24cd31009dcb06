"""One micro-batch through the backbone: tokens in, one hidden state per token out, packed or padded.

Shapes: N sequences, T packed tokens, L the longest sequence, D hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from verl.data.batch import Batch
from verl.models.attention import Packing

ROWS = "_rows"  # column: where each token of a micro-batch was in the batch it is from


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a batch on the model's device, and where their tokens came from."""

    batch: Batch
    packing: Packing
    position_ids: Tensor  # (T,)

    @classmethod
    def of(cls, batch: Batch, indices: list[int], device: torch.device) -> "MicroBatch":
        """The sequences at `indices`, shortest first, so that equally long ones are attended to in one call."""
        lengths = batch.lengths.tolist()
        part = batch.select(sorted(indices, key=lengths.__getitem__))
        packing = Packing(tuple(part.lengths.tolist()), part.cu_seqlens.to(device, torch.int32))
        return cls(part.to(device), packing, part.position_ids().to(device))


def hidden_states(backbone: nn.Module, micro: MicroBatch, packed: bool) -> Tensor:
    """(T, D) last hidden states."""
    return _packed(backbone, micro) if packed else _padded(backbone, micro)


def _packed(backbone: nn.Module, micro: MicroBatch) -> Tensor:
    out = backbone(
        input_ids=micro.batch["tokens"][None],
        position_ids=micro.position_ids[None],
        cu_seqlens=micro.packing,
        use_cache=False,
    )
    return out.last_hidden_state.squeeze(0)


def _padded(backbone: nn.Module, micro: MicroBatch) -> Tensor:
    """Rows padded on the right: what comes after a sequence cannot reach it through causal layers."""
    tokens_NL = pad_sequence(micro.batch["tokens"].split(list(micro.packing.lengths)), batch_first=True)
    columns = torch.arange(tokens_NL.shape[1], device=tokens_NL.device)
    real_NL = columns[None] < micro.batch.lengths[:, None]
    out = backbone(input_ids=tokens_NL, attention_mask=real_NL.long(), use_cache=False)
    return out.last_hidden_state[real_NL]
