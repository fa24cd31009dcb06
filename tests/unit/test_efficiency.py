"""MFU of stages: what a group's devices could have done in the time that the stage took."""

from types import SimpleNamespace

import pytest

from tests.engine_cases import random_batch
from verl.models.flops import Attention, FlopCounts, Speed
from verl.runtime.inline import InlineGroup
from verl.trainer.ppo.efficiency import mfu_metrics

COUNTS = FlopCounts(per_token=100, per_head_row=10, trained_share=1.0, attention=(Attention(4, None), Attention(4, 2)))


class Counted:
    def __init__(self, speed):
        self._speed = speed

    def speed(self):
        return self._speed


def role(speed, epochs=1):
    return SimpleNamespace(group=InlineGroup(Counted(speed)), mini_batches=SimpleNamespace(epochs=epochs))


def test_stages_that_ran_are_measured_against_the_peak():
    batch = random_batch(shapes=((1, 2), (3, 1)))
    forward = 100 * 7 + 10 * 3 + 4 * (6 + 10) + 4 * (2 * 2 + 1 + 2 * 3 + 1)
    trainer = SimpleNamespace(actor=role(Speed(COUNTS, 1000.0), epochs=2), critic=role(Speed(COUNTS, 500.0)))
    found = mfu_metrics(trainer, batch, {"update_actor": 3.0, "update_critic": 4.0, "old_log_prob": 2.0, "gen": 1.0})
    assert found == {
        "perf/mfu/actor": pytest.approx(2 * 3 * forward / 3000),
        "perf/mfu/actor_infer": pytest.approx(forward / 2000),
        "perf/mfu/critic": pytest.approx(3 * forward / 2000),
    }


def test_a_stage_that_did_not_run_and_an_engine_that_does_not_count_say_nothing():
    batch = random_batch()
    trainer = SimpleNamespace(actor=role(None), critic=role(Speed(COUNTS, 1.0)))
    assert mfu_metrics(trainer, batch, {"update_actor": 1.0}) == {}
