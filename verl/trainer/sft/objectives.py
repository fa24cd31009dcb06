"""Objectives of fine-tuning: the likelihood of conversations, or the preference between two answers."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
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
from verl.workers.actor import with_schedule_length
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine_worker import EngineWorker, RankBatch, micro_batching, with_loss_weights
from verl.workers.reference import frozen_worker


class Objective(Protocol):
    """A loss with its rows, its model and its metrics. `load` comes before the calls that need a model."""

    row_name: str  # of many rows, for messages
    sequences_per_row: int  # about, to show how far a validation is
    model_type: str  # of the engine

    def read(self, files: str | Sequence[str], tokenizer: PreTrainedTokenizerBase, count: int) -> Conversations:
        """The rows of data files."""
        ...

    def micro_batching(self, ranks_per_sequence: int) -> MicroBatching:
        """The limits of a micro-batch."""
        ...

    def load(self, tokenizer: PreTrainedTokenizerBase, total_steps: int) -> EngineWorker:
        """Load this rank's models and return the trained one; the learning-rate schedule spans `total_steps`."""
        ...

    def prepare(self, batch: Batch) -> Batch:
        """The batch of a whole step, with the columns that the loss reads."""
        ...

    def update(self, rank_batch: RankBatch) -> Metrics:
        """One optimiser step."""
        ...

    def validate(self, rank_batch: RankBatch) -> Metrics:
        """`loss` and other means over this rank's part of a batch, without gradient."""
        ...


def objective_of(config: SFTConfig) -> Objective:
    """The objective of the program of `config`; RegistryError for an unknown loss."""
    return Pairs(config) if isinstance(config, PreferenceConfig) else Likelihood(config)


class Likelihood:
    """Token-mean negative log-likelihood of the assistant's tokens."""

    row_name, sequences_per_row, model_type = "conversations", 1, "language_model"
    worker: EngineWorker

    def __init__(self, config: SFTConfig):
        self.config = config

    def read(self, files: str | Sequence[str], tokenizer: PreTrainedTokenizerBase, count: int) -> Conversations:
        return load_conversations(files, tokenizer, self.config.data, count)

    def micro_batching(self, ranks_per_sequence: int) -> MicroBatching:
        return micro_batching(self.config.data, SFT_BATCHING_KEYS, ranks_per_sequence)

    def load(self, tokenizer: PreTrainedTokenizerBase, total_steps: int) -> EngineWorker:
        self.worker = build_worker(self.config, self.config.model, self.model_type, LikelihoodLoss(), total_steps)
        return self.worker

    def prepare(self, batch: Batch) -> Batch:
        return with_loss_weights(batch, "token-mean", None)

    def update(self, rank_batch: RankBatch) -> Metrics:
        return self.worker.update(rank_batch, 1.0)[0]

    def validate(self, rank_batch: RankBatch) -> Metrics:
        shard, metrics = rank_batch[0], Metrics()
        logprobs = self.worker.forward(rank_batch, ("logprobs",), 1.0)[1]["logprobs"]
        metrics.mean("loss", -float(logprobs[shard["loss_mask"]].double().sum()), int(shard["loss_mask"].sum()))
        return metrics


class Pairs:
    """Mean loss over preference pairs: of a policy against its reference (DPO), or of a reward model.

    The two answers of a pair are in one micro-batch. The reference is a frozen copy of the model, or, with LoRA, the
    model without its adapters.
    """

    row_name, sequences_per_row = "pairs", 2
    worker: EngineWorker

    def __init__(self, config: PreferenceConfig):
        self.config, is_policy = config, isinstance(config, DPOConfig)
        self.loss: PairLoss = DPOLoss(config.loss) if is_policy else RewardModelLoss(config.loss)
        self.model_type = "language_model" if is_policy else "reward_model"
        self.reference: EngineWorker | None = None

    def read(self, files: str | Sequence[str], tokenizer: PreTrainedTokenizerBase, count: int) -> Conversations:
        pairs = PreferencePairs(files, tokenizer, self.config.data, count)
        return pairs if self.model_type == "language_model" else ScoredPairs(pairs, self._pad_token_id(tokenizer))

    def micro_batching(self, ranks_per_sequence: int) -> MicroBatching:
        micro = micro_batching(self.config.data, SFT_BATCHING_KEYS, ranks_per_sequence)
        return dataclasses.replace(
            micro, max_sequences=2 * micro.max_sequences if micro.max_sequences else None, keep_groups=True
        )

    def load(self, tokenizer: PreTrainedTokenizerBase, total_steps: int) -> EngineWorker:
        model = self.config.model
        if self.model_type == "reward_model":
            override = {**model.override_config, "pad_token_id": self._pad_token_id(tokenizer)}
            model = dataclasses.replace(model, override_config=override)
        self.worker = build_worker(self.config, model, self.model_type, self.loss, total_steps)
        if "ref_logprobs" in self.loss.columns:
            self.reference = frozen_worker(self.worker)
        return self.worker

    def _pad_token_id(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        """The token that `transformers` passes over to find the end of a sequence."""
        return self.config.model.override_config.get("pad_token_id", tokenizer.pad_token_id)

    def prepare(self, batch: Batch) -> Batch:
        preferred = torch.arange(batch.num_sequences) % 2 == 0
        return with_loss_weights(batch, "seq-mean-token-mean", None).with_columns(preferred=preferred)

    def update(self, rank_batch: RankBatch) -> Metrics:
        shard, micro = self.with_reference(rank_batch)
        metrics, outputs = self.worker.update((shard, micro), 1.0)
        return metrics.merge(self.loss.metrics(outputs, shard))

    def validate(self, rank_batch: RankBatch) -> Metrics:
        shard, micro = self.with_reference(rank_batch)
        outputs = self.worker.forward((shard, micro), self.loss.outputs, 1.0)[1]
        losses, metrics = self.loss.pair_losses(outputs, shard).double(), self.loss.metrics(outputs, shard)
        metrics.mean("loss", float(losses.sum()), len(losses))
        return metrics

    def with_reference(self, rank_batch: RankBatch) -> RankBatch:
        """The rank's sequences with `ref_logprobs`, if the loss needs them."""
        if self.reference is None:
            return rank_batch
        shard, micro = rank_batch
        logprobs = self.reference.forward(rank_batch, ("logprobs",), 1.0)[1]["logprobs"]
        return shard.with_columns(ref_logprobs=logprobs), micro


def build_worker(
    config: SFTConfig, model: HFModelConfig, model_type: str, loss: TokenLoss, total_steps: int
) -> EngineWorker:
    """The engine of this rank."""
    if config.data.pad_mode == "right":
        model = dataclasses.replace(model, use_remove_padding=False)
    optim = with_schedule_length(config.optim, total_steps)
    settings = config.training_engine
    engine = EngineRegistry.new(model_type, config.engine.strategy, model, settings, optim, config.checkpoint)
    return EngineWorker(engine, loss)
