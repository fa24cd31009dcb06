"""Estimates the device memory of every role of a plan, in each phase of a step.

Counted are parameters, gradients, optimiser state, and the weights and the KV cache of rollouts. Activations, logits,
gathered layers and what libraries take for themselves are not.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from verl.algorithms.old_logprobs import keeps_published_weights
from verl.config import HFModelConfig, RunConfig
from verl.config.asynchronous import keeps_cache
from verl.config.check import has_adapters
from verl.config.distillation import role_name, teachers
from verl.config.engine import EngineConfig
from verl.models.load import dtype_of
from verl.models.parameter_counts import ParameterCounts, model_parameters
from verl.placement.plan import REWARD_MODEL, ROLLOUT, Plan, splits_rollout
from verl.runtime.pools import Pool
from verl.utils.errors import ConfigError
from verl.workers.rollout.adapters import publishes_adapters
from verl.workers.rollout.base import rollout_dtype
from verl.workers.rollout.engines import rollout_engine_of
from verl.workers.rollout.native.cache_limits import CPU_CACHE_BYTES
from verl.workers.rollout.registry import Weights

STATES_OF_OPTIMIZER = {"SGD": 0, "RMSprop": 1, "Adagrad": 1}  # numbers a parameter; Adam and its relatives have 2


@dataclass(frozen=True)
class Phase:
    """A part of a step: the roles whose tensors must be on the device, and the one that trains."""

    name: str
    active: tuple[str, ...]
    trains: str = ""


@dataclass(frozen=True)
class Holding:
    """Bytes of `what` that `role` holds on a device, in each phase."""

    role: str
    what: str
    sizes: tuple[float, ...]


@dataclass(frozen=True)
class PoolMemory:
    """The memory of each device of a pool. `rollout_share`: of the device, filled by a rollout that is awake; 0 where
    the sizes hold it already. `in_host`: bytes for each device that a rollout keeps in host memory while it sleeps;
    `kept_in_host`: those of the published weights, which the actor keeps beside the ones that it trains."""

    pool: str
    phases: tuple[str, ...]
    holdings: tuple[Holding, ...]
    rollout_share: float = 0.0
    in_host: float = 0.0
    kept_in_host: float = 0.0

    @property
    def sums(self) -> tuple[float, ...]:
        return tuple(sum(sizes) for sizes in zip(*(h.sizes for h in self.holdings), strict=True))

    @property
    def peak(self) -> tuple[float, str]:
        """The largest sum in bytes, and its phase."""
        return max(zip(self.sums, self.phases, strict=True), key=lambda pair: pair[0], default=(0.0, ""))


def count_roles(config: RunConfig, plan: Plan) -> dict[str, ParameterCounts]:
    """The parameters of every role; ConfigError where a model's folder is not here or cannot be read."""
    counted: list[tuple[HFModelConfig, ParameterCounts]] = []
    for model in (models := _models(config, plan)).values():
        if not any(model == other for other, _ in counted):
            counted.append((model, model_parameters(model)))
    return {role: next(counts for other, counts in counted if other == model) for role, model in models.items()}


def _models(config: RunConfig, plan: Plan) -> dict[str, HFModelConfig]:
    arr = config.actor_rollout_ref
    whole = replace(arr.model, lora_rank=0, lora_adapter_path=None)
    models = {"actor": arr.model, "reference": whole, "rollout": whole, "critic": config.critic.model}
    models["reward_model"] = HFModelConfig(path=config.reward.reward_model.model_path)
    models |= {role_name(t.name): replace(whole, path=t.path) for t in teachers(config.distillation)}
    return {role: models[role] for pool in plan.pools for role in pool.roles}


def estimate_memory(
    config: RunConfig, plan: Plan, counts: Mapping[str, ParameterCounts], device_bytes: int | None = None
) -> list[PoolMemory]:
    """The memory of every pool; `device_bytes` is that of one device, without which a KV cache may have no size.

    ConfigError where the weights of a replica have no room in its share of the device.
    """
    return [_PoolEstimate(config, plan, pool, counts, device_bytes).result() for pool in plan.pools]


def _phases(config: RunConfig, plan: Plan) -> list[Phase]:
    """The phases of a step in order, of the roles that the plan has."""
    shared = has_adapters(config.actor_rollout_ref.model) and "reference" in plan.pools[0].roles
    samples_in_place = _is_in_place(config) and plan.pools[0].num_devices == 1
    every = [
        ("collect", ("rollout", "actor") if samples_in_place else ("rollout",), ""),
        ("reward", ("reward_model",), ""),
        ("log-probs", ("actor",), ""),
        ("reference", ("actor" if shared else "reference",), ""),
        *((role_name(teacher.name), (role_name(teacher.name),), "") for teacher in teachers(config.distillation)),
        ("values", ("critic",), ""),
        ("update critic", ("critic",), "critic"),
        ("update actor", ("actor",), "actor"),
        ("publish", ("rollout", "actor"), ""),
    ]
    roles = {role for pool in plan.pools for role in pool.roles} | ({"reference"} if shared else set())
    roles -= {"reward_model"} - {*plan.pools[0].roles}  # on devices of its own it scores while others sample
    needs = {"reference": "reference"}
    return [Phase(*phase) for phase in every if needs.get(phase[0], phase[1][0]) in roles]


