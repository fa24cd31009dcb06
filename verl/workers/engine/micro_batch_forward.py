"""Micro-batches, their forward pass through the backbone, packed or padded, and the input of the head.

Shapes: N sequences, T packed tokens, U of them computed (fewer than T where prompts are shared), M needed by the head,
L the longest sequence, D hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from verl.data.batch import Batch
from verl.data.columns import writer_of
from verl.data.micro_batches import MicroBatching, sequence_groups, split_micro_batches
from verl.models.attention.packing import Packing
from verl.models.attention.prefix_sharing import (
    PrefixLayout,
    PrefixPacking,
    plan_prefix_sharing,
    prefix_sharing_order,
)
from verl.models.attention.ulysses import SplitPacking, sum_over_ranks
from verl.models.head.chosen_tokens import TopLogits
from verl.models.head.token_outputs import needed_positions

CPU_TOKEN_BUDGET = 4096  # upper bound for a micro-batch on a CPU, so that activations stay near the caches
TOKEN_INDICES = "_token_indices"  # column: index of each token in the batch that the micro-batch is from

AT_IDS = "logprobs_at_ids"  # output: about the tokens in the column teacher_top_ids
TOP_OUTPUTS = ("top_ids", "top_logprobs")


@dataclass(frozen=True)
class Targets:
    """The needed tokens, and the hidden states that predict them."""

    token_indices: Tensor  # (M,) in the batch
    hidden_rows: Tensor  # (M,) row of the hidden states that predicts each
    group: dist.ProcessGroup | None = None  # the ranks that have the other needed tokens


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a batch on the model's device, as input of the model."""

    batch: Batch
    packing: Packing | PrefixPacking | SplitPacking
    input_ids: Tensor  # (U,)
    position_ids: Tensor  # (U,)
    targets: Targets | None = None  # None: every token is computed, in the order of the batch
    is_dummy: bool = False  # only so that every rank runs the same number of forward passes; adds nothing
    is_last: bool = False  # of its batch

    @classmethod
    def of(
        cls,
        batch: Batch,
        indices: Sequence[int],
        device: torch.device,
        share: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> "MicroBatch":
        """The sequences at `indices`, shortest first, so that one attention call handles equally long ones.

        With `share`, shared prefixes are computed once; with a `group`, this rank computes its part of the tokens.
        Without indices it is a dummy.
        """
        lengths = batch.lengths.tolist()
        part = batch.select(sorted(indices, key=lengths.__getitem__)) if indices else _dummy_batch(batch)
        layout = None
        if share and indices:
            part = part.select(prefix_sharing_order(part))
            layout = plan_prefix_sharing(part, device)
        on_device, is_dummy = part.to(device), not indices
        if layout is None:
            packing = Packing.of_lengths(part.lengths.tolist(), device)
            if group is None:
                return cls(on_device, packing, on_device["tokens"], on_device.position_ids(), is_dummy=is_dummy)
            all_tokens = torch.arange(part.num_tokens)
            layout = PrefixLayout(packing, all_tokens, all_tokens)
        token_indices = needed_positions(part.cu_seqlens, part["loss_mask"], part["tokens"])
        hidden_rows = layout.computed_index[token_indices - 1]
        ids, positions = part["tokens"][layout.computed], part.position_ids()[layout.computed]
        packing = layout.packing
        if group is not None:
            packing = SplitPacking.over(packing, len(ids), group)
            ids, positions = packing.local_slice(ids), packing.local_slice(positions)
            hidden_rows = hidden_rows - group.rank() * len(ids)
            is_local = (hidden_rows >= 0) & (hidden_rows < len(ids))
            token_indices, hidden_rows = token_indices[is_local], hidden_rows[is_local]
        targets = Targets(token_indices.to(device), hidden_rows.to(device), group)
        return cls(on_device, packing, ids.to(device), positions.to(device), targets, is_dummy)

    @property
    def num_computed(self) -> int:
        """Tokens that go through the model, on all ranks that split them."""
        num_ranks = self.packing.group.size() if isinstance(self.packing, SplitPacking) else 1
        return len(self.input_ids) * num_ranks

    def dummy(self) -> "MicroBatch":
        """A dummy of two tokens in place of this micro-batch; it adds nothing."""
        return replace(MicroBatch.of(self.batch, (), self.input_ids.device), is_last=self.is_last)


def micro_batches(
    batch: Batch,
    columns: Sequence[str],
    micro: MicroBatching,
    device: torch.device,
    max_over_ranks: Callable[[int], int],
    sequence_group: dist.ProcessGroup | None = None,
    on_sequences: Callable[[int], None] = lambda done: None,
) -> Iterator[MicroBatch]:
    """The micro-batches of a shard, with only `columns`: those of the plan, or else those with sampled tokens.

    `on_sequences` is told after each how many sequences were given out so far.

    Without a plan, ranks may have different numbers of them: dummies fill up to the maximum (`max_over_ranks`).
    """
    for name in columns:
        batch.require(name, writer_of(name))
    selected = batch.select_columns(columns).with_columns(
        **{TOKEN_INDICES: torch.arange(batch.num_tokens, device=batch.device)}
    )
    parts = split_micro_batches(batch, limit_to_cpu_cache(batch, micro) if device.type == "cpu" else micro)
    if micro.plan is None:
        sampled = batch.sum_per_sequence(batch["loss_mask"].int()).tolist()
        parts = [indices for indices in parts if any(sampled[i] for i in indices)]
        parts += [[]] * (max_over_ranks(len(parts)) - len(parts))
    done = 0
    for number, indices in enumerate(parts, 1):
        micro_batch = MicroBatch.of(selected, indices, device, micro.share_prefixes, sequence_group)
        yield replace(micro_batch, is_last=number == len(parts))
        done += len(indices)
        on_sequences(done)


def limit_to_cpu_cache(batch: Batch, micro: MicroBatching) -> MicroBatching:
    """`micro` with its token budget limited to CPU_TOKEN_BUDGET, or to the longest sequence or group if larger."""
    if micro.plan is not None or micro.share_prefixes or micro.max_tokens is None:
        return micro
    longest = max((group.tokens for group in sequence_groups(batch, micro)), default=0)
    return replace(micro, max_tokens=min(micro.max_tokens, max(CPU_TOKEN_BUDGET, longest)))


def _dummy_batch(batch: Batch) -> Batch:
    """One sequence of two zeros, the second one sampled, with the columns of `batch`."""
    token = {n: column.new_zeros((2, *column.shape[1:])) for n, column in batch.token_columns.items()}
    token["loss_mask"] = torch.tensor([False, True])
    sequence = {n: column.new_zeros((1, *column.shape[1:])) for n, column in batch.sequence_columns.items()}
    return Batch(torch.tensor([0, 2]), token, sequence)


def new_column(name: str, num_tokens: int, dtype: torch.dtype, top: TopLogits | None) -> Tensor:
    """Zeros for the output `name` of all tokens."""
    wide = () if top is None or name not in TOP_OUTPUTS else (top.k,)
    return torch.zeros(num_tokens, *wide, dtype=torch.int64 if name == "top_ids" else dtype)


def write_outputs(out: dict[str, Tensor], columns: dict[str, Tensor], micro_batch: MicroBatch) -> None:
    """Write the outputs of a micro-batch at the positions of its tokens in the batch."""
    if micro_batch.is_dummy:
        return
    indices = micro_batch.batch[TOKEN_INDICES].cpu()
    for name, column in out.items():
        column[indices] = columns[name].detach().to("cpu", column.dtype)


@dataclass(frozen=True)
class HeadInput:
    """Hidden states in which row t predicts token t+1 of the same sequence, and the tokens of these sequences.

    The tokens are the micro-batch itself, or, if it does not compute all of them in order, the needed tokens as one
    sequence after a placeholder.
    """

    hidden: Tensor
    tokens: Tensor
    cu_seqlens: Tensor
    needed: Tensor
    token_indices: Tensor | None = None  # of these tokens in the batch; the first is a placeholder
    num_tokens: int = 0
    group: dist.ProcessGroup | None = None  # the ranks that have the other needed tokens

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(hidden states, tokens, cu_seqlens, needed), as the functions of the head take them."""
        return self.hidden, self.tokens, self.cu_seqlens, self.needed

    def select(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Columns (T,) of the micro-batch for these tokens."""
        indices = self.token_indices
        return columns if indices is None else {name: column[indices] for name, column in columns.items()}

    def scatter_to_columns(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Values for these tokens as columns (T,) of the micro-batch, summed over the group, zero elsewhere."""
        if self.token_indices is None:
            return values
        return {
            name: self.sum_over_group(
                value.new_zeros(self.num_tokens, *value.shape[1:]).index_copy(0, self.token_indices[1:], value[1:])
            )
            for name, value in values.items()
        }

    def sum_over_group(self, values: Tensor) -> Tensor:
        """The sum of `values` over the ranks of the group."""
        return values if self.group is None else sum_over_ranks(values, self.group)


def head_input(backbone: nn.Module, micro_batch: MicroBatch, packed: bool) -> HeadInput:
    """The input of the head: a micro-batch after the backbone."""
    hidden, batch = hidden_states(backbone, micro_batch, packed), micro_batch.batch
    if micro_batch.targets is None:
        return HeadInput(hidden, batch["tokens"], batch.cu_seqlens, batch["loss_mask"])
    token_indices = torch.cat([micro_batch.targets.token_indices.new_zeros(1), micro_batch.targets.token_indices])
    return HeadInput(
        hidden[micro_batch.targets.hidden_rows],
        batch["tokens"][token_indices],
        torch.tensor([0, len(token_indices)]),
        torch.ones_like(token_indices, dtype=torch.bool),
        token_indices,
        batch.num_tokens,
        micro_batch.targets.group,
    )


def hidden_states(backbone: nn.Module, micro_batch: MicroBatch, packed: bool) -> Tensor:
    """(U, D) last hidden states of the computed tokens."""
    return _packed(backbone, micro_batch) if packed else _padded(backbone, micro_batch)


def _packed(backbone: nn.Module, micro_batch: MicroBatch) -> Tensor:
    out = backbone(
        input_ids=micro_batch.input_ids[None],
        position_ids=micro_batch.position_ids[None],
        cu_seqlens=micro_batch.packing,
        use_cache=False,
    )
    return out.last_hidden_state.squeeze(0)


def _padded(backbone: nn.Module, micro_batch: MicroBatch) -> Tensor:
    """Sequences padded on the right: in causal layers, padding after a sequence does not affect it."""
    tokens_NL = pad_sequence(micro_batch.batch["tokens"].split(micro_batch.batch.lengths.tolist()), batch_first=True)
    columns = torch.arange(tokens_NL.shape[1], device=tokens_NL.device)
    real_NL = columns[None] < micro_batch.batch.lengths[:, None]
    out = backbone(input_ids=tokens_NL, attention_mask=real_NL.long(), use_cache=False)
    return out.last_hidden_state[real_NL]
