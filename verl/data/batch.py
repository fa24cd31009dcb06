"""N sequences laid end to end without padding, with named columns per token and per sequence.

`COLUMNS` says what every column holds, which function writes it and which functions read it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.data.trajectory import Trajectory


@dataclass(frozen=True)
class Column:
    """What a column of `Batch` holds. N sequences, T tokens in all; entry t of a token column is about token t.

    Log-probs are natural logarithms (nats) at the sampling temperature.
    """

    shape: str  # "(T,)", "(N,)" or "(N, 2)"
    dtype: str  # as torch names it; float32 becomes float64 where a model computes in float64
    meaning: str
    written_by: tuple[str, ...]  # functions that add or replace the column; none where only a user's code does
    read_by: tuple[str, ...]  # the functions that depend on it most
    scope: str = "step"  # of which batch it is a column: the step's, a mini-batch, a micro-batch, preference pairs
    asked: bool = False  # True: only there when the advantage estimator or the policy loss asks for it
    masked: float | None = None  # value where loss_mask is False; None where such positions have values of their own


REWARD_PART = "reward_parts."  # and the name of a part of the reward: a column of its own

COLUMNS: dict[str, Column] = {
    "tokens": Column(
        "(T,)",
        "int64",
        "token ids of prompts, completions and tool results, in order",
        written_by=("Batch.pack",),
        read_by=("MicroBatch.of", "head_input", "prompt_groups", "Ledger.append"),
    ),
    "loss_mask": Column(
        "(T,)",
        "bool",
        "True on tokens that the policy sampled; in fine-tuning, on tokens that are trained",
        written_by=("Batch.pack",),
        read_by=(
            "MicroBatch.of",
            "head_input",
            "last_sampled_positions",
            "gae",
            "on_sampled_tokens",
            "loss_weights",
            "data_metrics",
            "Ledger.append",
        ),
        masked=0,
    ),
    "rollout_logprobs": Column(
        "(T,)",
        "float32",
        "log-prob of the token by the rollout engine when it sampled it, nats",
        written_by=("Batch.pack",),
        read_by=("PPOTrainer.evaluate", "mismatch_metrics", "Ledger.append"),
        masked=0,
    ),
    "old_logprobs": Column(
        "(T,)",
        "float32",
        "log-prob by the policy before this step's update, nats; added after the update where its own forward pass "
        "gives the same numbers; a copy of rollout_logprobs with rollout_correction.bypass_mode",
        written_by=("PPOTrainer.evaluate", "PPOTrainer.update"),
        read_by=("apply_kl_in_reward", "ActorLoss.__call__", "PPOTrainer.step_metrics", "Ledger.append"),
        masked=0,
    ),
    "entropy": Column(
        "(T,)",
        "float32",
        "entropy of the policy's distribution before this step's update, from which the token was sampled, nats",
        written_by=("PPOTrainer.evaluate", "PPOTrainer.update"),
        read_by=("entropy_metrics",),
        masked=0,
    ),
    "sum_pi_squared": Column(
        "(T,)",
        "float32",
        "sum over the vocabulary of the squared probabilities by the policy before this step's update, 0 to 1",
        written_by=("PPOTrainer.evaluate",),
        read_by=("_otb", "AdvantageAdapter.arguments"),
        masked=0,
        asked=True,
    ),
    "ref_logprobs": Column(
        "(T,)",
        "float32",
        "log-prob by the frozen reference policy, nats",
        written_by=("PPOTrainer.evaluate", "Pairs.with_reference"),
        read_by=("apply_kl_in_reward", "ActorLoss.__call__", "DPOLoss.rewards", "Ledger.append"),
        masked=0,
    ),
    "values": Column(
        "(T,)",
        "float32",
        "the critic's estimate of the return before the token is sampled, in units of reward",
        written_by=("PPOTrainer.evaluate",),
        read_by=("gae", "ValueLoss.__call__", "data_metrics", "Ledger.append"),
        masked=0,
    ),
    "token_rewards": Column(
        "(T,)",
        "float32",
        "reward of the sequence on its last sampled token (on its last token if none was sampled), "
        "minus the KL penalty per token with use_kl_in_reward",
        written_by=("with_token_rewards", "apply_kl_in_reward"),
        read_by=("gae", "sequence_scores", "data_metrics"),
        masked=0,
    ),
    "advantages": Column(
        "(T,)",
        "float32",
        "how much better than expected the token was, by algorithm.adv_estimator",
        written_by=("compute_advantages",),
        read_by=("ActorLoss.__call__", "data_metrics", "Ledger.append"),
        masked=0,
    ),
    "returns": Column(
        "(T,)",
        "float32",
        "what the critic learns to predict, in units of reward",
        written_by=("compute_advantages",),
        read_by=("ValueLoss.__call__", "data_metrics"),
        masked=0,
    ),
    "loss_weights": Column(
        "(T,)",
        "float32",
        "factor of the token's loss by loss_agg_mode, over one mini-batch: the loss is the sum of weight x loss",
        scope="mini-batch",
        written_by=("with_loss_weights",),
        read_by=("ActorLoss.__call__", "ValueLoss.__call__", "LikelihoodLoss.__call__", "TokenMetricSums.add"),
        masked=0,
    ),
    "current_logprobs": Column(
        "(T,)",
        "float32",
        "log-prob by the policy at the beginning of the mini-batch, nats; for a loss that chooses tokens",
        scope="mini-batch",
        written_by=("Actor.with_choice",),
        read_by=("token_covariances", "choose_for_clip_cov"),
        masked=0,
        asked=True,
    ),
    "chosen_tokens": Column(
        "(T,)",
        "bool",
        "True on the tokens that the policy loss has chosen over the mini-batch",
        scope="mini-batch",
        written_by=("with_chosen_tokens",),
        read_by=("clip_cov", "kl_cov"),
        masked=0,
        asked=True,
    ),
    "token_indices": Column(
        "(T,)",
        "int64",
        "position of the token in the step's batch, kept through the cut into mini-batches",
        scope="mini-batch",
        written_by=("Actor.update",),
        read_by=("Actor.update",),
    ),
    "_token_indices": Column(
        "(T,)",
        "int64",
        "position of the token in the shard that its micro-batch was cut from",
        scope="micro-batch",
        written_by=("micro_batches",),
        read_by=("write_outputs",),
    ),
    "rewards": Column(
        "(N,)",
        "float32",
        "score of the sequence by the reward function, NaN where it has none; of a chosen answer, the row's margin",
        written_by=("Batch.pack",),
        read_by=("with_token_rewards", "data_metrics", "trajectory_columns", "PairLoss.pair_losses"),
    ),
    "group_ids": Column(
        "(N,)",
        "int64",
        "the same number for all sequences that answer one prompt",
        written_by=("Batch.pack",),
        read_by=("group_numbers", "MiniBatches.split", "trajectory_columns", "sequence_groups", "pair_indices"),
    ),
    "preferred": Column(
        "(N,)",
        "bool",
        "True on the chosen answer of a preference pair, False on the rejected one",
        scope="preference pairs",
        written_by=("Pairs.prepare",),
        read_by=("pair_indices",),
    ),
    "rows": Column(
        "(N,)",
        "int64",
        "index of the prompt's row in the data set; -1 where there is none",
        written_by=("Batch.pack",),
        read_by=("trajectory_columns",),
    ),
    "policy_versions": Column(
        "(N, 2)",
        "int64",
        "version of the oldest and of the newest weights that sampled a token of the sequence",
        written_by=("Batch.pack",),
        read_by=("PPOTrainer.step_metrics", "trajectory_columns"),
    ),
    "reward_parts.NAME": Column(
        "(N,)",
        "float32",
        "the number that the reward function returned as NAME beside the score; `score` is the score itself",
        written_by=("with_reward_columns",),
        read_by=("reward_parts_of_gdpo",),
        asked=True,
    ),
    "reward_baselines": Column(
        "(N,)",
        "float32",
        "reward of a greedy answer to the same prompt",
        written_by=("with_reward_columns",),
        read_by=("remax", "AdvantageAdapter.arguments"),
        asked=True,
    ),
}


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
        """Columns tokens, loss_mask, rollout_logprobs; rewards, group_ids, rows and policy_versions. See COLUMNS."""
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


def writer_of(name: str) -> str:
    """What fills column `name`, for messages."""
    key = REWARD_PART + "NAME" if name.startswith(REWARD_PART) else name
    if key not in COLUMNS:
        return "the stage that fills it"
    return " or ".join(COLUMNS[key].written_by) or "your own code"


def cumulative_lengths(lengths: Tensor) -> Tensor:
    """(N,) lengths -> (N+1,) boundaries from 0."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
