"""Objectives of fine-tuning: the likelihood of conversations, or the preference between two answers."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.algorithms.likelihood import LikelihoodLoss
from verl.algorithms.losses import TokenLoss
from verl.algorithms.preferences import DPOLoss, PairLoss, RewardModelLoss
from verl.config import DPOConfig, HFModelConfig, PreferenceConfig, SFTConfig
from verl.config.actor import SFT_BATCHING_KEYS
from verl.data.batch import Batch
from verl.data.conversations import Conversations, load_conversations
from verl.data.metrics import Metrics
from verl.data.micro_batches import MicroBatching
from verl.data.preferences import PreferencePairs, ScoredPairs
from verl.workers.engine_worker import micro_batching, with_loss_weights


class Objective(Protocol):
    """A loss with its rows, its model and its metrics."""

    row_name: str  # of many rows, for messages
    sequences_per_row: int  # about, to show how far a validation is
    model_type: str  # of the engine

    @property
    def loss(self) -> TokenLoss:
        """The loss that the ranks train with."""
        ...

    def read(self, files: str | Sequence[str], tokenizer: PreTrainedTokenizerBase, count: int) -> Conversations:
        """The rows of data files."""
        ...

    def model(self, tokenizer: PreTrainedTokenizerBase) -> HFModelConfig:
        """The model that is trained."""
        ...

    def micro_batching(self, ranks_per_sequence: int) -> MicroBatching:
        """The limits of a micro-batch."""
        ...

    def prepare(self, batch: Batch) -> Batch:
        """The batch of a whole step, with the columns that the loss reads."""
        ...

    def metrics(self, outputs: dict[str, Tensor], batch: Batch) -> Metrics:
        """Means over the batch, given the loss's outputs (T,) of the model."""
        ...

    def validate(self, outputs: dict[str, Tensor], batch: Batch) -> Metrics:
        """`loss` and those means."""
        ...


def objective_of(config: SFTConfig) -> Objective:
    """The objective of the program of `config`; RegistryError for an unknown loss."""
    return Pairs(config) if isinstance(config, PreferenceConfig) else Likelihood(config)


class Likelihood:
    """Token-mean negative log-likelihood of the assistant's tokens."""

    row_name, sequences_per_row, model_type, loss = "conversations", 1, "language_model", LikelihoodLoss()

    def __init__(self, config: SFTConfig):
        self.config = config

    def read(self, files: str | Sequence[str], tokenizer: PreTrainedTokenizerBase, count: int) -> Conversations:
        return load_conversations(files, tokenizer, self.config.data, count)

    def model(self, tokenizer: PreTrainedTokenizerBase) -> HFModelConfig:
        return self.config.model

    def micro_batching(self, ranks_per_sequence: int) -> MicroBatching:
        return micro_batching(self.config.data, SFT_BATCHING_KEYS, ranks_per_sequence)

    def prepare(self, batch: Batch) -> Batch:
        return with_loss_weights(batch, "token-mean", None)

    def metrics(self, outputs: dict[str, Tensor], batch: Batch) -> Metrics:
        return Metrics()

    def validate(self, outputs: dict[str, Tensor], batch: Batch) -> Metrics:
        metrics, mask = Metrics(), batch["loss_mask"]
        metrics.mean("loss", -float(outputs["logprobs"][mask].double().sum()), int(mask.sum()))
        return metrics


class Pairs:
    """Mean loss over preference pairs: of a policy against its reference (DPO), or of a reward model.

    The two answers of a pair are in one micro-batch.
    """

    row_name, sequences_per_row = "pairs", 2

    def __init__(self, config: PreferenceConfig):
        self.config, is_policy = config, isinstance(config, DPOConfig)
        self.loss: PairLoss = DPOLoss(config.loss) if is_policy else RewardModelLoss(config.loss)
        self.model_type = "language_model" if is_policy else "reward_model"

    def read(self, files: str | Sequence[str], tokenizer: PreTrainedTokenizerBase, count: int) -> Conversations:
        pairs = PreferencePairs(files, tokenizer, self.config.data, count)
        return pairs if self.model_type == "language_model" else ScoredPairs(pairs, self._pad_token_id(tokenizer))

    def model(self, tokenizer: PreTrainedTokenizerBase) -> HFModelConfig:
        model = self.config.model
        if self.model_type == "language_model":
            return model
        override = {**model.override_config, "pad_token_id": self._pad_token_id(tokenizer)}
        return dataclasses.replace(model, override_config=override)

    def _pad_token_id(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        """The token that `transformers` passes over to find the end of a sequence."""
        return self.config.model.override_config.get("pad_token_id", tokenizer.pad_token_id)

    def micro_batching(self, ranks_per_sequence: int) -> MicroBatching:
        micro = micro_batching(self.config.data, SFT_BATCHING_KEYS, ranks_per_sequence)
        return dataclasses.replace(
            micro, max_sequences=2 * micro.max_sequences if micro.max_sequences else None, keep_groups=True
        )

    def prepare(self, batch: Batch) -> Batch:
        preferred = torch.arange(batch.num_sequences) % 2 == 0
        return with_loss_weights(batch, "seq-mean-token-mean", None).with_columns(preferred=preferred)

    def metrics(self, outputs: dict[str, Tensor], batch: Batch) -> Metrics:
        return self.loss.metrics(outputs, batch)

    def validate(self, outputs: dict[str, Tensor], batch: Batch) -> Metrics:
        losses, metrics = self.loss.pair_losses(outputs, batch).double(), self.metrics(outputs, batch)
        metrics.mean("loss", float(losses.sum()), len(losses))
        return metrics
