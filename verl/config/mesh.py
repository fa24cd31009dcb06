"""The mesh of the ranks that train one model: which of them share data, tokens, matrices, experts and layers.

Rank (((stage R + replica) S + shard) C + context) T + tensor, for R replicas of S shards of C x T ranks in each stage.
"""

from dataclasses import dataclass

from verl.utils.errors import ConfigError

SIZES = {  # the key of each size
    "stages": "pipeline_parallel_size",
    "context": "ulysses_sequence_parallel_size",
    "tensor": "tensor_parallel_size",
    "experts": "expert_parallel_size",
}


@dataclass(frozen=True)
class MeshShape:
    """How `ranks` are divided. A mesh of ones is one rank alone."""

    ranks: int = 1
    stages: int = 1  # which hold different layers (pipeline parallelism)
    context: int = 1  # which exchange tokens for heads (Ulysses)
    tensor: int = 1  # which divide matrices
    experts: int = 1  # consecutive ranks of a stage that divide the experts
    sharded: int = 1  # consecutive ranks of a stage that hold one copy of its parameters

    @classmethod
    def of(
        cls, ranks: int, stages: int = 1, context: int = 1, tensor: int = 1, experts: int = 1, fsdp_size: int = -1
    ) -> "MeshShape":
        """The mesh of `ranks`; `fsdp_size` ranks (-1: all of a stage) hold one copy. ConfigError with the nearest sizes
        that divide the ranks where these do not."""
        divided = ranks
        for name, size in (("stages", stages), ("context", context), ("tensor", tensor)):
            if divided % size:
                of = f"{ranks} ranks" if divided == ranks else f"the {divided} of {ranks} ranks that are left for it"
                raise ConfigError(f"{SIZES[name]}={size} does not divide {of}; {_use(divided)}")
            divided //= size
        stage = ranks // stages
        sharded = stage if fsdp_size < 1 else min(fsdp_size, stage)
        if stage % sharded:
            raise ConfigError(f"fsdp_size={fsdp_size} does not divide {_ranks(stage, stages)}; {_use(stage)}")
        if tensor > 1 and sharded % (context * tensor):
            raise ConfigError(
                f"fsdp_size={fsdp_size} is no multiple of the {context * tensor} ranks that divide a sequence "
                f"({SIZES['context']} x {SIZES['tensor']}); use {context * tensor}, a multiple of it, or -1"
            )
        if sharded % experts:
            holds = f"the {sharded} ranks that hold one copy of the parameters"
            raise ConfigError(f"{SIZES['experts']}={experts} does not divide {holds}; {_use(sharded)}")
        return cls(ranks, stages, context, tensor, experts, sharded)

    @property
    def per_stage(self) -> int:
        return self.ranks // self.stages

    @property
    def sequence(self) -> int:
        """Consecutive ranks that divide the tokens of each sequence."""
        return self.context * self.tensor

    @property
    def data(self) -> int:
        """Ranks of a stage that see different data, or groups of them."""
        return self.per_stage // self.sequence

    @property
    def copies(self) -> int:
        """Copies of the parameters of a stage."""
        return self.per_stage // self.sharded

    def stage_of(self, rank: int) -> int:
        return rank // self.per_stage

    def data_group_of(self, rank: int) -> int:
        """Which part of the data a rank sees."""
        return rank % self.per_stage // self.sequence

    def returns_outputs(self, rank: int) -> bool:
        """Whether a rank returns what its data group computes: the first rank of the group in the last stage."""
        return rank % self.sequence == 0 and self.stage_of(rank) == self.stages - 1

    def __str__(self) -> str:
        """The sizes that are not 1: `2 stages x 4 data x 2 tensor, 8 for experts`."""
        named = {"stages": self.stages, "data": self.data, "context": self.context, "tensor": self.tensor}
        parts = [f"{size} {name}" for name, size in named.items() if size > 1]
        return " x ".join(parts or ["1 rank"]) + (f", {self.experts} for experts" if self.experts > 1 else "")


def _ranks(stage: int, stages: int) -> str:
    return f"{stage} ranks" + (f" of each of the {stages} stages" if stages > 1 else "")


def _use(count: int) -> str:
    return f"use one of {', '.join(str(n) for n in range(1, count + 1) if count % n == 0)}"
