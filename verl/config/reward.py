"""Rewards: a function of your own, a reward model or a built-in scorer."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import Section, key, section
from verl.config.engine import FSDPEngineConfig, RoleConfig
from verl.config.model import HFModelConfig
from verl.config.rollout import EngineKwargsConfig
from verl.utils.errors import ConfigError

SCORERS = ("math", "gsm8k", "exact", "math_dapo", "prime_math", "geo3k", "code", "search_r1_like_qa_em", "math_reward")
RM = "rm"  # the reward model's score, as a part of the reward


@dataclass(frozen=True, kw_only=True)
class CustomRewardConfig(Section):
    """A reward function of your own."""

    path: str | None = key(
        None, "Python file, file://... or pkg://module that holds the function; null is built-in scorers."
    )
    name: str = key("compute_score", "Name of the function.")
    reward_kwargs: dict[str, Any] = key({}, "Arguments added to every call.")


@dataclass(frozen=True, kw_only=True)
class RewardManagerModuleConfig(Section):
    """The file of a reward manager of your own."""

    path: str | None = key(None, "source=importlib: Python file, file://... or pkg://module that holds the class.")


@dataclass(frozen=True, kw_only=True)
class RewardManagerConfig(Section):
    """The reward manager: how the scorer is called, or how its value is changed."""

    source: str = key("register", "Where `name` is looked up.", choices=("register", "importlib"))
    name: str = key("naive", "Reward manager by name; with source=importlib the name of the class in module.path.")
    module: RewardManagerModuleConfig = section(RewardManagerModuleConfig)


@dataclass(frozen=True, kw_only=True)
class RewardModelServerConfig(Section):
    """The processes of a served reward model."""

    python: str | None = key(None, "Python executable of the servers; null is this process's.")
    max_start_wait_time: float = key(300.0, "Seconds a server may take to start.", greater_than=0)
    timeout: float = key(60.0, "Seconds a server may take to answer one request.", greater_than=0)


@dataclass(frozen=True, kw_only=True)
class RewardModelRolloutConfig(Section):
    """The servers of a reward model or a judge."""

    name: str | None = key(
        None,
        "vllm or sglang: servers of the reward model. native: a judge without either. null: a reward model in the "
        "trainer's ranks, and a native judge.",
        choices=(None, "vllm", "sglang", "native"),
    )
    num_replicas: int | None = key(None, "Servers; null is as many as fill the devices, one on CPUs.", minimum=1)
    tensor_model_parallel_size: int = key(1, "Devices that share every tensor of a replica.", minimum=1)
    data_parallel_size: int = key(1, "Data parallelism inside one replica; a run takes 1.", minimum=1)
    gpu_memory_utilization: float = key(0.5, "Fraction of device memory, in (0, 1].", greater_than=0, maximum=1)
    dtype: str = key("auto", "Data type of the servers; auto is that of the model's folder.")
    max_model_len: int | None = key(None, "Longest sequence in tokens; null is what the model allows.", minimum=1)
    prompt_length: int = key(2048, "Judge: longest question in tokens.", minimum=1)
    response_length: int = key(2048, "Judge: longest answer in tokens.", minimum=1)
    max_num_seqs: int = key(1024, "Sequences computed at once.", minimum=1)
    max_num_batched_tokens: int = key(8192, "Tokens one engine step may process.", minimum=1)
    enforce_eager: bool = key(True, "No CUDA graphs.")
    free_cache_engine: bool = key(True, "On the actor's devices: sleep except while answers are scored.")
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig)
    server: RewardModelServerConfig = section(RewardModelServerConfig)


@dataclass(frozen=True, kw_only=True)
class ScoringModelConfig(RoleConfig):
    """A model that scores answers: in the trainer's ranks, in servers, or asked by a reward function (a judge)."""

    enable: bool = key(False, "Score answers with a reward model, or start a judge for the reward function.")
    model_path: str | None = key(None, "Folder of the reward model or of the judge.")
    input_tokenizer: str | None = key(
        None,
        "Folder of the policy's tokenizer: render every conversation anew with the reward model's chat template. null "
        "does so only where the two tokenizers differ.",
    )
    enable_resource_pool: bool = key(False, "Devices of its own; False shares the actor's, asleep in turn.")
    nnodes: int = key(0, "enable_resource_pool: machines.", minimum=0)
    n_gpus_per_node: int = key(8, "enable_resource_pool: devices per machine.", minimum=1)
    strategy: str = key("fsdp2", "Engine of a reward model in the trainer's ranks.")
    use_dynamic_bsz: bool = key(False, "Fill micro-batches up to a token budget.")
    forward_micro_batch_size_per_gpu: int | None = key(
        None, "Sequences per forward pass on one device; null is a token budget.", minimum=1
    )
    forward_max_token_len_per_gpu: int = key(32768, "Tokens per forward pass on one device.", minimum=1)
    ulysses_sequence_parallel_size: int = key(
        1, "Short spelling of fsdp_config.ulysses_sequence_parallel_size.", minimum=1
    )
    fsdp_config: FSDPEngineConfig = section(FSDPEngineConfig, forward_only=True)
    rollout: RewardModelRolloutConfig = section(RewardModelRolloutConfig)


