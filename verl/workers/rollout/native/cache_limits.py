"""Size of the native engine's KV cache in the memory there is."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verl.config.rollout import RolloutConfig
from verl.models.decoder.lean import Decoder
from verl.utils.errors import ConfigError

CPU_CACHE_BYTES = 1 << 30
FEW_PROMPT_TOKENS = 64  # padding shorter prompts to it takes less time than a pass of their own
CPU_PREFILL_TOKENS = 2048  # a small model's activations for this many fit the processor's caches


@dataclass(frozen=True)
class CacheLimits:
    """Size of the KV cache: rows decoded at once, longest sequence, and columns (more, so that shifts are rare)."""

    rows: int
    max_model_len: int
    columns: int
    prefill_tokens: int

    def is_one_prefill(self, lengths: Sequence[int]) -> bool:
        """Whether prompts of these lengths are computed together: none is padded to more than twice its length, and
        all of them are `prefill_tokens` at most."""
        longest = max(lengths)
        return longest <= max(2 * min(lengths), FEW_PROMPT_TOKENS) and len(lengths) * longest <= self.prefill_tokens


def cache_limits(config: RolloutConfig, decoder: Decoder, device: torch.device) -> CacheLimits:
    """Size of the KV cache in the memory there is; raises ConfigError if one sequence does not fit."""
    max_model_len = config.max_model_len or config.prompt_length + config.response_length
    columns = max_model_len + max(64, min(max_model_len // 4, 256))
    columns = -(-columns // 16) * 16
    columns += 16 * (columns // 16 % 2 == 0)  # an odd number of cache lines: no stride of a power of two
    per_token = decoder.bytes_per_token() + 12  # 12 bytes: the token and its log-prob
    per_row = columns * per_token
    budget = cache_budget(config, device)
    rows = min(config.max_num_seqs, budget // per_row)
    if rows < 1:
        on_cpu = device.type == "cpu" or config.kv_cache_bytes is not None
        key = "kv_cache_bytes" if on_cpu else "gpu_memory_utilization"
        raise ConfigError(
            f"one sequence of {max_model_len} tokens needs {per_row / 2**20:.2f} MiB of keys and values "
            f"({columns} columns of {per_token} bytes), but the cache may hold "
            f"{budget / 2**20:.2f} MiB; raise actor_rollout_ref.rollout.{key} or lower max_model_len"
        )
    limit = CPU_PREFILL_TOKENS if device.type == "cpu" else config.max_num_batched_tokens
    return CacheLimits(rows, max_model_len, columns, min(config.max_num_batched_tokens, limit))


def cache_budget(config: RolloutConfig, device: torch.device) -> int:
    """Bytes of the KV cache: `kv_cache_bytes`, else 1 GiB on a CPU and `gpu_memory_utilization` of a device."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    if device.type == "cpu":
        return CPU_CACHE_BYTES
    free, total = torch.get_device_module(device).mem_get_info()
    return max(0, min(free, int(config.gpu_memory_utilization * total) - (total - free)))
