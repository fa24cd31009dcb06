"""A step saves while there is still time for one more and its checkpoint."""

import pytest

from verl.trainer.capacity_block import FIRST_SAVE_S, VARIABLES, CapacityBlock
from verl.utils.errors import ConfigError


def test_a_save_is_due_once_another_step_and_its_save_may_not_fit():
    now = [0.0]
    block = CapacityBlock(ends_at=1000.0, lead_s=5.0, clock=lambda: now[0])
    block.add_step(step_s=100.0, save_s=0.0)
    block.add_step(step_s=40.0, save_s=30.0)  # 10 s of work
    now[0] = 1000.0 - (100.0 + 30.0 + 5.0) - 1.0
    assert not block.save_is_due()
    now[0] += 1.0
    assert block.save_is_due() and block.seconds_left == 135.0


def test_before_anything_is_timed_a_minute_is_kept_for_the_save():
    now = [0.0]
    block = CapacityBlock(ends_at=100.0, clock=lambda: now[0])
    now[0] = 100.0 - FIRST_SAVE_S - 0.5
    assert not block.save_is_due()
    now[0] += 1.0
    assert block.save_is_due()


def test_the_end_comes_from_either_variable_and_without_one_never(monkeypatch: pytest.MonkeyPatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not CapacityBlock.from_environment(10**9).save_is_due()
    for name in VARIABLES:
        with monkeypatch.context() as set_one:
            set_one.setenv(name, "123.5")
            block = CapacityBlock.from_environment(7)
            assert (block.ends_at, block.lead_s) == (123.5, 7) and block.save_is_due()
            set_one.setenv(name, "tomorrow")
            with pytest.raises(ConfigError, match=f"{name}='tomorrow' is no time"):
                CapacityBlock.from_environment(0)