@dataclass(frozen=True, kw_only=True)
class SandboxFusionConfig(Section):
    """Where the built-in scorer runs programs: in the sandbox of this machine, or on a SandboxFusion server."""

    url: str | None = key(None, "Address of the server's run_code call; null is the sandbox of this machine.")
    max_concurrent: int = key(64, "Programs at once on the server.", minimum=1)
    memory_limit_mb: int = key(1024, "Memory of one program in MB, on either.", minimum=1)


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Section):
    """Scoring of answers."""

    num_workers: int = key(
        8, "Calls of a plain function at once: threads, or processes of `remote` and `prime`.", minimum=1
    )
    on_error: str = key(
        "stop", "A failing scorer stops the run, or its answer is left out and counted.", choices=("stop", "count")
    )
    timeout_s: float | None = key(
        300.0, "Seconds one call may take before it counts as failed; null is no limit.", greater_than=0
    )
    retries: int = key(0, "Further attempts, after growing waits, of a call or a reward model's pass.", minimum=0)
    max_errors: int | None = key(
        None, "on_error=count: answers without a score above which the run stops; null is any number.", minimum=0
    )
    max_concurrent: int = key(1, "rate_limited: calls that run at once in this process.", minimum=1)
    max_rpm: int | None = key(None, "rate_limited: calls that start within any minute; null is any number.", minimum=1)
    max_tpm: int | None = key(
        None, "rate_limited: tokens of the calls that start within any minute; null is any number.", minimum=1
    )
    estimated_tokens_per_request: int = key(2000, "max_tpm: tokens that one call is taken to cost.", minimum=1)
    weights: dict[str, float] = key(
        {},
        "Weight of each part of the reward by its name: the reward is their weighted sum. Empty: it is the score that "
        "the function returns. The part rm is the score of reward.reward_model.",
    )
    canary_size: int | None = key(
        None,
        "Fixed answers that are scored again at every step, to name a reward that changes; 0 is none. null: 8, or none "
        "where a call may cost money.",
        minimum=0,
    )
    canary_on_change: str = key(
        "auto",
        "A changed score of a fixed answer stops the run, or is a metric only (drift); auto stops where the first two "
        "scores are equal.",
        choices=("auto", "stop", "drift"),
    )
    scorer: str | None = key(
        None, "Built-in scorer of all rows by name; null is that of each data source.", choices=(None, *SCORERS)
    )
    reward_kwargs: dict[str, Any] = key({}, "Arguments of the built-in scorer, and of the dapo manager.")
    custom_reward_function: CustomRewardConfig = section(CustomRewardConfig)
    reward_manager: RewardManagerConfig = section(RewardManagerConfig)
    reward_model: ScoringModelConfig = section(ScoringModelConfig)
    sandbox_fusion: SandboxFusionConfig = section(SandboxFusionConfig)


def reward_model_place(config: RewardConfig) -> str | None:
    """`ranks` or `servers`: where a reward model scores answers. `judge`: a server that the reward function of
    `custom_reward_function.path` asks. None: there is no reward model.

    Beside a function, reward.weights.rm says that the model scores, too.
    """
    if not config.reward_model.enable:
        return None
    if config.custom_reward_function.path and RM not in config.weights:
        return "judge"
    return "servers" if config.reward_model.rollout.name else "ranks"


def uses_built_in_scorers(config: RewardConfig) -> bool:
    """Whether built-in scorers are called: there is no function, and no reward model that gives the whole reward."""
    alone = config.reward_model.enable and set(config.weights) <= {RM}
    return config.custom_reward_function.path is None and not alone


def check_reward_model(config: RewardConfig) -> None:
    """ConfigError where `scorer` or `reward_model` cannot be what the other keys ask for."""
    if config.scorer and not uses_built_in_scorers(config):
        other = config.custom_reward_function.path or config.reward_model.model_path
        raise ConfigError(
            f"reward.scorer={config.scorer} would not be asked: {other} scores the answers; keep one of them"
        )
    settings, key, weights = config.reward_model, "reward.reward_model", config.weights
    if not settings.enable:
        if RM in weights and config.custom_reward_function.path is None:
            raise ConfigError(f"reward.weights.{RM} weighs a reward model; set {key}.enable=True")
        return
    place = reward_model_place(config)
    if place != "judge" and weights and RM not in weights:
        raise ConfigError(
            f"reward.weights={weights} has no weight of the reward model, whose score would not count; add {RM}, "
            f"such as reward.weights.{RM}=1.0, or set {key}.enable=False"
        )
    if place == "servers" and settings.rollout.name == "native":
        raise ConfigError(
            f"{key}.rollout.name=native serves a judge, which a function of reward.custom_reward_function.path asks; "
            "drop it to score in the trainer's ranks, or use vllm or sglang"
        )
    if (settings.rollout.name or "native") == "native" and (settings.rollout.num_replicas or 1) > 1:
        raise ConfigError(f"{key}.rollout.num_replicas={settings.rollout.num_replicas} needs {key}.rollout.name=vllm")
    if place != "judge" and config.canary_size:
        raise ConfigError(
            f"reward.canary_size={config.canary_size} keeps answers as texts, and a reward model scores their tokens; "
            "drop it"
        )
    if place == "ranks":
        settings.engine.check(HFModelConfig())
