"""Supervised fine-tuning: batches of conversations, one optimiser step each, on the same engine as the policy."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.algorithms.aggregation import loss_weights
from verl.algorithms.likelihood import LikelihoodLoss
from verl.config import SFTConfig
from verl.config.check import check_supported
from verl.data.batch import Batch
from verl.data.conversations import ConversationDataset
from verl.data.metrics import Metrics
from verl.data.packing import MicroBatching
from verl.models.load import load_tokenizer
from verl.observe.memory import memory_metrics
from verl.observe.progress import Progress
from verl.observe.timers import StageTimer
from verl.observe.tracking import Tracking
from verl.trainer.resume import find_resume, prune, read_state, save_checkpoint
from verl.utils.errors import DataError
from verl.utils.seeds import derive_seed
from verl.workers.actor import schedule_over
from verl.workers.engine.base import BaseEngine, EngineRegistry


class SFTTrainer:
    """Steps over epochs of shuffled conversations; `state_dict` restores the order exactly."""

    def __init__(
        self,
        config: SFTConfig,
        engine: BaseEngine,
        train: ConversationDataset,
        validation: ConversationDataset | None,
        tracking: Tracking,
    ):
        self.config, self.engine, self.train_set, self.validation_set = config, engine, train, validation
        self.tracking = tracking
        self.global_step = 0
        self.root = Path(config.trainer.default_local_dir)
        self.steps_per_epoch = len(train) // config.data.train_batch_size
        if self.steps_per_epoch == 0:
            raise DataError(
                f"data.train_batch_size={config.data.train_batch_size} is more than the {len(train)} training rows; "
                f"lower it to at most {len(train)}"
            )
        limit = config.trainer.total_training_steps
        self.total_steps = limit if limit is not None else config.trainer.total_epochs * self.steps_per_epoch
        data = config.data
        self.micro = (
            MicroBatching(max_tokens=data.max_token_len_per_gpu)
            if data.use_dynamic_bsz
            else MicroBatching(max_sequences=data.micro_batch_size_per_gpu)
        )

    def fit(self) -> dict[str, float]:
        """Train to the last step; returns the metrics of the last one."""
        self.resume()
        metrics: dict[str, float] = {}
        with Progress(self.total_steps, self.global_step) as progress:
            while self.global_step < self.total_steps:
                metrics = self.one_step(progress)
        return metrics

    def one_step(self, progress: Progress) -> dict[str, float]:
        """One optimiser step, with validation and a checkpoint when they are due."""
        timer = StageTimer(on_enter=progress.stage)
        with timer("step"):
            batch = self.next_batch()
            with timer("update"):
                metrics = self.update(batch).values()
            self.global_step += 1
            last = self.global_step >= self.total_steps
            if self.validation_set and self.due(self.config.trainer.test_freq, last):
                with timer("testing"):
                    metrics["val/loss"] = self.validate()
            if last or self.due(self.config.trainer.save_freq, last):
                with timer("save_checkpoint"):
                    self.save()
        metrics["train/global_tokens"] = float(batch.num_tokens)
        metrics["perf/throughput"] = batch.num_tokens / timer.seconds["update"]
        metrics.update(timer.metrics())
        metrics.update(memory_metrics())
        self.tracking.log(metrics, self.global_step)
        progress.step(self.global_step, metrics)
        return metrics

    def next_batch(self) -> Batch:
        """The conversations of the next step: a permutation per epoch that follows from the seed."""
        epoch, place = divmod(self.global_step, self.steps_per_epoch)
        keys = np.random.PCG64(derive_seed(self.config.trainer.seed, "sft order", epoch)).random_raw(
            len(self.train_set)
        )
        order = np.argsort(keys, kind="stable")
        size = self.config.data.train_batch_size
        return Batch.pack([self.train_set[i] for i in order[place * size : (place + 1) * size].tolist()])

    def update(self, batch: Batch) -> Metrics:
        """Token-mean negative log-likelihood over the whole batch, one optimiser step."""
        batch = batch.with_columns(loss_weights=loss_weights(batch, "token-mean"))
        with self.engine.train_mode():
            result = self.engine.forward_backward(batch, LikelihoodLoss(), self.micro)
            metrics = result.metrics.merge(self.engine.optim_step()).prefixed("train/")
            self.engine.lr_scheduler_step()
        return metrics

    def validate(self) -> float:
        """Mean negative log-likelihood per trained token of the validation rows."""
        assert self.validation_set is not None
        total, count, size = 0.0, 0, self.config.data.train_batch_size
        with self.engine.eval_mode():
            for start in range(0, len(self.validation_set), size):
                stop = min(start + size, len(self.validation_set))
                batch = Batch.pack([self.validation_set[i] for i in range(start, stop)])
                logprobs = self.engine.forward(batch, ("logprobs",), self.micro)["logprobs"]
                total -= float(logprobs[batch["loss_mask"]].double().sum())
                count += int(batch["loss_mask"].sum())
        return total / count

    def due(self, frequency: int | str, last: bool) -> bool:
        """Every `frequency` steps, or `after_each_epoch`; at the last step too unless it is off."""
        every = self.steps_per_epoch if frequency == "after_each_epoch" else int(frequency)
        return every > 0 and (last or self.global_step % every == 0)

    def save(self) -> None:
        """The engine's files in global_step_N/model, the step beside them."""
        contents = list(self.config.checkpoint.save_contents)
        state: dict[str, Any] = {"global_step": self.global_step, "digest": self.train_set.digest}
        save_checkpoint(self.root, self.global_step, state, {"model": lambda path: self.engine.save(path, contents)})
        prune(self.root, {"model": self.config.trainer.max_ckpt_to_keep})

    def resume(self) -> None:
        """Continue from the newest checkpoint where one is wanted and there."""
        folder = find_resume(self.config.trainer)
        if folder is not None:
            state = read_state(folder)
            if state["digest"] != self.train_set.digest:
                raise DataError(
                    f"the training rows changed since {folder} was saved; restore them or use another folder"
                )
            self.engine.load(folder / "model", list(self.config.checkpoint.save_contents))
            self.global_step = state["global_step"]
        self.tracking.rewind(self.global_step)


def build_sft(config: SFTConfig) -> SFTTrainer:
    """Model, rows and trackers of a run."""
    check_supported(config)
    torch.manual_seed(config.trainer.seed)
    tokenizer = load_tokenizer(config.model)
    data, settings = config.data, config.trainer
    train = ConversationDataset(data.train_files, tokenizer, data, data.train_max_samples)
    held_out = ConversationDataset(data.val_files, tokenizer, data, data.val_max_samples) if data.val_files else None
    tracking = Tracking(settings.project_name, settings.experiment_name, list(settings.logger), config)
    engine_class = EngineRegistry.get_engine_cls("language_model", config.engine.strategy)
    trainer = SFTTrainer(config, None, train, held_out, tracking)  # type: ignore[arg-type]
    optim = schedule_over(config.optim, trainer.total_steps)
    trainer.engine = engine_class(config.model, config.engine, optim, config.checkpoint)
    trainer.engine.initialize()
    return trainer