def _is_in_place(config: RunConfig) -> bool:
    return rollout_engine_of(config.actor_rollout_ref).weights is Weights.IN_PLACE


@dataclass(frozen=True)
class _PoolEstimate:
    config: RunConfig
    plan: Plan
    pool: Pool
    counts: Mapping[str, ParameterCounts]
    device_bytes: int | None

    def result(self) -> PoolMemory:
        arr, critic = self.config.actor_rollout_ref, self.config.critic
        engines: dict[str, EngineConfig] = {"actor": arr.actor.engine, "critic": critic.engine}
        engines |= {
            role: arr.ref.engine for role in self.pool.roles if role == "reference" or role.startswith("teacher_")
        }
        engines["reward_model"] = self.config.reward.reward_model.engine
        optimizers = {"actor": arr.actor.optim.optimizer, "critic": critic.optim.optimizer}
        shared = has_adapters(arr.model) and "actor" in self.pool.roles  # the actor without its adapters
        holdings: list[Holding] = []
        for role in self.pool.roles:
            is_served = role == "reward_model" and self.plan.reward_servers is not None
            if role in engines and not is_served and not (role == "reference" and shared):
                holdings += self._of_engine(role, engines[role], optimizers.get(role))
        if "reward_model" in self.pool.roles and self.plan.reward_servers is not None:
            served = self.config.reward.reward_model.rollout
            weights = 2.0 * self.counts["reward_model"].all / served.tensor_model_parallel_size
            tensor = served.tensor_model_parallel_size
            cache = self._cache(weights, served.gpu_memory_utilization, f"{REWARD_MODEL}.rollout", tensor)
            holdings += self._of_server("reward_model", weights, cache, always=len(self.pool.roles) == 1)
        share = in_host = 0.0
        if "rollout" in self.pool.roles and self.plan.rollout.on_devices:
            of_rollout, share = self._of_rollout(holdings)
            holdings += of_rollout
            sizes = next(h.sizes for h in of_rollout if h.what == "weights")
            in_host = max(sizes) if publishes_adapters(arr) and 0.0 in sizes else 0.0
        phases = tuple(phase.name for phase in self.phases)
        kept = 0.0
        if "actor" in self.pool.roles and keeps_published_weights(self.config):
            storage = _bytes_of_types(arr.actor.engine, self.plan.machine.kind)[0]
            kept = self.counts["actor"].trained * storage / self._shards(arr.actor.engine)
        return PoolMemory(self.pool.name, phases, tuple(h for h in holdings if any(h.sizes)), share, in_host, kept)

    def _shards(self, engine: EngineConfig) -> int:
        ranks, size = self.pool.num_devices, engine.get("fsdp_size", -1)
        return size if 0 < size < ranks else ranks

    @property
    def phases(self) -> list[Phase]:
        return _phases(self.config, self.plan)

    def _of_engine(self, role: str, engine: EngineConfig, optimizer: str | None) -> list[Holding]:
        """Memory of a training engine; without an `optimizer`, of a model that is never trained."""
        ranks, counts, shards = self.pool.num_devices, self.counts[role], self._shards(engine)
        storage, compute, reduce = _bytes_of_types(engine, self.plan.machine.kind)
        storage = storage if optimizer else compute
        offloads_shards = ranks > 1 and engine.get("offload_policy", False)
        parameters = 0.0 if offloads_shards else counts.all * storage / shards
        if ranks == 1 and compute != storage:
            parameters += counts.all * compute  # the copy that computes
        gathered = 0 if ranks == 1 or engine.get("reshard_after_forward", True) else counts.all * compute
        sums = counts.trained * reduce * (shards > 1)  # between micro-batches
        gradients = sums + (0 if offloads_shards else counts.trained * storage / shards)
        states = STATES_OF_OPTIMIZER.get(optimizer or "", 2) * counts.trained * storage / shards
        resident = 0.0 if engine.get("param_offload", False) else parameters
        idle_states = 0.0 if offloads_shards or engine.get("optimizer_offload", False) else states
        busy_states = 0.0 if offloads_shards else states
        rows = [
            self._row(role, "parameters", lambda p: parameters if role in p.active else resident),
            self._row(role, "gathered layers", lambda p: gathered if role in p.active and p.name != "publish" else 0),
        ]
        if optimizer:
            rows += [
                self._row(role, "gradients", lambda p: gradients if p.trains == role else 0),
                self._row(role, "optimiser state", lambda p: busy_states if p.trains == role else idle_states),
            ]
        return rows

    def _row(self, role: str, what: str, size: Callable[[Phase], float]) -> Holding:
        return Holding(role, what, tuple(float(size(phase)) for phase in self.phases))

    def _of_rollout(self, beside: list[Holding]) -> tuple[list[Holding], float]:
        """Memory of the rollout, and the share of the device that it fills where the cache's size is not known."""
        rollout, replicas, counts = self.config.actor_rollout_ref.rollout, self.plan.rollout, self.counts["rollout"]
        dtype = rollout_dtype(rollout.dtype)
        compute = _bytes_of_types(self.config.actor_rollout_ref.actor.engine, self.plan.machine.kind)[1]
        size = compute if dtype is None else dtype.itemsize
        over = replicas.data if rollout.expert_parallel_size > 1 else 1
        weights = size * ((counts.all - counts.experts) + counts.experts / over) / replicas.tensor
        if publishes_adapters(self.config.actor_rollout_ref):
            weights += size * self.counts["actor"].trained
        taken = 0.0
        if _is_in_place(self.config):
            weights = 0.0 if self.pool.num_devices == 1 else weights
            taken = sum(holding.sizes[0] for holding in beside)  # the native engine's share counts what is there
        tensor = None if _is_in_place(self.config) else replicas.tensor
        cache: float | None = rollout.kv_cache_bytes
        if cache is None:
            cache = self._cache(weights, rollout.gpu_memory_utilization, ROLLOUT, tensor, taken)
        stays = not rollout.free_cache_engine or (rollout.name == "vllm" and not rollout.enable_sleep_mode)
        stays = stays or keeps_cache(self.config)  # as long as answers are unfinished
        always = splits_rollout(self.config) or stays
        engine = rollout_engine_of(self.config.actor_rollout_ref)
        rows = self._of_server("rollout", weights, cache, always, always or engine.traits.sleeps_with_weights)
        return rows, 0.0 if cache is not None else rollout.gpu_memory_utilization

    def _of_server(
        self, role: str, weights: float, cache: float | None, always: bool, keeps_weights: bool | None = None
    ) -> list[Holding]:
        keeps = always if keeps_weights is None else keeps_weights
        return [
            self._row(role, "weights", lambda p: weights if keeps or role in p.active else 0),
            self._row(role, "KV cache", lambda p: (cache or 0) if always or role in p.active else 0),
        ]

    def _cache(self, weights: float, share: float, where: str, tensor: int | None, taken: float = 0.0) -> float | None:
        """Bytes of a KV cache in a `share` of the device, beside `weights` and what is `taken`; None where no size is
        known. ConfigError where the weights, divided by `tensor` unless it is None, fill the share."""
        if self.plan.machine.kind == "cpu":
            return CPU_CACHE_BYTES
        if (device := self.device_bytes) is None:
            return None
        if weights < share * device:
            return max(share * device - weights - taken, 0.0)
        more = (math.floor(100 * weights / device) + 1) / 100
        ways = [f"raise {where}.gpu_memory_utilization to {more} or more"] if more < 1 else []
        if tensor is not None:
            least = math.floor(weights * tensor / (share * device)) + 1
            ways.append(f"raise {where}.tensor_model_parallel_size to {least} or more")
        raise ConfigError(
            f"{where}: the weights take {weights / 1e9:.1f} GB of a device, and gpu_memory_utilization={share} of its "
            f"{device / 1e9:.1f} GB is {share * device / 1e9:.1f} GB; {', or '.join(ways) or 'take larger devices'}"
        )


def _bytes_of_types(engine: EngineConfig, kind: str) -> tuple[int, int, int]:
    """Bytes of a parameter between passes, of one that computes, and of a number of the gradients' sum."""
    storage = dtype_of(engine.parameter_dtype.removeprefix("torch."), "model_dtype").itemsize
    mixed = engine.get("mixed_precision") or {}
    reduce = dtype_of(mixed["reduce_dtype"], "reduce_dtype").itemsize if mixed.get("reduce_dtype") else max(storage, 4)
    name = mixed.get("param_dtype", engine.get("dtype", "auto"))
    if name == "auto":
        return storage, storage if kind == "cpu" else 2, reduce
    return storage, dtype_of(name.removeprefix("torch."), "dtype").itemsize, reduce


def gigabytes(size: int) -> str:
    """A size in bytes as text, in GB (MB below one)."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
