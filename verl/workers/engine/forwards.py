"""Micro-batches, and one through the backbone: tokens in, one hidden state per token out, packed or padded.

Shapes: N sequences, T packed tokens, L the longest sequence, D hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from verl.data.batch import Batch
from verl.data.packing import MicroBatching, split_micro_batches
from verl.models.attention import Packing

ROWS = "_rows"  # column: where each token of a micro-batch was in the batch it is from


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a batch on the model's device, and where their tokens came from."""

    batch: Batch
    packing: Packing
    position_ids: Tensor  # (T,)
    is_dummy: bool = False  # there only so that every rank makes the same number of forwards; adds nothing
    is_last: bool = False  # of its batch

    @classmethod
    def of(cls, batch: Batch, indices: Sequence[int], device: torch.device, is_last: bool = False) -> "MicroBatch":
        """The sequences at `indices`, shortest first, so that equally long ones are attended to in one call."""
        lengths = batch.lengths.tolist()
        part = batch.select(sorted(indices, key=lengths.__getitem__)) if indices else _two_tokens(batch)
        packing = Packing(tuple(part.lengths.tolist()), part.cu_seqlens.to(device, torch.int32))
        return cls(part.to(device), packing, part.position_ids().to(device), not indices, is_last)


def micro_batches(
    batch: Batch,
    columns: Sequence[str],
    micro: MicroBatching,
    device: torch.device,
    most_on_any_rank: Callable[[int], int],
) -> Iterator[MicroBatch]:
    """The forwards of a shard, with only `columns`: those of the plan, or else those with something to learn from.

    Without a plan ranks may have different numbers of them: `most_on_any_rank` says how many there must be.
    """
    for name in columns:
        batch.require(name, "the stage that fills it")
    slim = batch.keep(columns).with_columns(**{ROWS: torch.arange(batch.num_tokens, device=batch.device)})
    parts = split_micro_batches(batch, micro)
    if micro.plan is None:
        sampled = batch.sum_per_sequence(batch["loss_mask"].int()).tolist()
        parts = [indices for indices in parts if any(sampled[i] for i in indices)]
        parts += [[]] * (most_on_any_rank(len(parts)) - len(parts))
    for number, indices in enumerate(parts, 1):
        yield MicroBatch.of(slim, indices, device, is_last=number == len(parts))


def _two_tokens(batch: Batch) -> Batch:
    """One sequence of two zeros, the second one sampled, with the columns of `batch`."""
    token = {n: column.new_zeros((2, *column.shape[1:])) for n, column in batch.token_columns.items()}
    token["loss_mask"] = torch.tensor([False, True])
    sequence = {n: column.new_zeros((1, *column.shape[1:])) for n, column in batch.sequence_columns.items()}
    return Batch(torch.tensor([0, 2]), token, sequence)


def place(out: dict[str, Tensor], columns: dict[str, Tensor], part: MicroBatch) -> None:
    """Put the outputs of a micro-batch where its tokens are in the batch."""
    if part.is_dummy:
        return
    rows = part.batch[ROWS].cpu()
    for name, whole in out.items():
        whole[rows] = columns[name].detach().to("cpu", whole.dtype)


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
