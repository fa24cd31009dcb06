"""How the configuration of a run differs from the one saved in its `run.json`, and which differences matter."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

# Keys that change where and how fast a run computes, what it prints and keeps, and when it ends. All others change
# what it computes. `trainer.critic_warmup` and `trainer.seed` are of the second kind.
_MAY_CHANGE = re.compile(
    r"trainer\.(?!critic_warmup$|seed$).*"
    r"|(global_profiler|ray_kwargs)\..*|(.*\.)?(profiler|checkpoint|trace|prometheus)\..*"
    r"|.*\.optim\.total_training_steps|optim\.total_training_steps"
    r"|.*micro_batch_size_per_gpu|.*max_token_len_per_gpu|.*use_dynamic_bsz|.*_offload|.*offload_policy"
    r"|.*\.n_gpus_per_node|reward\.canary_.*|.*\.use_prefix_grouper"
    r"|.*\.(forward_prefetch|reshard_after_forward|fsdp_size|expert_parallel_size|gpu_memory_utilization|free_cache_engine|max_num_seqs)"
    r"|.*\.(max_num_batched_tokens|disable_log_stats|enable_gradient_checkpointing|use_torch_compile|compile_layers)"
    r"|data\.(dataloader_num_workers|filter_overlong_prompts_workers|num_workers|output_path)"
)


@dataclass(frozen=True)
class Change:
    """One key with another value than the saved one."""

    key: str
    saved: Any
    now: Any

    @property
    def changes_result(self) -> bool:
        return _MAY_CHANGE.fullmatch(self.key) is None

    def __str__(self) -> str:
        return f"{self.key} {json.dumps(self.saved)} -> {json.dumps(self.now)}"


def as_saved(config: Any) -> dict[str, Any]:
    """A configuration as it reads once it was saved as JSON."""
    plain = asdict(config) if is_dataclass(config) and not isinstance(config, type) else config
    return dict(json.loads(json.dumps(plain, default=str)))


def find_changes(saved: Mapping[str, Any], config: Any) -> list[Change]:
    """The keys that differ, in the order of the schema; keys that only one of the two versions knows do not count."""
    now = as_saved(config)
    kinds = ["reinforcement learning" if "actor_rollout_ref" in tree else "fine-tuning" for tree in (saved, now)]
    if kinds[0] != kinds[1]:
        return [Change("command", *kinds)]
    return list(changes_between(saved, now))


def changes_between(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[Change]:
    """The keys that both have, with different values."""
    for name, value in now.items():
        if name not in saved or saved[name] == value:
            continue
        if isinstance(value, dict) and isinstance(saved[name], dict) and value and saved[name]:
            yield from changes_between(saved[name], value, f"{prefix}{name}.")
        else:
            yield Change(prefix + name, saved[name], value)


def results_change(changes: Iterable[Change]) -> list[Change]:
    """The changed keys that change what the run computes."""
    return [change for change in changes if change.changes_result]


def change_lines(changes: Iterable[Change]) -> list[str]:
    """One line per key that differs from the saved configuration, those that change the result first."""
    ordered = sorted(changes, key=lambda change: not change.changes_result)
    return [f"{'changes the result' if change.changes_result else 'may change'}: {change}" for change in ordered]
