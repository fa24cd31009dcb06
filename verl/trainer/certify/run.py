"""`verl certify [key=value ...]`: is the gradient of this configuration the same however a mini-batch is cut?"""

import argparse
import contextlib
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from verl.config import AlgorithmConfig, RunConfig, SFTConfig, load_config
from verl.data.batch import Batch
from verl.data.prompts import train_prompts
from verl.models.float64 import keep_float64
from verl.models.load import build_config, load_causal_lm, load_tokenizer, load_value_model
from verl.models.lora import add_adapters, wants_lora
from verl.models.placement import move
from verl.models.registry import check_prefix_sharing, runs_packed
from verl.plugin.platform import choose_platform
from verl.trainer.certify import reference
from verl.trainer.certify.batch import trajectories, with_columns
from verl.trainer.certify.ranks import RankGradients
from verl.trainer.certify.report import RATIO, RESTLESS, TOLERANCE, Certificate, Row, print_table
from verl.trainer.certify.subject import Subject, build_engine, stand_in, subjects, with_adapters
from verl.trainer.certify.variants import Variant, over_ranks, sharing, variants
from verl.utils.errors import ConfigError, VerlError
from verl.workers.engine.precision import Precision
from verl.workers.engine.torch_engine import TorchEngine, own_device
from verl.workers.training import weighted

