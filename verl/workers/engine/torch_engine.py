"""The PyTorch training engine: micro-batches, exact sums, optimiser steps, on one rank of any number.

Shapes: T packed tokens of the batch or micro-batch.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import compress
from pathlib import Path

import torch
from torch import Tensor, nn

from verl.algorithms.losses import TokenLoss
from verl.config import CheckpointConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.data.micro_batches import MicroBatching
from verl.models import compiled_layers, lora, registry
from verl.models.device_moves import keep_freed_memory, move_model
from verl.models.expert_parallel import check_experts
from verl.models.flops import FlopCounts, Speed, peak_flops
from verl.models.head.token_outputs import (
    OutputHead,
    SummedLoss,
    head_settings,
    token_logprobs,
    token_loss_one_pass,
    token_top,
    token_values,
)
from verl.models.load import build_config, dtype_of, load_causal_lm
from verl.models.performance import apply_performance_options
from verl.plugin.platform import get_platform
from verl.utils.errors import ConfigError
from verl.utils.external_code import import_external
from verl.workers.engine import checkpoint
from verl.workers.engine.base import BaseEngine, TrainResult
from verl.workers.engine.collective_save import CollectiveSave
from verl.workers.engine.kept_weights import KeptWeights
from verl.workers.engine.micro_batch_forward import (
    AT_IDS,
    TOP_OUTPUTS,
    MicroBatch,
    head_input,
    micro_batches,
    new_column,
    write_outputs,
)
from verl.workers.engine.model_parameters import ModelParameters
from verl.workers.engine.offload import move_optimizer_state, on_device
from verl.workers.engine.optimizer import LearningRateSchedule, build_optimizer, count_lost_updates, sample_updates
from verl.workers.engine.out_of_memory import TokenLimit
from verl.workers.engine.precision import MasterWeights, Precision, cast_parameters, other_dtype
from verl.workers.engine.rank_mesh import RankMesh
from verl.workers.engine.save_trial import files_beside_tensors
from verl.workers.engine.update_totals import TokenMetricSums

logger = logging.getLogger(__name__)


class TorchEngine(BaseEngine):
    """A `transformers` model, unsharded on one rank. Derived classes define its head and how it is sharded."""

    has_value_head = False
    can_keep_weights = True
    engine_config: FSDPEngineConfig
    load_model = staticmethod(load_causal_lm)

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: FSDPEngineConfig,
        optimizer_config: FSDPOptimizerConfig | None = None,
        checkpoint_config: CheckpointConfig | None = None,
    ):
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self.trains = not engine_config.forward_only and optimizer_config is not None
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: LearningRateSchedule | None = None
        self.skipped_steps = 0
        self.kept_weights: KeptWeights | None = None
        self.pending_save: CollectiveSave | None = None
        self.files_to_save: dict[str, bytes] = {}  # all but tensors, by path

    # --- building -----------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Loads the model on the platform's device and builds optimiser and schedule."""
        self.device = platform_device()
        if self.device.type == "cpu":
            keep_freed_memory()
        self.rank_mesh = RankMesh.of(self.engine_config, self.device)
        self.place, self.rank, self.world_size = self.rank_mesh.place, self.rank_mesh.rank, self.rank_mesh.world_size
        self.data_group, self.sequence_group = self.rank_mesh.data_group, self.rank_mesh.sequence_group
        self.precision = Precision.of(self.engine_config, self.device, self.trains)
        self.compute_dtype = self.precision.compute
        self.output_dtype = torch.promote_types(self.compute_dtype, torch.float32)
        if self.engine_config.full_determinism:
            torch.use_deterministic_algorithms(True)
        self.model = self._build_model()
        if self.compute_dtype == torch.float64:
            self.model.set_experts_implementation("eager")  # the grouped kernel has no float64
        self.packed = registry.runs_packed(self.model.config, self.model_config.use_remove_padding)
        self.shares_prompts = self.packed and registry.has_full_attention(self.model.config)
        registry.check_sequence_parallel(self.model.config, self.packed, self.rank_mesh.sequence_size, self.world_size)
        if self.rank_mesh.expert_mesh is not None:
            check_experts(self.model, self.rank_mesh.shape)
        self.head_settings = head_settings(self.model_config, self.engine_config)
        self.training_forward = apply_performance_options(self.model, self.model_config, self.trains, self.device)
        self.layer_graphs = compiled_layers.compile_layers(self.model, self.model_config, self.world_size)
        if not self.trains:
            self.model.requires_grad_(False)
        self.precision.cast_buffers(self.model)
        self.flops = FlopCounts.of(self.model)
        cast_parameters(self.model, self.precision.storage)
        self.weights = self._build_parameters()
        self.can_cast = self.weights.can_cast
        model_kind = f"the {'' if self.trains else 'frozen '}{'value' if self.has_value_head else 'language'} model"
        memory_hint = ("turn on enable_gradient_checkpointing, ", "")[self.model_config.enable_gradient_checkpointing]
        self.forward_limit = TokenLimit(self.rank_mesh, self.device, f"the forward pass of {model_kind}")
        self.train_limit = TokenLimit(self.rank_mesh, self.device, f"training {model_kind}", memory_hint)
        if self.trains:
            assert self.optimizer_config is not None
            self.optimizer = build_optimizer(self.weights.trainable, self.optimizer_config)
            self.lr_scheduler = LearningRateSchedule(self.optimizer, self.optimizer_config)
            self.files_to_save = files_beside_tensors(self) if self.rank == 0 else {}

    def speed(self) -> Speed:
        """FLOP counts of the model, and the peak FLOP/s in the dtype of its matmuls."""
        return Speed(self.flops, peak_flops(self.device, self.compute_dtype))

    def _build_parameters(self) -> ModelParameters:
        """The parameters on the device, in their training and compute dtypes."""
        return MasterWeights(move_model(self.model, self.device), self.compute_dtype)

    def _build_model(self) -> nn.Module:
        """The model on the CPU; on ranks other than 0 only its structure, on the meta device."""
        settings = self.model_config
        import_external(settings.external_lib)
        config, init_random = build_config(settings)
        get_platform().apply_model_patches(config.model_type)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.engine_config.seed)
            model = self.load_model(
                settings.path,
                dtype_of(self.engine_config.model_dtype, "model_dtype"),
                config,
                init_random,
                structure_only=self.rank > 0,
            )
        if self.rank == 0 and not self.has_value_head:
            registry.check_head(model)
        if lora.wants_lora(settings):
            lora.add_adapters(model, settings, self.engine_config.seed, structure_only=self.rank > 0)
        elif self.checkpoint_config.save_lora_only:
            raise ConfigError("checkpoint.save_lora_only=True, but there are no adapters; set model.lora_rank")
        return model

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
        for attempt in self.forward_limit.attempts(batch, micro or MicroBatching(), self.weights.reshard):
            out = {name: new_column(name, batch.num_tokens, self.output_dtype, self.top) for name in outputs}
            micro_batches = self._micro_batches(batch, (), attempt.micro)
            for micro_batch in attempt.until_out_of_memory(micro_batches, self.weights.repeat_pass):
                with attempt.catch_out_of_memory(micro_batch):
                    columns = self.weights.run(self._outputs, micro_batch, tuple(out), temperature)
                    write_outputs(out, columns, micro_batch)
            self.weights.reshard()
        return {name: column.to(batch.device) for name, column in out.items()}

    def forward_backward(
        self, batch: Batch, loss: TokenLoss, micro: MicroBatching | None = None, temperature: float = 1.0
    ) -> TrainResult:
        """Adds the gradient of the summed loss of `batch`; the sum is the same however `micro` splits it.

        If a micro-batch runs out of memory, all of `batch` restarts in smaller ones.
        """
        if not self.trains:
            raise ConfigError("this engine only runs forward (forward_only, or no optimizer); it cannot train")
        self._set_training(True)
        names = (*loss.columns, *(name for name in loss.optional_columns if name in batch), "loss_weights")
        undo = _refuse_to_undo if self.weights.has_gradient else self.weights.zero_grad
        for attempt in self.train_limit.attempts(batch, micro or MicroBatching(), undo):
            kept = [name for name in loss.outputs if name != AT_IDS]  # which would be k numbers per token
            out = {name: new_column(name, batch.num_tokens, self.output_dtype, self.top) for name in kept}
            metric_sums = TokenMetricSums()
            micro_batches = self._micro_batches(batch, names, attempt.micro)
            for micro_batch in attempt.until_out_of_memory(micro_batches, self.weights.repeat_pass):
                with attempt.catch_out_of_memory(micro_batch):
                    self._add_gradient(micro_batch, loss, temperature, metric_sums, out)
        metrics = metric_sums.metrics(int(batch["loss_mask"].sum()), updates=1 if self.rank_mesh.data_rank == 0 else 0)
        self.train_limit.add_metrics(metrics)
        if self.layer_graphs is not None:
            self.layer_graphs.add_metrics(metrics)
        return TrainResult(metrics, {name: column.to(batch.device) for name, column in out.items()})

    def _add_gradient(
        self,
        micro_batch: MicroBatch,
        loss: TokenLoss,
        temperature: float,
        metric_sums: TokenMetricSums,
        out: dict[str, Tensor],
    ) -> None:
        """Forward and backward of a micro-batch: a function, so that after an error nothing holds its activations."""
        with self.training_forward():
            result = self.weights.run(self._forward_loss, micro_batch, loss, temperature)
        self.weights.backward(result.loss_sum, micro_batch.is_last)
        metric_sums.add(result.loss_sum, result.token_metrics, micro_batch)
        write_outputs(out, result.outputs, micro_batch)

    def _micro_batches(self, batch: Batch, columns: Sequence[str], micro: MicroBatching) -> Iterator[MicroBatch]:
        if batch.num_sequences:
            registry.check_sequences(self.model.config, int(batch.lengths.max()), int(batch["tokens"].max()))
        if micro.share_prefixes:
            registry.check_prefix_sharing(self.model.config, self.packed)
        most = partial(self.rank_mesh.max_over_ranks, device=self.device)
        return micro_batches(batch, columns, micro, self.device, most, self.sequence_group, self.on_sequences)

    def _outputs(self, micro_batch: MicroBatch, names: tuple[str, ...], temperature: float) -> dict[str, Tensor]:
        """The model's outputs for the tokens of a micro-batch, zero where loss_mask is False."""
        inputs = head_input(self._backbone, micro_batch, self.packed)
        if self.has_value_head:
            _check_outputs(names, ("values",), "a critic")
            weights, rows = self.precision.head_weights(self.model.score), (inputs.cu_seqlens, inputs.needed)
            return inputs.scatter_to_columns({"values": token_values(inputs.hidden, *weights, *rows)})
        top_names = () if self.top is None else TOP_OUTPUTS
        _check_outputs(names, ("logprobs", "entropy", "sum_pi_squared", AT_IDS, *top_names), "a language model")
        rows, head = inputs.rows, self._output_head(temperature)
        if self.top is not None and "top_ids" in names:
            return inputs.scatter_to_columns(token_top(*rows, head, self.top))
        ids = inputs.select({AT_IDS: micro_batch.batch["teacher_top_ids"]})[AT_IDS] if AT_IDS in names else None
        outputs = token_logprobs(*rows, head, "entropy" in names, "sum_pi_squared" in names, ids)
        return inputs.scatter_to_columns(outputs)

    def _forward_loss(self, micro_batch: MicroBatch, loss: TokenLoss, temperature: float) -> SummedLoss:
        """The forward pass and the loss of a micro-batch; of a dummy a loss of 0, without outputs."""
        batch = micro_batch.batch
        if micro_batch.is_dummy:
            values = self._outputs(micro_batch, loss.outputs, temperature).values()
            return SummedLoss(torch.stack([value.sum() for value in values]).sum() * 0.0, {}, {})
        names = {*loss.columns, *loss.optional_columns, "loss_weights"}
        columns = {name: batch.token_column(name) for name in names if name in batch}
        if loss.per_token and not self.has_value_head and self.head_settings.mode != "eager":
            inputs, head = head_input(self._backbone, micro_batch, self.packed), self._output_head(temperature)
            columns, with_entropy = inputs.select(columns), "entropy" in loss.outputs
            loss_sum, outputs, metrics = token_loss_one_pass(*inputs.rows, head, loss, columns, with_entropy)
            to_columns = inputs.scatter_to_columns
            return SummedLoss(inputs.sum_over_group(loss_sum), to_columns(outputs), to_columns(metrics))
        outputs = self._outputs(micro_batch, loss.outputs, temperature)
        losses, metrics = loss(outputs, columns, batch.cu_seqlens)
        mask = batch["loss_mask"]
        return SummedLoss(
            losses.masked_fill(~mask, 0.0).sum(),
            {name: value.detach() for name, value in outputs.items()},
            {name: value.detach().masked_fill(~mask, 0.0) for name, value in metrics.items()},
        )

    @property
    def _backbone(self) -> nn.Module:
        return self.model.base_model

    def _output_head(self, temperature: float) -> OutputHead:
        weight, bias = self.precision.head_weights(self.model.get_output_embeddings())
        divisor = temperature * registry.logit_divisor(self.model.config)
        return OutputHead(weight, divisor, bias, *self.head_settings)

    def _set_training(self, training: bool) -> None:
        if self.model.training != training:
            self.model.train(training)

    # --- optimiser ----------------------------------------------------------------------------------------------

    def optim_step(self) -> Metrics:
        """Clips, steps and clears the gradient; a non-finite one is counted and logged, and changes no parameter."""
        assert self.optimizer is not None and self.optimizer_config is not None, "initialize() a training engine first"
        metrics = Metrics()
        norm = self.weights.gradient_norm()
        finite = math.isfinite(norm)
        if finite:
            self.weights.clip_gradients(norm, self.optimizer_config.clip_grad)
            trained = compress(self.weights.local_trainable(), [p.grad is not None for p in self.weights.trainable])
            samples = sample_updates(trained, [gradient for _, gradient in self.weights.local_gradients()])
            self.optimizer.step()
            if samples and self.optimizer.param_groups[0]["lr"] > 0:
                metrics.mean("updates_lost", *count_lost_updates(samples))
            torch.autograd.graph.increment_version(self.weights.trainable)  # fused kernels do not increment it
            self.weights.copy_to_model()
            metrics.mean("grad_norm", norm, 1)
        else:
            self.skipped_steps += 1
            logger.warning(
                "the gradient is not finite (norm %s, first in %s): optimiser step skipped, %d so far",
                norm,
                self.weights.first_non_finite_gradient(),
                self.skipped_steps,
            )
        self.optimizer.zero_grad(set_to_none=True)
        metrics.mean("lr", self.optimizer.param_groups[0]["lr"], 1)
        metrics.sum("skipped", 0 if finite or self.rank > 0 else 1)
        return metrics

    def lr_scheduler_step(self) -> float:
        """Counts one training step; returns the new learning rate."""
        assert self.lr_scheduler is not None, "initialize() a training engine first"
        return self.lr_scheduler.step()

    # --- weights ------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of every parameter, from its master weights if there are any; tied parameters once.

        Adapters are merged into their base weights, under the names of the model without adapters.

        Over several ranks this is a collective that gathers one tensor at a time: all ranks must consume all of them.
        """
        return lora.merge_adapters(self.weights.full_tensors(), lora.adapter_scales(self.model))

    def export_adapters(self, with_base: bool) -> Iterator[tuple[str, Tensor]]:
        tensors = self.weights.full_tensors(trained_only=not with_base)
        return lora.split_adapters(tensors, lora.adapter_scales(self.model))

    def keep_weights(self) -> int:
        """Copy this rank's shards of the trained weights into host memory, over an earlier copy; its size in bytes."""
        self.kept_weights = self.kept_weights or KeptWeights(self.weights, self.device)
        self.kept_weights.keep()
        return self.kept_weights.num_bytes

    def swap_weights(self) -> None:
        """Exchange the trained weights with those that `keep_weights` has copied."""
        assert self.kept_weights is not None, "keep_weights comes first"
        self.kept_weights.swap()

    def computing_in(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        return self.weights.cast_to(other_dtype(dtype, self.compute_dtype))

    def disable_adapter(self) -> AbstractContextManager[None]:
        """A context in which the model runs without its adapters."""
        return lora.without_adapters(self.model)

    def save(self, folder: Path, contents: Sequence[str] | None = None) -> None:
        """Write `contents` into `folder`, or start to (checkpoint.async_save); the manifest is written last."""
        checkpoint.save_engine(self, Path(folder), tuple(contents or self.checkpoint_config.save_contents))

    def finish_save(self, wait: bool = True) -> bool:
        """True once no save is running; raises the error of a failed save. A collective."""
        return checkpoint.finish_save(self, wait)

    def load(self, folder: Path, contents: Sequence[str] | None = None) -> None:
        """Restore `contents` from `folder` after checking every digest, name and shape."""
        checkpoint.load_engine(self, Path(folder), tuple(contents or self.checkpoint_config.load_contents))

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move parameters and optimiser state to a torch device, or to "device", the engine's own."""
        target = self.device if device == "device" else torch.device(device)
        if model:
            self.weights.to(target)
        if optimizer and self.optimizer is not None:
            move_optimizer_state(self.optimizer, target)

    def train_mode(self) -> AbstractContextManager[None]:
        """A context with parameters and optimiser state on the device."""
        return on_device(self, training=True)

    def eval_mode(self) -> AbstractContextManager[None]:
        """A context with the parameters on the device."""
        return on_device(self, training=False)


def _refuse_to_undo() -> None:
    raise ConfigError(
        "training ran out of memory while adding to the gradient of an earlier call, and the two gradients "
        "cannot be separated; use smaller micro-batches, or one call per optimiser step"
    )


def _check_outputs(wanted: tuple[str, ...], available: tuple[str, ...], whose: str) -> None:
    missing = [name for name in wanted if name not in available]
    if missing:
        raise ConfigError(f"{whose} has no output {missing[0]!r}; it has {', '.join(available)}")


def platform_device() -> torch.device:
    """This process's device on the current platform."""
    platform = get_platform()
    return torch.device(platform.device_name, *([] if platform.device_name == "cpu" else [platform.current_device()]))
