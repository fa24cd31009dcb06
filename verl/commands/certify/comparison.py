"""Compares every way to compute the gradient of a mini-batch with the gradient by definition."""

import contextlib
import dataclasses
import math
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from verl.checks.findings import Findings
from verl.checks.loaded import check_engine_and_algorithm, check_weights_are_there, find_device
from verl.checks.machine import MODEL_KEY
from verl.commands.certify import plain_gradient
from verl.commands.certify.certificate import MAX_RATIO, MAX_REPEAT_ERROR, TOLERANCE, Certificate, CertificateRow
from verl.commands.certify.float64 import keep_float64
from verl.commands.certify.random_batch import random_trajectories, with_loss_columns
from verl.commands.certify.rank_gradients import RankGradients
from verl.commands.certify.subject import Subject, build_engine, subjects, with_random_adapters, with_tiny_model
from verl.commands.certify.variants import Variant, local_variants, prefix_sharing_variants, rank_variants
from verl.config import AlgorithmConfig, HFModelConfig, RunConfig, SFTConfig
from verl.config.check import trained_actor, uses_critic
from verl.data.batch import Batch
from verl.data.prompts import train_prompts
from verl.models.device_moves import move_model
from verl.models.load import build_config, load_causal_lm, load_tokenizer, load_value_model
from verl.models.lora import add_adapters, wants_lora
from verl.models.registry import check_prefix_sharing, num_experts, runs_packed
from verl.observe.progress import Progress
from verl.plugin.platform import choose_platform
from verl.utils.errors import ConfigError
from verl.utils.external_code import import_external
from verl.workers.engine.precision import Precision
from verl.workers.engine.torch_engine import TorchEngine, platform_device
from verl.workers.engine_worker import with_loss_weights


def certify(
    config: RunConfig | SFTConfig,
    tiny: bool = False,
    num_sequences: int = 14,
    longest: int = 48,
    seed: int = 0,
    num_ranks: int = 1,
    progress: Progress | None = None,
) -> Certificate:
    """The certificate of every model that `config` trains; `num_ranks` > 1 adds variants sharded over processes."""
    if num_sequences < 4 or longest < 8:
        raise ConfigError(f"--sequences={num_sequences} --length={longest}: take 4 sequences of 8 tokens or more")
    if isinstance(config, RunConfig):
        check_certifiable(config, tiny)
    choose_platform(config.trainer.device)
    rows: list[CertificateRow] = []
    progress = progress or Progress.silent()
    with contextlib.ExitStack() as stack:
        ranks = None
        if num_ranks > 1:
            ranks = stack.enter_context(contextlib.closing(RankGradients(config, num_ranks)))
        for subject in subjects(config):
            if tiny:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                subject = with_tiny_model(subject, Path(folder), seed)
            check_model(subject)
            if wants_lora(subject.model) and subject.model.lora_adapter_path is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                subject = with_random_adapters(subject, Path(folder), seed)
            progress.stage(f"computing the gradient of the {subject.role} by definition")
            for row in GradientComparison(config, subject, num_sequences, longest, seed, ranks).rows():
                rows.append(row)
                progress.stage(f"comparing gradients of the {subject.role}")
                progress.count(f"{len(rows)} done, last {row.dimension}")
    return Certificate(rows)


