"""The training engine of one device: micro-batches through a model, exact sums, one optimiser step.

Shapes: T packed tokens of the batch given, M of a micro-batch that the loss is about.
"""

import contextlib
import importlib
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl.algorithms.losses import TokenLoss
from verl.config import CheckpointConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.data.packing import MicroBatching, split_micro_batches
from verl.models.heads import head_mode, token_logprobs, token_loss_one_pass, token_values
from verl.models.load import build_config, dtype_of, load_causal_lm, load_value_model
from verl.models.placement import move
from verl.models.registry import check_head, logit_divisor, runs_packed
from verl.plugin.platform import get_platform
from verl.utils.errors import ConfigError
from verl.workers.engine import checkpoint
from verl.workers.engine.base import BaseEngine, TrainResult
from verl.workers.engine.forwards import ROWS, MicroBatch, hidden_states
from verl.workers.engine.optimizer import (
    LearningRateSchedule,
    build_optimizer,
    clip_gradients,
    first_non_finite,
    gradient_norm,
)
from verl.workers.engine.precision import MasterWeights

logger = logging.getLogger(__name__)


class TorchEngine(BaseEngine):
    """A model of `transformers` on one device. Derived classes say which head it has."""

    has_value_head = False

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: FSDPEngineConfig,
        optimizer_config: FSDPOptimizerConfig | None = None,
        checkpoint_config: CheckpointConfig | None = None,
    ):
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        refuse_unfinished(model_config, engine_config)
        self.trains = not engine_config.forward_only and optimizer_config is not None
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: LearningRateSchedule | None = None
        self.skipped_steps = 0

    # --- building -----------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Loads the model on the platform's device and builds optimiser and schedule."""
        self.device = own_device()
        self.compute_dtype = compute_dtype(self.engine_config, self.device)
        self.output_dtype = torch.promote_types(self.compute_dtype, torch.float32)
        if self.engine_config.full_determinism:
            torch.use_deterministic_algorithms(True)
        self.model = move(self._build_model(), self.device)
        self.packed = runs_packed(self.model.config, self.model_config.use_remove_padding)
        self.weights = MasterWeights(self.model, self.compute_dtype)
        self.head_mode = self._head_mode()
        if not self.trains:
            self.model.requires_grad_(False)
            return
        if self.model_config.enable_gradient_checkpointing:
            self.model.gradient_checkpointing_enable(
                {"use_reentrant": False, "preserve_rng_state": has_dropout(self.model)}
            )
        assert self.optimizer_config is not None
        self.optimizer = build_optimizer(self.weights.trainable, self.optimizer_config)
        self.lr_scheduler = LearningRateSchedule(self.optimizer, self.optimizer_config)

    def _build_model(self) -> nn.Module:
        settings = self.model_config
        for name in _listed(settings.external_lib):
            importlib.import_module(name)
        config, init_random = build_config(settings)
        if not self.has_value_head:
            check_head(config)
        get_platform().apply_model_patches(config.model_type)
        load = load_value_model if self.has_value_head else load_causal_lm
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.engine_config.seed)
            return load(
                settings.path,
                dtype_of(self.engine_config.model_dtype, "model_dtype"),
                config,
                init_random,
                packed=settings.use_remove_padding,
            )

    def _head_mode(self) -> str:
        config = self.engine_config
        if config.head_mode != "auto":
            return config.head_mode
        return head_mode(
            self.model_config.use_fused_kernels,
            config.entropy_from_logits_with_chunking,
            config.entropy_checkpointing,
            self.device,
        )

    @property
    def chunk_size(self) -> int | None:
        """Rows of logits at once, where the configuration asks for a number; None leaves it to the head."""
        config = self.engine_config
        return config.entropy_from_logits_chunk_size if config.entropy_from_logits_with_chunking else None

    # --- forward ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(
        self,
        batch: Batch,
        outputs: Sequence[str] = ("logprobs",),
        micro: MicroBatching | None = None,
        temperature: float = 1.0,
    ) -> dict[str, Tensor]:
        """Each of `outputs` as (T,) on the batch's device, zero where loss_mask is False; float32 (or float64)."""
        self._set_training(False)
        out = {name: torch.zeros(batch.num_tokens, dtype=self.output_dtype) for name in outputs}
        for part in self._micro_batches(batch, (), micro):
            columns = self._outputs(part, tuple(outputs), temperature)
            _place(out, columns, part)
        return {name: column.to(batch.device) for name, column in out.items()}

    def forward_backward(
        self, batch: Batch, loss: TokenLoss, micro: MicroBatching | None = None, temperature: float = 1.0
    ) -> TrainResult:
        """Adds the gradient of the summed loss of `batch`; the sum is the same however `micro` splits it."""
        if not self.trains:
            raise ConfigError("this engine only runs forward (forward_only, or no optimizer); it cannot train")
        self._set_training(True)
        out = {name: torch.zeros(batch.num_tokens, dtype=self.output_dtype) for name in loss.outputs}
        totals = _Totals()
        present = tuple(name for name in loss.optional_columns if name in batch)
        for part in self._micro_batches(batch, (*loss.columns, *present, "loss_weights"), micro):
            loss_sum, columns, token_metrics = self._loss(part, loss, temperature)
            loss_sum.backward()
            totals.add(loss_sum, token_metrics, part)
            _place(out, columns, part)
        metrics = totals.metrics(num_tokens=int(batch["loss_mask"].sum()))
        return TrainResult(metrics, {name: column.to(batch.device) for name, column in out.items()})

    def _micro_batches(self, batch: Batch, columns: Sequence[str], micro: MicroBatching | None) -> Iterator[MicroBatch]:
        """Micro-batches with something to learn from; the others would add nothing."""
        for name in columns:
            batch.require(name, "the stage that fills it")
        slim = batch.keep(columns).with_columns(**{ROWS: torch.arange(batch.num_tokens, device=batch.device)})
        sampled = batch.sum_per_sequence(batch["loss_mask"].int()).tolist()
        for indices in split_micro_batches(batch, micro or MicroBatching()):
            if any(sampled[i] for i in indices):
                yield MicroBatch.of(slim, indices, self.device)

    def _outputs(self, part: MicroBatch, names: tuple[str, ...], temperature: float) -> dict[str, Tensor]:
        """The model's outputs about the tokens of a micro-batch, zero where loss_mask is False."""
        hidden_TD = hidden_states(self._backbone, part, self.packed)
        batch = part.batch
        if self.has_value_head:
            _only(names, ("values",), "a critic")
            head = self.model.score
            return {"values": token_values(hidden_TD, head.weight, head.bias, batch.cu_seqlens, batch["loss_mask"])}
        _only(names, ("logprobs", "entropy"), "a language model")
        return token_logprobs(
            hidden_TD,
            self._head.weight,
            batch["tokens"],
            batch.cu_seqlens,
            batch["loss_mask"],
            self._divisor(temperature),
            mode=self.head_mode,
            chunk_size=self.chunk_size,
            with_entropy="entropy" in names,
            bias=self._head.bias,
        )

    def _loss(
        self, part: MicroBatch, loss: TokenLoss, temperature: float
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """(0-d loss attached to the graph, outputs (T,), token metrics (T,)); metrics are 0 outside loss_mask."""
        batch = part.batch
        present = {name for name in loss.optional_columns if name in batch}
        columns = {name: batch[name] for name in {*loss.columns, *present, "loss_weights"}}
        if loss.per_token and not self.has_value_head and self.head_mode != "eager":
            return self._loss_one_pass(part, loss, columns, temperature)
        outputs = self._outputs(part, loss.outputs, temperature)
        losses, metrics = loss(outputs, columns, batch.cu_seqlens)
        mask = batch["loss_mask"]
        return (
            losses.masked_fill(~mask, 0.0).sum(),
            outputs,
            {name: value.masked_fill(~mask, 0.0) for name, value in metrics.items()},
        )

    def _loss_one_pass(
        self, part: MicroBatch, loss: TokenLoss, columns: dict[str, Tensor], temperature: float
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        batch = part.batch
        return token_loss_one_pass(
            hidden_states(self._backbone, part, self.packed),
            self._head.weight,
            batch["tokens"],
            batch.cu_seqlens,
            batch["loss_mask"],
            loss,
            columns,
            self._divisor(temperature),
            with_entropy="entropy" in loss.outputs,
            chunk_size=self.chunk_size,
            bias=self._head.bias,
        )

    @property
    def _backbone(self) -> nn.Module:
        return self.model.base_model

    @property
    def _head(self) -> nn.Linear:
        return self.model.get_output_embeddings()

    def _divisor(self, temperature: float) -> float:
        return temperature * logit_divisor(self.model.config)

    def _set_training(self, training: bool) -> None:
        if self.model.training != training:
            self.model.train(training)

    # --- optimiser ----------------------------------------------------------------------------------------------

    def optim_step(self) -> Metrics:
        """Clips, steps and empties the gradient; one that is not finite changes nothing, is counted and named."""
        assert self.optimizer is not None and self.optimizer_config is not None, "initialize() a training engine first"
        metrics = Metrics()
        norm = gradient_norm(self.weights.trainable)
        finite = math.isfinite(norm)
        if finite:
            clip_gradients(self.weights.trainable, norm, self.optimizer_config.clip_grad)
            self.optimizer.step()
            self.weights.publish()
            metrics.mean("grad_norm", norm, 1)
        else:
            self.skipped_steps += 1
            logger.warning(
                "the gradient is not finite (norm %s, first in %s): optimiser step skipped, %d so far",
                norm,
                first_non_finite(self.weights.named),
                self.skipped_steps,
            )
        self.optimizer.zero_grad(set_to_none=True)
        metrics.mean("lr", self.optimizer.param_groups[0]["lr"], 1)
        metrics.sum("skipped", 0 if finite else 1)
        return metrics

    def lr_scheduler_step(self) -> float:
        """Counts one training step; the learning rate from now on."""
        assert self.lr_scheduler is not None, "initialize() a training engine first"
        return self.lr_scheduler.step()

    # --- weights ------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every parameter, the trained copy where there is one; tied parameters once."""
        for name, parameter in self.weights.named:
            yield name, parameter.detach()

    def save(self, folder: Path, contents: Sequence[str] | None = None) -> None:
        """Write `contents` into `folder`; the manifest with digests comes last."""
        checkpoint.save_engine(self, Path(folder), tuple(contents or self.checkpoint_config.save_contents))

    def load(self, folder: Path, contents: Sequence[str] | None = None) -> None:
        """Restore `contents` from `folder` after checking every digest, name and shape."""
        checkpoint.load_engine(self, Path(folder), tuple(contents or self.checkpoint_config.load_contents))

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move parameters and optimiser state to a torch device, or to "device", the engine's own."""
        where = self.device if device == "device" else torch.device(device)
        if model:
            move(self.model, where)
            self.weights.to(where)
        if optimizer and self.optimizer is not None:
            for state in self.optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and name != "step":
                        state[name] = value.to(where)

    @contextlib.contextmanager
    def train_mode(self) -> Iterator["TorchEngine"]:
        """Everything on the device inside the block."""
        with self._on_device(optimizer=True):
            self._set_training(True)
            yield self

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator["TorchEngine"]:
        """The parameters on the device inside the block."""
        with self._on_device(optimizer=False):
            self._set_training(False)
            yield self

    @contextlib.contextmanager
    def _on_device(self, optimizer: bool) -> Iterator[None]:
        config = self.engine_config
        model, optimizer = config.param_offload, optimizer and config.optimizer_offload
        if model or optimizer:
            self.to("device", model, optimizer)
        try:
            yield
        finally:
            if model or optimizer:
                self.to("cpu", model, optimizer)


class _Totals:
    """Sums of token metrics over micro-batches, kept on the device until the end so that nothing waits for it."""

    def __init__(self) -> None:
        self.sums: dict[str, list[Tensor]] = {}

    def add(self, loss_sum: Tensor, token_metrics: dict[str, Tensor], part: MicroBatch) -> None:
        self.sums.setdefault("loss", []).append(loss_sum.detach())
        weights = part.batch["loss_weights"]
        for name, values in token_metrics.items():
            total = (values * weights).sum() if name.endswith("_loss") else values.sum()
            self.sums.setdefault(name, []).append(total.detach())

    def metrics(self, num_tokens: int) -> Metrics:
        out = Metrics()
        for name, parts in self.sums.items():
            total = sum(torch.stack(parts).tolist())
            out.mean(name, total, 1 if name == "loss" or name.endswith("_loss") else num_tokens)
        return out


def _place(out: dict[str, Tensor], columns: dict[str, Tensor], part: MicroBatch) -> None:
    """Put the outputs of a micro-batch where its tokens are in the batch."""
    rows = part.batch[ROWS].cpu()
    for name, whole in out.items():
        whole[rows] = columns[name].detach().to("cpu", whole.dtype)


def _only(wanted: tuple[str, ...], offered: tuple[str, ...], whose: str) -> None:
    missing = [name for name in wanted if name not in offered]
    if missing:
        raise ConfigError(f"{whose} has no output {missing[0]!r}; it has {', '.join(offered)}")


def _listed(value: Any) -> list[Any]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def own_device() -> torch.device:
    """This process's device on the current platform."""
    platform = get_platform()
    return torch.device(platform.device_name, *([] if platform.device_name == "cpu" else [platform.current_device()]))


def compute_dtype(config: FSDPEngineConfig, device: torch.device) -> torch.dtype:
    """The type of forward and backward: `dtype`, where auto is float32 on a CPU and bfloat16 elsewhere."""
    name = config.dtype
    if config.mixed_precision is not None:
        name = config.mixed_precision.get("param_dtype", name)
    if name == "auto":
        return dtype_of(config.model_dtype, "model_dtype") if device.type == "cpu" else torch.bfloat16
    return dtype_of(name, "dtype")


def has_dropout(model: nn.Module) -> bool:
    """Whether two training forwards of the same tokens may differ."""
    layers = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())
    return layers or any(getattr(m, "attention_dropout", 0.0) for m in model.modules())


def refuse_unfinished(model: HFModelConfig, engine: FSDPEngineConfig) -> None:
    """Settings that are still to come are refused, not ignored."""
    unfinished = {
        "model.lora_rank": model.lora_rank > 0,
        "model.lora_adapter_path": model.lora_adapter_path is not None,
        "model.enable_activation_offload": model.enable_activation_offload,
        "model.use_liger": model.use_liger,
        "fsdp_config.ulysses_sequence_parallel_size": engine.ulysses_sequence_parallel_size > 1,
        "fsdp_config.offload_policy": engine.offload_policy,
    }
    wanted = [name for name, on in unfinished.items() if on]
    if wanted:
        raise ConfigError(f"{', '.join(wanted)}: still to come in the training engine; leave at the default")
