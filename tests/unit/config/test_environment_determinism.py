"""VERL_FULL_DETERMINISM asks for deterministic kernels in every engine."""

import pytest

from verl.config import load_config


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), (None, False)])
def test_the_variable_sets_every_engine_that_does_not_say_otherwise(monkeypatch, value, expected):
    monkeypatch.delenv("VERL_FULL_DETERMINISM", raising=False)
    if value is not None:
        monkeypatch.setenv("VERL_FULL_DETERMINISM", value)
    config = load_config(["critic.fsdp.full_determinism=False"])
    arr = config.actor_rollout_ref
    assert [arr.actor.fsdp_config.full_determinism, arr.ref.fsdp_config.full_determinism] == [expected] * 2
    assert not config.critic.fsdp.full_determinism
    assert load_config([], "sft_trainer").engine.full_determinism is expected
