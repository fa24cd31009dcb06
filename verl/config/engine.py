"""Training engines: how a model is sharded, offloaded and computed. Each strategy has a section of its own."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from verl.config.base import LARGEST_SEED, PATH, Section, key, section
from verl.config.mesh import MeshShape
from verl.config.model import HFModelConfig
from verl.utils.errors import ConfigError

VEOMNI = "veomni"
STRATEGIES = ("fsdp", "fsdp2", VEOMNI)  # of the engine that is not a plug-in's

E = TypeVar("E", bound="type[EngineConfig]")
_CLASSES: dict[str, "type[EngineConfig]"] = {}  # by strategy


def configures(*strategies: str) -> Callable[[E], E]:
    """Class decorator: the section configures the engines that are registered under these strategies."""

    def decorate(cls: E) -> E:
        _CLASSES.update(dict.fromkeys(strategies, cls))
        return cls

    return decorate


class EngineConfig(Section):
    """The section of a strategy. Only its own engine knows its keys; the trainer reads what is declared here."""

    seed: int

    @property
    def runs_as(self) -> "EngineConfig":
        """The section that configures the engine: this one, or one with the values of its keys under other names."""
        return self

    def mesh(self, ranks: int) -> MeshShape:
        """How `ranks` ranks divide the model and the data; ConfigError where they cannot."""
        return MeshShape.of(ranks)

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that split the tokens of each sequence."""
        return 1

    @property
    def ranks_per_data_group(self) -> int:
        """Ranks that get the same sequences."""
        return self.ranks_per_sequence

    @property
    def parameter_dtype(self) -> str:
        """Data type of the parameters in a checkpoint."""
        return "fp32"

    def check(self, model: HFModelConfig) -> None:
        """ConfigError where the engine cannot train `model` with these keys."""


def engine_section(owner: Section, strategy: str) -> EngineConfig:
    """The section of `owner` that configures the engine of `strategy`: FSDP's where no section is made for it."""
    wanted = _CLASSES.get(strategy, FSDPEngineConfig)
    for item in fields(owner):
        if item.metadata.get("section") is wanted:
            engine: EngineConfig = getattr(owner, item.name)
            return engine.runs_as
    where = owner.__dict__.get(PATH, type(owner).__name__)
    raise ConfigError(f"{where}.strategy={strategy} is configured by {wanted.__name__}, which {where} lacks")


class RoleConfig(Section):
    """A role whose model runs in a training engine: actor, reference or critic."""

    strategy: str

    @property
    def engine(self) -> EngineConfig:
        """The section of this strategy; FSDP's for a strategy that no section is made for."""
        return engine_section(self, self.strategy)


@dataclass(frozen=True, kw_only=True)
class WrapPolicyConfig(Section):
    """Which modules become FSDP units."""

    transformer_layer_cls_to_wrap: list[str] | None = key(
        None, "Classes of the modules that become units; null is the decoder layers of the model's family."
    )
    min_num_params: int = key(0, "Smallest number of parameters of a unit; 0 wraps by class.", minimum=0)