HELP = """Check that the gradient does not depend on how a mini-batch is cut, packed and computed.

usage: verl certify [options] key=value ...

  verl certify actor_rollout_ref.model.path=DIR          the model, with the loss of this configuration
  verl certify --tiny actor_rollout_ref.model.path=DIR   a random two-layer model of the same family: seconds
  verl certify --tiny actor_rollout_ref.model.external_lib=my_loss actor_rollout_ref.actor.policy_loss.loss_mode=mine

Every way to compute it is compared, in float64, with the definition: one sequence at a time, no packing, every formula
written out. A relative difference above 1e-10 is a violation; so is, in float32, more than twice the error of the plain
computation. Exit code 0: all equal; 1: a violation, named; 2: a mistake the message explains.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the certificate of a configuration."""
    parser = argparse.ArgumentParser("verl certify", description=HELP, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tiny", action="store_true", help="random weights in the shape of a two-layer model")
    parser.add_argument("--ranks", type=int, default=1, help="also shard the model over so many processes (1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--sequences", type=int, default=14, help="sequences of the mini-batch (14)")
    parser.add_argument("--length", type=int, default=48, help="tokens of the longest one (48)")
    parser.add_argument("--seed", type=int, default=0, help="of the mini-batch and of a tiny model (0)")
    options, overrides = parser.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    if options.ranks < 1:
        parser.error(f"--ranks {options.ranks}: at least 1")
    try:
        certificate = certify(
            load_config(overrides), options.tiny, options.sequences, options.length, options.seed, options.ranks
        )
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not options.json:
        print_table(certificate)
    else:
        print(json.dumps(certificate.as_json(), indent=2))
    return 0 if certificate.holds else 1


def certify(
    config: RunConfig | SFTConfig,
    tiny: bool = False,
    num_sequences: int = 14,
    longest: int = 48,
    seed: int = 0,
    num_ranks: int = 1,
) -> Certificate:
    """The certificate of every model that `config` trains, sharded over `num_ranks` processes too where not 1."""
    if num_sequences < 4 or longest < 8:
        raise ConfigError(f"--sequences={num_sequences} --length={longest}: take 4 sequences of 8 tokens or more")
    choose_platform(config.trainer.device)
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        ranks = None
        if num_ranks > 1:
            ranks = stack.enter_context(contextlib.closing(RankGradients(config, num_ranks)))
        for subject in subjects(config):
            if tiny:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                subject = stand_in(subject, Path(folder), seed)
            check_model(subject)
            if wants_lora(subject.model) and subject.model.lora_adapter_path is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                subject = with_adapters(subject, Path(folder), seed)
            rows += Judge(config, subject, num_sequences, longest, seed, ranks).rows()
    return Certificate(rows)


class Judge:
    """One subject, one mini-batch, and the gradient by definition that every variant is compared with."""

    def __init__(
        self,
        config: RunConfig | SFTConfig,
        subject: Subject,
        num_sequences: int,
        longest: int,
        seed: int,
        ranks: RankGradients | None = None,
    ):
        self.subject, self.device, self.ranks = subject, own_device(), ranks
        self.generator = torch.Generator().manual_seed(seed)
        model = self.load(torch.float64)
        rows = trajectories(
            num_sequences,
            min(config.actor_rollout_ref.rollout.n, 4) if isinstance(config, RunConfig) else 1,
            longest,
            int(model.config.vocab_size),
            self.generator,
            own_prompts(config, num_sequences),
        )
        algorithm = config.algorithm if isinstance(config, RunConfig) else AlgorithmConfig(adv_estimator="grpo")
        self.model_config = model.config
        self.batch = with_columns(Batch.pack(rows), model, algorithm, subject.temperature, self.generator)
        self.truth = self.by_definition(model)
        self.norm = norm(self.truth)
        if not 0 < self.norm < float("inf"):
            raise ConfigError(
                f"the gradient of {subject.role} by definition, each sequence alone, has norm {self.norm}: nothing to "
                "compare. A loss may not need other sequences, as one does that whitens or averages over a micro-batch"
            )
        self.noise = self.error(self.by_definition(model, together=2))[0]
        if not self.noise < RESTLESS:
            raise ConfigError(
                f"the gradient of {subject.role} by definition differs by {self.noise:.1e} from itself when computed "
                "again: its loss or its model draws random numbers or keeps a state, so no two ways can agree"
            )
        self.dtype = Precision.of(subject.engine, self.device).compute
        self.plain_error = 0.0
        if self.dtype != torch.float64:
            self.plain_error = self.error(self.by_definition(self.load(self.dtype)))[0]

    def load(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model without anything of the engine, with attention written out."""
        settings = self.subject.model
        assert settings.path is not None
        load = load_value_model if self.subject.value_head else load_causal_lm
        model = load(settings.path, dtype, build_config(settings)[0])
        model.set_attn_implementation(reference.WRITTEN_OUT)
        if wants_lora(settings):
            add_adapters(model, settings, self.subject.engine.seed)
        if dtype == torch.float64:
            keep_float64(model)
        move(model, self.device)
        return model

    def by_definition(self, model: nn.Module, together: int = 1) -> reference.Gradient:
        batch = self.batch.to(self.device)
        return reference.gradient(model, batch, self.subject.loss_of, self.subject.temperature, together)

    def error(self, found: reference.Gradient) -> tuple[float, str]:
        """|found - truth| / |truth| over all parameters together, and the one that adds most to it.

        A parameter without a gradient counts as zero.
        """
        off = {name: norm({name: found[name] - g if name in found else g}) for name, g in self.truth.items()}
        return math.hypot(*off.values()) / self.norm, max(
            off, key=lambda name: (not math.isfinite(off[name]), off[name])
        )

    def rows(self) -> Iterator[Row]:
        """One row per variant."""
        todo = variants(self.batch, self.subject.value_head, self.subject.micro, self.generator)
        packed = runs_packed(self.model_config, self.subject.model.use_remove_padding)
        todo += [] if cannot_share(self.model_config, packed) else sharing(self.batch)
        if self.ranks is not None:
            heads = self.model_config.num_attention_heads if packed else 1
            todo += over_ranks(self.batch, self.ranks.size, math.gcd(heads, self.ranks.size))
        tolerance = max(TOLERANCE, 10 * self.noise)
        for build in dict.fromkeys(variant.build for variant in todo):
            same = [variant for variant in todo if variant.build == build]
            doubles = self.errors(same, torch.float64)
            own = self.errors(same, self.dtype) if self.dtype != torch.float64 else [(None, None)] * len(same)
            for variant, (error, worst), (own_error, own_worst) in zip(same, doubles, own, strict=True):
                ratio = None if own_error is None else own_error / max(self.plain_error, sys.float_info.min)
                exact = error <= tolerance
                ok = exact and (ratio is None or self.dtype != torch.float32 or ratio <= RATIO)
                worst = worst if own_worst is None or not exact else own_worst
                yield Row(
                    self.subject.role, variant.dimension, variant.setting, error, tolerance, own_error, ratio, worst, ok
                )

    def errors(self, same: list[Variant], dtype: torch.dtype) -> list[tuple[float, str]]:
        """The relative error of each of these variants, which share an engine, and the parameter it is largest in."""
        subject, variant = self.subject, same[0]
        changes = {"ulysses_sequence_parallel_size": 1, **variant.engine}
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
            return [self.error(self.ranks.gradient(self.mini_batch(one, dtype), one.micro)) for one in same]
        engine = build_engine(changed)
        return [self.error(self.gradient(engine, one, dtype)) for one in same]

    def mini_batch(self, variant: Variant, dtype: torch.dtype) -> Batch:
        """The mini-batch in the variant's order, with the trainer's own loss weights."""
        batch = self.batch if variant.order is None else self.batch.select(variant.order)
        wide = torch.promote_types(dtype, torch.float32)
        floating = {n: column.to(wide) for n, column in batch.token_columns.items() if column.is_floating_point()}
        batch = batch.with_columns(**floating)  # as in the definition: a loss may mix them with sums of its own
        return weighted(batch, self.subject.loss_agg_mode, self.subject.scale, wide)

    def gradient(self, engine: TorchEngine, variant: Variant, dtype: torch.dtype) -> reference.Gradient:
        """What the engine accumulates for the mini-batch."""
        subject, mini = self.subject, self.mini_batch(variant, dtype)
        total: reference.Gradient = {}
        with engine.train_mode():
            for rank in range(variant.shards):
                shard = mini.select(torch.arange(rank, mini.num_sequences, variant.shards))
                for rows in torch.arange(shard.num_sequences).tensor_split(variant.calls):
                    engine.forward_backward(shard.select(rows), subject.loss, variant.micro, subject.temperature)
                for name, part in take_gradient(engine).items():
                    total[name] = total[name] + part if name in total else part
        return total


def take_gradient(engine: TorchEngine) -> reference.Gradient:
    """The accumulated gradient by name, in float64; the engine is left without one."""
    out = {}
    for name, parameter in engine.weights.named:
        if parameter.grad is not None:
            out[name] = parameter.grad.double()
            parameter.grad = None
    return out


def cannot_share(config: PreTrainedConfig, packed: bool) -> bool:
    """Whether this model computes a prompt once for every sequence."""
    try:
        check_prefix_sharing(config, packed)
    except ConfigError:
        return True
    return False


def norm(gradient: reference.Gradient) -> float:
    return float(torch.stack([g.double().square().sum() for g in gradient.values()]).sum().sqrt())


def check_model(subject: Subject) -> None:
    """Refuses what has no weights to judge with."""
    if subject.model.path is None:
        raise ConfigError("no model.path; give the folder of a model, or --tiny for a small random one")
    if subject.model.override_config.get("init_random"):
        raise ConfigError("model.override_config.init_random makes other weights each time; use --tiny instead")


def own_prompts(config: RunConfig | SFTConfig, count: int) -> list[list[int]]:
    """Prompts of data.train_files, where they are there and a tokenizer is named; otherwise none."""
    if not isinstance(config, RunConfig) or not config.actor_rollout_ref.model.path:
        return []
    files = config.data.train_files
    if not all(Path(name).expanduser().is_file() for name in ([files] if isinstance(files, str) else files or [""])):
        return []
    prompts = train_prompts(config.data, load_tokenizer(config.actor_rollout_ref.model))
    return [list(prompts[i].prompt_ids) for i in range(min(count, len(prompts)))]
