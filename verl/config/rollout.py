"""The rollout: engine, memory, sampling parameters, agent loops."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import LARGEST_SEED, Section, key, section
from verl.config.profiler import ProfilerConfig

_KV_CACHE = (
    "Asynchronous training: what unfinished answers do with keys and values of the weights before a publish. "
    "recompute: from all tokens anew by the new weights; keep_kv (native, vllm): go on with them, which saves the time "
    "and keeps the memory: while an answer is unfinished the engine does not sleep, whatever free_cache_engine says."
)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Section):
    """Sampling during validation."""

    temperature: float = key(0.0, "Softmax temperature; 0 is greedy.")
    top_p: float = key(1.0, "Probability mass of top-p sampling; 1 is off.", greater_than=0, maximum=1)
    top_k: int = key(-1, "Number of tokens of top-k sampling; -1 is off.")
    n: int = key(1, "Answers per prompt.", minimum=1, maximum=65536)
    do_sample: bool = key(False, "False is greedy.")


@dataclass(frozen=True, kw_only=True)
class EngineKwargsConfig(Section):
    """Arguments passed to an engine unchanged."""

    vllm: dict[str, Any] = key({}, "Arguments of vLLM.")
    sglang: dict[str, Any] = key({}, "Arguments of SGLang.")
    native: dict[str, Any] = key({}, "native on devices of its own: hf_overrides, values that replace config.json's.")


@dataclass(frozen=True, kw_only=True)
class PrometheusConfig(Section):
    """A Prometheus server that learns where the run and its rollout servers export metrics."""

    enable: bool = key(False, "Write the targets of this run into `file`, and let the server read it again.")
    port: int = key(
        9090, "Port of the server, which was started with --web.enable-lifecycle.", minimum=1, maximum=65535
    )
    file: str = key(
        "/tmp/ray/session_latest/metrics/prometheus/prometheus.yml",
        "The server's configuration; jobs of others stay in it.",
    )
    served_model_name: str | None = key(
        None, "Label of the rollout servers; null is the last part of the model's path."
    )


@dataclass(frozen=True, kw_only=True)
class TraceConfig(Section):
    """Traces of conversations: prompt, turns, tool calls, rewards, policy versions."""

    backend: str | None = key(
        None, "Where traces go; null records none.", choices=("mlflow", "weave", "trackio", "opentelemetry")
    )
    token2text: bool = key(False, "Record the tokens of each turn too: their ids, texts and log-probs.")
    max_samples_per_step_per_worker: int | None = key(
        None,
        "Prompts traced in a step, each with all answers; null is all. The driver is the one worker.",
        minimum=1,
    )
    project_name: str | None = key(None, "Project of the traces; null is trainer.project_name.")
    experiment_name: str | None = key(None, "Name of the run in them; null is trainer.experiment_name.")


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Section):
    """Rollout engines in their own processes."""

    python: str | None = key(None, "Python executable of the servers; null is this process's.")
    url: str | None = key(None, "sglang, tgi: a server that runs already, such as http://127.0.0.1:30000.")
    model: str | None = key(None, "tgi: model name in requests to an OpenAI-compatible server.")
    timeout: float = key(60.0, "Seconds to connect, and without a sign of life; answers have no limit.")
    max_attempts: int = key(3, "Attempts per request.")
    retry_delay: float = key(2.0, "Seconds between attempts.")
    max_connections: int = key(1000, "Connections open at once.")
    max_start_wait_time: float = key(300.0, "Seconds a server may take to start.")
    max_restarts: int = key(3, "vllm: times each of several replicas is replaced that died or hangs.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class MultiTurnConfig(Section):
    """Conversations with tools."""

    enable: bool = key(False, "Multi-turn rollout; agents also run when a row or agent.default_agent_loop names one.")
    max_assistant_turns: int | None = key(None, "Largest number of assistant turns; null is no limit.")
    max_user_turns: int | None = key(None, "Largest number of tool or user turns; null is no limit.")
    max_parallel_calls: int = key(1, "Tool calls run per turn.", minimum=1)
    tool_config_path: str | None = key(None, "YAML file that lists tools.")
    function_tool_path: str | None = key(None, "Python file with @function_tool functions.")
    interaction_config_path: str | None = key(None, "YAML file that lists interactions, which reply as users.")
    max_tool_response_length: int = key(256, "Longest tool response in characters.")
    tool_response_truncate_side: str = key("middle", "Side that is cut.", choices=("left", "middle", "right"))
    format: str = key("hermes", "Tool-call parser.")


@dataclass(frozen=True, kw_only=True)
class AgentLoopConfig(Section):
    """Agent loops."""

    default_agent_loop: str = key("single_turn_agent", "Loop of rows without agent_name.")
    agent_loop_config_path: str | None = key(None, "YAML file that lists further loops.")
    timeout_s: float | None = key(
        1800.0, "Seconds a conversation may take besides generation; null is no limit.", greater_than=0
    )
    extra: dict[str, Any] = key({}, "Any keys of your own, for an agent loop that you registered.")


@dataclass(frozen=True, kw_only=True)
class CheckpointEngineConfig(Section):
    """Weight transfer from the trainer to the rollout engine."""

    backend: str = key(
        "naive", "Transport; naive (memory of one machine), nccl (broadcast; gloo on a CPU), file, or a plug-in's."
    )
    update_weights_bucket_megabytes: int = key(
        2048, "Bucket size of a transfer in MiB; larger tensors exceed it, CPUs use less.", minimum=1
    )
    engine_kwargs: dict[str, Any] = key({}, "Constructor arguments per transport, {backend: {name: value}}.")
    probe_every: int = key(
        10, "Weight publications between two log-prob probes of the engine; 0 is the first only.", minimum=0
    )
    custom_backend_module: str | None = key(None, "Module imported to register a transport.")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Section):
    """The rollout engine and training-time sampling."""

    name: str = key("native", "Rollout engine: native, vllm, sglang, tgi, or one that your code registers.")
    temperature: float = key(1.0, "Softmax temperature, above 0; do_sample=False is greedy.")
    top_k: int = key(-1, "Number of tokens of top-k sampling; -1 is off.")
    top_p: float = key(1.0, "Probability mass of top-p sampling; 1 is off.", greater_than=0, maximum=1)
    n: int = key(1, "Answers per prompt.", minimum=1, maximum=65536)
    do_sample: bool = key(True, "False is greedy.")
    min_tokens: int = key(0, "Smallest number of tokens of an answer.", minimum=0)
    stop: list[str] = key([], "Texts that end an answer.")
    stop_token_ids: list[int] = key([], "Tokens that end an answer, besides the model's own.")
    ignore_eos: bool = key(False, "Continue past the end-of-sequence token.")
    seed: int = key(42, "Seed of sampling.", minimum=0, maximum=LARGEST_SEED)
    prompt_length: int = key(512, "Longest prompt in tokens.", minimum=1)
    response_length: int = key(512, "Longest answer in tokens.", minimum=1)
    max_model_len: int | None = key(
        None, "Longest prompt + answer in tokens; null is prompt_length + response_length.", minimum=1
    )
    dtype: str = key("auto", "Data type of the rollout; auto is the type the actor computes in.")
    gpu_memory_utilization: float = key(
        0.5, "Fraction of device memory for weights and KV cache, in (0, 1].", greater_than=0, maximum=1
    )
    standalone_gpu_memory_utilization: float | None = key(
        None, "gpu_memory_utilization of a rollout with devices of its own; null is that.", greater_than=0, maximum=1
    )
    kv_cache_bytes: int | None = key(None, "native: size of the KV cache in bytes; null selects by device.", minimum=1)
    enforce_eager: bool = key(False, "No CUDA graphs.")
    cudagraph_capture_sizes: list[int] | None = key(None, "Batch sizes captured as CUDA graphs; null: automatic.")
    free_cache_engine: bool = key(True, "Free the KV cache while the trainer works.")
    kv_cache_on_publish: str = key("recompute", _KV_CACHE, choices=("recompute", "keep_kv"))
    enable_sleep_mode: bool = key(True, "vllm: its sleep mode frees memory between rollouts.")
    tensor_model_parallel_size: int = key(1, "Devices that share every tensor of a replica.", minimum=1)
    data_parallel_size: int = key(
        1,
        "vllm: data parallelism inside one replica. Where no devices are counted (CPUs, `verl serve`): replicas.",
        minimum=1,
    )
    num_replicas: int | None = key(
        None, "Replicas; null is devices / (tensor_model_parallel_size x data_parallel_size).", minimum=1
    )
    nnodes: int = key(0, "Machines for the rollout alone, besides the trainer's; 0 is none.", minimum=0)
    n_gpus_per_node: int | None = key(
        None, "With nnodes or hybrid_engine=False: devices per machine for the rollout alone.", minimum=1
    )
    expert_parallel_size: int = key(1, "1, or tensor_model_parallel_size x data_parallel_size: the same devices.")
    pipeline_model_parallel_size: int = key(1, "Pipeline stages; only 1.")
    max_num_batched_tokens: int = key(8192, "Tokens one engine step may process.", minimum=1)
    max_num_seqs: int = key(256, "Sequences decoded at once.", minimum=1)
    enable_chunked_prefill: bool = key(True, "Prefill long prompts over several engine steps.")
    enable_prefix_caching: bool = key(True, "Share the KV cache of common prefixes.")
    logprobs_mode: str = key(
        "processed_logprobs",
        "vllm: log-probs at the sampling temperature, or (raw_logprobs) at temperature 1; of the whole vocabulary.",
        choices=("processed_logprobs", "raw_logprobs"),
    )
    scheduling_policy: str = key("fcfs", "Order of waiting requests.", choices=("fcfs", "priority"))
    load_format: str = key("dummy", "Source of a separate engine's first weights; dummy is the trainer.")
    skip_tokenizer_init: bool = key(True, "Token ids in and out; the engine needs no tokenizer.")
    disable_log_stats: bool = key(True, "Hide the engine's statistics.")
    calculate_log_probs: bool = key(True, "Return log-probs of sampled tokens.")
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "Old log-probs: sequences per forward pass on one device.", minimum=1
    )
    log_prob_use_dynamic_bsz: bool = key(False, "Old log-probs: fill micro-batches up to a token budget.")
    log_prob_max_token_len_per_gpu: int = key(16384, "Old log-probs: tokens per forward pass on one device.", minimum=1)
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig)
    val_kwargs: SamplingConfig = section(SamplingConfig)
    multi_turn: MultiTurnConfig = section(MultiTurnConfig)
    agent: AgentLoopConfig = section(AgentLoopConfig)
    checkpoint_engine: CheckpointEngineConfig = section(CheckpointEngineConfig)
    server: ServerConfig = section(ServerConfig)
    profiler: ProfilerConfig = section(ProfilerConfig)
    prometheus: PrometheusConfig = section(PrometheusConfig)
    trace: TraceConfig = section(TraceConfig)
    custom: dict[str, Any] | None = key(None, "Settings for rollout engines of your own.")