@configures(*STRATEGIES)
@dataclass(frozen=True, kw_only=True)
class FSDPEngineConfig(EngineConfig):
    """The FSDP engine, from one device to many."""

    strategy: str = key("fsdp2", "fsdp2, or fsdp, an alias of it; no difference on one rank.")
    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig)
    param_offload: bool = key(False, "Keep parameters in CPU memory while the engine is idle.")
    optimizer_offload: bool = key(False, "Keep optimiser state in CPU memory while the engine is idle.")
    offload_policy: bool = key(False, "FSDP2's own CPU offload, during training too; needs several ranks.")
    reshard_after_forward: bool = key(True, "Reshard parameters after the forward pass (ZeRO-3); false is ZeRO-2.")
    fsdp_size: int = key(-1, "Ranks that shard one copy of the parameters; -1 is all of them, fewer is HSDP.")
    forward_prefetch: bool = key(False, "All-gather the next layer's parameters while the current one computes.")
    model_dtype: str = key("fp32", "Data type of the parameters.")
    dtype: str = key(
        "auto",
        "Data type of the forward and backward passes; auto is model_dtype on a CPU and bfloat16 on other devices.",
    )
    mixed_precision: dict[str, Any] | None = key(
        None, "param_dtype, reduce_dtype, buffer_dtype of FSDP; null follows dtype."
    )
    seed: int = key(42, "Seed of the engine's random numbers.", minimum=0, maximum=LARGEST_SEED)
    full_determinism: bool = key(False, "Only deterministic kernels; slower.")
    ulysses_sequence_parallel_size: int = key(
        1, "Ranks that split each sequence (Ulysses); needs use_remove_padding.", minimum=1
    )
    expert_parallel_size: int = key(1, "Ranks that divide the experts of each layer.", minimum=1)
    use_torch_compile: bool = key(True, "Compile the elementwise operations of the output head on GPUs.")
    head_mode: str = key(
        "auto",
        "How log-probs are computed: eager stores all logits, chunked and fused do not, auto selects.",
        choices=("auto", "eager", "chunked", "fused"),
    )
    head_dtype: str = key(
        "auto",
        "Data type of the output head's matrix product: auto is dtype; float32 is exact to 1e-6 beside a bfloat16 "
        "model, and holds a copy of the head's weight during a pass.",
        choices=("auto", "float32"),
    )
    entropy_from_logits_with_chunking: bool = key(
        False, "Compute log-probs and entropy in chunks of tokens (head_mode chunked or fused)."
    )
    entropy_from_logits_chunk_size: int = key(2048, "Tokens per chunk of logits in the chunked head.", minimum=1)
    entropy_checkpointing: bool = key(False, "Recompute entropy in the backward pass (head_mode chunked or fused).")
    forward_only: bool = key(False, "No optimiser and no gradients.")

    def mesh(self, ranks: int) -> MeshShape:
        return MeshShape.of(
            ranks,
            context=self.ulysses_sequence_parallel_size,
            experts=self.expert_parallel_size,
            fsdp_size=self.fsdp_size,
        )

    @property
    def ranks_per_sequence(self) -> int:
        return self.ulysses_sequence_parallel_size

    @property
    def parameter_dtype(self) -> str:
        return self.model_dtype

    def check(self, model: HFModelConfig) -> None:
        if (size := self.ulysses_sequence_parallel_size) > 1 and not model.use_remove_padding:
            where = f"{self.__dict__[PATH]}." if PATH in self.__dict__ else ""
            raise ConfigError(f"{where}ulysses_sequence_parallel_size={size} needs model.use_remove_padding=True")


@configures(VEOMNI)
@dataclass(frozen=True, kw_only=True)
class VeOmniEngineConfig(EngineConfig):
    """VeOmni's keys, by which the FSDP engine runs."""

    param_offload: bool = key(False, "Keep parameters in CPU memory while the engine is idle.")
    optimizer_offload: bool = key(False, "Keep optimiser state in CPU memory while the engine is idle.")
    enable_fsdp_offload: bool = key(False, "FSDP2's own CPU offload, during training too; needs several ranks.")
    enable_full_shard: bool = key(True, "Reshard parameters after the forward pass (ZeRO-3); false is ZeRO-2.")
    forward_prefetch: bool = key(True, "All-gather the next layer's parameters while the current one computes.")
    fsdp_size: int = key(-1, "Ranks that shard one copy of the parameters; -1 is all of them.")
    ulysses_parallel_size: int = key(1, "Ranks that split each sequence (Ulysses).", minimum=1)
    expert_parallel_size: int = key(1, "Ranks that divide the experts of each layer.", minimum=1)
    mixed_precision: bool = key(True, "Compute in bfloat16 where the device is no CPU; false computes in float32.")
    seed: int = key(42, "Seed of the engine's random numbers.", minimum=0, maximum=LARGEST_SEED)
    full_determinism: bool = key(False, "Only deterministic kernels; slower.")
    use_torch_compile: bool = key(False, "Compile the elementwise operations of the output head on GPUs.")
    entropy_from_logits_with_chunking: bool = key(False, "Compute log-probs and entropy in chunks of tokens.")
    entropy_checkpointing: bool = key(False, "Recompute entropy in the backward pass.")
    forward_only: bool = key(False, "No optimiser and no gradients.")

    @property
    def runs_as(self) -> "FSDPEngineConfig":
        renamed = {
            "ulysses_parallel_size": "ulysses_sequence_parallel_size",
            "enable_full_shard": "reshard_after_forward",
            "enable_fsdp_offload": "offload_policy",
        }
        names = [item.name for item in fields(self) if item.name not in ("extra", "mixed_precision")]
        values = {renamed.get(name, name): self[name] for name in names}
        return FSDPEngineConfig(dtype="auto" if self.mixed_precision else "fp32", **values)
