"""What the statistics of a rollout engine make the log say about its settings."""

from verl.workers.rollout.settings_advice import tuning_advice

FULL = {"engine_steps": 100.0, "running": 8.0, "waiting": 3.0, "cache_use": 0.9, "preemptions": 0.0}


def test_a_cache_that_is_used_well_needs_no_advice():
    assert tuning_advice(FULL) == {} and tuning_advice({}) == {} and tuning_advice({"generated_tokens": 5.0}) == {}


def test_a_low_use_of_the_cache_while_requests_wait_asks_for_more_at_once():
    said = tuning_advice(FULL | {"cache_use": 0.12})
    assert list(said) == ["unused_cache"]
    for words in ("used 12% of its cache", "3 requests waited", "raise", "max_num_seqs", "max_num_batched_tokens"):
        assert words in said["unused_cache"]
    assert tuning_advice(FULL | {"cache_use": 0.12, "waiting": 0.0}) == {}  # nothing would fill it


def test_preemptions_ask_for_fewer_at_once_or_more_memory():
    said = tuning_advice(FULL | {"preemptions": 20.0})
    assert list(said) == ["preemptions"]
    for words in ("preempted 20 requests", "Lower", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"):
        assert words in said["preemptions"]
    assert tuning_advice(FULL | {"preemptions": 2.0}) == {}  # now and then is no pattern
    assert list(tuning_advice(FULL | {"preemptions": 20.0, "cache_use": 0.1})) == ["preemptions"]
