"""Advice about rollout settings, from the engine's statistics."""

LOW_CACHE_USE = 0.3  # fraction of the KV cache in use; less means that more sequences fit
MANY_PREEMPTIONS = 0.05  # preemptions per engine step


def tuning_advice(stats: dict[str, float]) -> dict[str, str]:
    """Advice for the log, by topic; empty if nothing should change or the engine reports no statistics."""
    sentences = {}
    rollout = "actor_rollout_ref.rollout"
    if stats.get("preemptions", 0) > MANY_PREEMPTIONS * max(stats.get("engine_steps", 1), 1):
        sentences["preemptions"] = (
            f"the rollout engine preempted {stats['preemptions']:.0f} requests and computes their tokens again: its "
            f"cache is too small for so many at once. Lower {rollout}.max_num_seqs or max_num_batched_tokens, or give "
            f"it more memory ({rollout}.gpu_memory_utilization)"
        )
    elif 0 < stats.get("cache_use", 1.0) < LOW_CACHE_USE and stats.get("waiting", 0) >= 1:
        sentences["unused_cache"] = (
            f"the rollout engine used {stats['cache_use']:.0%} of its cache while {stats['waiting']:.0f} requests "
            f"waited: raise {rollout}.max_num_seqs or max_num_batched_tokens"
        )
    return sentences