class GradientComparison:
    """Compares every variant's gradient of one subject and mini-batch with the gradient by definition."""

    def __init__(
        self,
        config: RunConfig | SFTConfig,
        subject: Subject,
        num_sequences: int,
        longest: int,
        seed: int,
        ranks: RankGradients | None = None,
    ):
        self.subject, self.device, self.ranks = subject, platform_device(), ranks
        self.generator = torch.Generator().manual_seed(seed)
        model = self.load_model(torch.float64)
        trajectories = random_trajectories(
            num_sequences,
            min(config.actor_rollout_ref.rollout.n, 4) if isinstance(config, RunConfig) else 1,
            longest,
            int(model.config.vocab_size),
            self.generator,
            configured_prompts(config, num_sequences),
        )
        algorithm = config.algorithm if isinstance(config, RunConfig) else AlgorithmConfig(adv_estimator="grpo")
        self.model_config = model.config
        batch, actor = Batch.pack(trajectories), None
        if isinstance(config, RunConfig) and subject.role == "actor":
            actor = trained_actor(config)
        self.batch = with_loss_columns(batch, model, algorithm, subject.temperature, self.generator, actor)
        self.expected = self.definition_gradient(model)
        self.norm = norm(self.expected)
        if not 0 < self.norm < float("inf"):
            raise ConfigError(
                f"the gradient of {subject.role} by definition, each sequence alone, has norm {self.norm}: nothing to "
                "compare. A loss must not use other sequences, for example to whiten or average over a micro-batch"
            )
        self.repeat_error = self.relative_error(self.definition_gradient(model, sequences_per_forward=2))[0]
        if not self.repeat_error < MAX_REPEAT_ERROR:
            raise ConfigError(
                f"the gradient of {subject.role} by definition differs by {self.repeat_error:.1e} from itself when "
                "computed again: its loss or its model draws random numbers or keeps a state, so no two ways can agree"
            )
        self.dtype = Precision.of(subject.engine, self.device).compute
        self.plain_error = 0.0
        if self.dtype != torch.float64:
            self.plain_error = self.relative_error(self.definition_gradient(self.load_model(self.dtype)))[0]

    def load_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model without the engine, with naive attention."""
        settings = self.subject.model
        assert settings.path is not None
        load = load_value_model if self.subject.value_head else load_causal_lm
        model = load(settings.path, dtype, build_config(settings)[0])
        model.set_attn_implementation(plain_gradient.NAIVE_ATTENTION)
        if wants_lora(settings):
            add_adapters(model, settings, self.subject.engine.seed)
        if dtype == torch.float64:
            keep_float64(model)
        move_model(model, self.device)
        return model

    def definition_gradient(self, model: nn.Module, sequences_per_forward: int = 1) -> plain_gradient.Gradient:
        batch = self.batch.to(self.device)
        return plain_gradient.gradient(
            model, batch, self.subject.reference_loss, self.subject.temperature, sequences_per_forward
        )

    def relative_error(self, gradient: plain_gradient.Gradient) -> tuple[float, str]:
        """|gradient - expected| / |expected| over all parameters together, and the parameter that adds most to it.

        A parameter without a gradient counts as zero.
        """
        differences = {
            name: norm({name: gradient[name] - g if name in gradient else g}) for name, g in self.expected.items()
        }
        return math.hypot(*differences.values()) / self.norm, max(
            differences, key=lambda name: (not math.isfinite(differences[name]), differences[name])
        )

    def rows(self) -> Iterator[CertificateRow]:
        """One row per variant."""
        all_variants = local_variants(self.batch, self.subject.value_head, self.subject.micro, self.generator)
        packed = runs_packed(self.model_config, self.subject.model.use_remove_padding)
        all_variants += [] if lacks_prefix_sharing(self.model_config, packed) else prefix_sharing_variants(self.batch)
        if self.ranks is not None:
            heads = self.model_config.num_attention_heads if packed else 1
            shared = math.gcd(heads, self.ranks.size)
            all_variants += rank_variants(self.batch, self.ranks.size, shared, num_experts(self.model_config))
        tolerance = max(TOLERANCE, 10 * self.repeat_error)
        for engine_key in dict.fromkeys(variant.engine_key for variant in all_variants):
            group = [variant for variant in all_variants if variant.engine_key == engine_key]
            float64_errors = self.relative_errors(group, torch.float64)
            own_errors = (
                self.relative_errors(group, self.dtype) if self.dtype != torch.float64 else [(None, None)] * len(group)
            )
            for variant, (error, worst), (own_error, own_worst) in zip(group, float64_errors, own_errors, strict=True):
                ratio = None if own_error is None else own_error / max(self.plain_error, sys.float_info.min)
                exact = error <= tolerance
                ok = exact and (ratio is None or self.dtype != torch.float32 or ratio <= MAX_RATIO)
                worst = worst if own_worst is None or not exact else own_worst
                yield CertificateRow(
                    self.subject.role, variant.dimension, variant.setting, error, tolerance, own_error, ratio, worst, ok
                )

    def relative_errors(self, group: list[Variant], dtype: torch.dtype) -> list[tuple[float, str]]:
        """For each variant of `group`, which share an engine: the relative error and the parameter with most of it."""
        subject, variant = self.subject, group[0]
        changes = {"ulysses_sequence_parallel_size": 1, "expert_parallel_size": 1, **variant.engine}
        if dtype == torch.float64:
            changes |= {"model_dtype": "fp64", "dtype": "fp64", "mixed_precision": None}
        changed = dataclasses.replace(
            subject,
            model=dataclasses.replace(subject.model, **variant.model),
            engine=dataclasses.replace(subject.engine, **changes),
        )
        if variant.on_ranks:
            assert self.ranks is not None
            self.ranks.build(changed)
            return [self.relative_error(self.ranks.gradient(self.mini_batch(one, dtype), one.micro)) for one in group]
        engine = build_engine(changed)
        return [self.relative_error(self.gradient(engine, one, dtype)) for one in group]

    def mini_batch(self, variant: Variant, dtype: torch.dtype) -> Batch:
        """The mini-batch in the variant's order, with the trainer's own loss weights."""
        batch = self.batch if variant.order is None else self.batch.select(variant.order)
        wide = torch.promote_types(dtype, torch.float32)
        floating = {n: column.to(wide) for n, column in batch.token_columns.items() if column.is_floating_point()}
        batch = batch.with_columns(**floating)  # as in the definition: a loss may combine them with its own sums
        return with_loss_weights(batch, self.subject.loss_agg_mode, self.subject.scale, wide)

    def gradient(self, engine: TorchEngine, variant: Variant, dtype: torch.dtype) -> plain_gradient.Gradient:
        """The gradient that the engine accumulates for the mini-batch."""
        subject, mini = self.subject, self.mini_batch(variant, dtype)
        total: plain_gradient.Gradient = {}
        with engine.train_mode():
            for rank in range(variant.shards):
                shard = mini.select(torch.arange(rank, mini.num_sequences, variant.shards))
                for indices in torch.arange(shard.num_sequences).tensor_split(variant.calls):
                    engine.forward_backward(shard.select(indices), subject.loss, variant.micro, subject.temperature)
                for name, part in take_gradient(engine).items():
                    total[name] = total[name] + part if name in total else part
        return total


def take_gradient(engine: TorchEngine) -> plain_gradient.Gradient:
    """The accumulated gradient by name, in float64; it is cleared in the engine."""
    out = {}
    for name, parameter in engine.weights.named_parameters:
        if parameter.grad is not None:
            out[name] = parameter.grad.double()
            parameter.grad = None
    return out


def lacks_prefix_sharing(config: PreTrainedConfig, packed: bool) -> bool:
    """Whether this model does not support prefix sharing."""
    try:
        check_prefix_sharing(config, packed)
    except ConfigError:
        return True
    return False


def norm(gradient: plain_gradient.Gradient) -> float:
    return float(torch.stack([g.double().square().sum() for g in gradient.values()]).sum().sqrt())


def check_certifiable(config: RunConfig, tiny: bool) -> None:
    """One error with all that keeps `config` from being certified: device, functions chosen by name, models."""
    if config.distillation.enabled:
        raise ConfigError(
            "verl certify has no teacher to check the distillation loss with; set distillation.enabled=False to check "
            "the rest of the loss"
        )
    found = Findings()
    find_device(config.trainer.device, found)
    models: dict[str, HFModelConfig] = {MODEL_KEY: config.actor_rollout_ref.model}
    if uses_critic(config):
        models["critic.model.path"] = config.critic.model
    if all(found.check("external_lib", partial(import_external, model.external_lib)) for model in models.values()):
        check_engine_and_algorithm(config, found)
    for key, model in models.items():
        if model.path and not tiny:
            found.check(key, partial(check_weights_are_there, model))
    found.refuse()


def check_model(subject: Subject) -> None:
    """Refuses a model without fixed weights by ConfigError."""
    if subject.model.path is None:
        raise ConfigError("no model.path; give the folder of a model, or --tiny for a small random one")
    if subject.model.override_config.get("init_random"):
        raise ConfigError("model.override_config.init_random gives different weights each time; use --tiny instead")


def configured_prompts(config: RunConfig | SFTConfig, count: int) -> list[list[int]]:
    """Prompts of data.train_files; none if the files do not exist or no model path is set."""
    if not isinstance(config, RunConfig) or not config.actor_rollout_ref.model.path:
        return []
    files = config.data.train_files
    if not all(Path(name).expanduser().is_file() for name in ([files] if isinstance(files, str) else files or [""])):
        return []
    prompts = train_prompts(config.data, load_tokenizer(config.actor_rollout_ref.model))
    return [list(prompts[i].prompt_ids) for i in range(min(count, len(prompts)))]
