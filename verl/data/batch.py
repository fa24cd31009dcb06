"""N sequences laid end to end without padding, with named columns per token and per sequence.

`COLUMNS` in columns.py says what every column holds.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from verl.data.columns import writer_of
from verl.data.trajectory import Trajectory


class Batch:
    """N sequences, T tokens in all, and columns about them; `COLUMNS` describes each.

    Token columns have shape (T, ...): entry t is about token t. Sequence columns have shape (N, ...).
    `cu_seqlens` (N+1,) int64 holds the boundaries: sequence i is [cu_seqlens[i], cu_seqlens[i+1]).
    A batch is never changed in place; `with_columns` returns a new one that shares its tensors.
    """

    def __init__(self, cu_seqlens: Tensor, token_columns: dict[str, Tensor], sequence_columns: dict[str, Tensor]):
        self.cu_seqlens = cu_seqlens
        self.token_columns = token_columns
        self.sequence_columns = sequence_columns
        for name, column in token_columns.items():
            if column.shape[0] != self.num_tokens:
                raise ValueError(f"token column {name!r} has {column.shape[0]} rows for {self.num_tokens} tokens")
        for name, column in sequence_columns.items():
            if column.shape[0] != self.num_sequences:
                raise ValueError(f"column {name!r} has {column.shape[0]} rows for {self.num_sequences} sequences")
        duplicates = token_columns.keys() & sequence_columns.keys()
        if duplicates:
            raise ValueError(f"columns {sorted(duplicates)} are both per token and per sequence")

    @classmethod
    def pack(cls, trajectories: Sequence[Trajectory]) -> "Batch":
        """Columns tokens, loss_mask, rollout_logprobs; rewards, group_ids, conversations, rows, policy_versions."""
        if not trajectories:
            raise ValueError("there are no trajectories to pack")
        lengths = torch.tensor([t.tokens.shape[0] for t in trajectories], dtype=torch.int64)
        rewards = [float("nan") if t.reward is None else t.reward for t in trajectories]
        return cls(
            cumulative_lengths(lengths),
            {
                "tokens": torch.cat([t.tokens for t in trajectories]),
                "loss_mask": torch.cat([t.loss_mask for t in trajectories]),
                "rollout_logprobs": torch.cat([t.rollout_logprobs for t in trajectories]),
            },
            {
                "rewards": torch.tensor(rewards, dtype=torch.float32),
                "group_ids": torch.tensor([t.group_id for t in trajectories], dtype=torch.int64),
                "conversations": torch.tensor([t.conversation for t in trajectories], dtype=torch.int64),
                "rows": torch.tensor([t.row for t in trajectories], dtype=torch.int64),
                "policy_versions": torch.tensor([t.policy_version for t in trajectories], dtype=torch.int64),
            },
        )

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> Tensor:
        """(N,) int64 tokens per sequence."""
        return self.cu_seqlens.diff()

    @property
    def device(self) -> torch.device:
        return self.token_columns["tokens"].device

    def sequence_ids(self) -> Tensor:
        """(T,) which sequence each token belongs to."""
        return torch.repeat_interleave(torch.arange(self.num_sequences, device=self.cu_seqlens.device), self.lengths)

    def position_ids(self) -> Tensor:
        """(T,) position of each token inside its sequence, from 0."""
        starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.lengths)
        return torch.arange(self.num_tokens, device=self.cu_seqlens.device) - starts

    def sum_per_sequence(self, values: Tensor) -> Tensor:
        """(T,) -> (N,) sums over each sequence."""
        out = torch.zeros(self.num_sequences, dtype=values.dtype, device=values.device)
        return out.index_add_(0, self.sequence_ids().to(values.device), values)

    def sampled_mask(self) -> Tensor:
        """(T,) bool: True on every token that the policy sampled, also on those that rollout correction rejected."""
        mask = self["loss_mask"]
        return mask | self["rejected_tokens"] if "rejected_tokens" in self else mask

    def __contains__(self, name: str) -> bool:
        return name in self.token_columns or name in self.sequence_columns

    def __getitem__(self, name: str) -> Tensor:
        return self.require(name, "this stage")

    def require(self, name: str, produced_by: str) -> Tensor:
        """Column `name`, or an error that says which call fills it."""
        if name in self.token_columns:
            return self.token_columns[name]
        if name in self.sequence_columns:
            return self.sequence_columns[name]
        available = sorted(self.token_columns) + sorted(self.sequence_columns)
        raise KeyError(
            f"the batch has no column {name!r}; run {produced_by} first (columns so far: {', '.join(available)})"
        )

    def token_column(self, name: str) -> Tensor:
        """(T, ...) column `name`; one of values per sequence is repeated on the tokens of each."""
        if name not in self.sequence_columns:
            return self.require(name, writer_of(name))
        column = self.sequence_columns[name]
        return column[self.sequence_ids().to(column.device)]

    def with_columns(self, **columns: Tensor) -> "Batch":
        """A batch with these columns added or replaced; a column is per token when it has T rows.

        Where T == N (every sequence one token long) columns are per token unless already known per sequence.
        """
        token, sequence = dict(self.token_columns), dict(self.sequence_columns)
        for name, column in columns.items():
            per_token = column.shape[0] == self.num_tokens and name not in sequence
            (token if per_token else sequence)[name] = column
        return Batch(self.cu_seqlens, token, sequence)

    def select(self, indices: Sequence[int] | Tensor) -> "Batch":
        """The sequences at `indices`, in that order."""
        index = torch.as_tensor(indices, dtype=torch.int64, device=self.cu_seqlens.device)
        lengths = self.lengths[index]
        cu_seqlens = cumulative_lengths(lengths)
        moved = torch.repeat_interleave(self.cu_seqlens[:-1][index] - cu_seqlens[:-1], lengths)
        token_indices = torch.arange(int(cu_seqlens[-1]), device=index.device) + moved
        return Batch(
            cu_seqlens,
            {n: c.index_select(0, token_indices.to(c.device)) for n, c in self.token_columns.items()},
            {n: c.index_select(0, index.to(c.device)) for n, c in self.sequence_columns.items()},
        )

    def select_columns(self, names: Iterable[str]) -> "Batch":
        """The batch with only these columns (tokens and loss_mask always stay)."""
        wanted = {"tokens", "loss_mask", *names}
        return Batch(
            self.cu_seqlens,
            {n: c for n, c in self.token_columns.items() if n in wanted},
            {n: c for n, c in self.sequence_columns.items() if n in wanted},
        )

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(
            self.cu_seqlens.to(device),
            {n: c.to(device) for n, c in self.token_columns.items()},
            {n: c.to(device) for n, c in self.sequence_columns.items()},
        )

    @staticmethod
    def cat(batches: Sequence["Batch"]) -> "Batch":
        """Batches with the same columns, one after the other."""
        first = batches[0]
        for other in batches[1:]:
            differing = (first.token_columns.keys() ^ other.token_columns.keys()) | (
                first.sequence_columns.keys() ^ other.sequence_columns.keys()
            )
            if differing:
                raise ValueError(f"only some of the batches to be joined have the columns {sorted(differing)}")
        return Batch(
            cumulative_lengths(torch.cat([b.lengths for b in batches])),
            {n: torch.cat([b.token_columns[n] for b in batches]) for n in first.token_columns},
            {n: torch.cat([b.sequence_columns[n] for b in batches]) for n in first.sequence_columns},
        )


def cumulative_lengths(lengths: Tensor) -> Tensor:
    """(N,) lengths -> (N+1,) boundaries from 0."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
