"""A step saves while there is still time for one more and its checkpoint."""

import pytest

from verl.trainer.run.capacity_block import VARIABLES, CapacityBlock
from verl.utils.errors import ConfigError


def test_a_save_is_due_once_another_step_and_its_save_may_not_fit():
    now = [0.0]
    block = CapacityBlock(ends_at=1000.0, lead_s=5.0, clock=lambda: now[0])
    block.add_step(100.0)
    block.add_step(10.0)
    now[0] = 1000.0 - (100.0 + 30.0 + 5.0) - 1.0
    assert not block.save_is_due(save_s=30.0)
    assert block.save_is_due(save_s=32.0)
    now[0] += 1.0
    assert block.save_is_due(save_s=30.0) and block.seconds_left == 135.0
    now[0] = 1000.5  # a variable that is older than this job
    assert not block.save_is_due(save_s=30.0)


def test_the_end_comes_from_either_variable_and_without_one_never(monkeypatch: pytest.MonkeyPatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not CapacityBlock.from_environment(10**9).save_is_due(10**9)
    for name in VARIABLES:
        with monkeypatch.context() as set_one:
            set_one.setenv(name, "123.5")
            block = CapacityBlock.from_environment(7)
            assert (block.ends_at, block.lead_s) == (123.5, 7)
            for wrong in ("tomorrow", "nan", "inf"):
                set_one.setenv(name, wrong)
                with pytest.raises(ConfigError, match=f"{name}='{wrong}' is no time"):
                    CapacityBlock.from_environment(0)
