"""MFU of stages: what a group's devices could have done in the time that the stage took."""

from functools import partial
from types import SimpleNamespace

import pytest

from tests.engine_cases import random_batch
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.data.trajectory import Trajectory
from verl.models.flops import AttentionCost, FlopCounts, Speed
from verl.observe.memory_metrics import GIB
from verl.placement.memory import Holding, PoolMemory
from verl.placement.plan import Machine, Plan, Replicas
from verl.runtime.inline import InlineGroup
from verl.runtime.pools import Pool
from verl.trainer.ppo.efficiency import (
    forward_memory_metrics,
    mfu_metrics,
    planned_memory_metrics,
    published_memory_metrics,
)
from verl.workers.batch_dispatch import ShardDispatcher

PUBLISHED = "update_weights/perf/device_memory_used_gb"

COUNTS = FlopCounts(
    per_token=100, per_head_token=10, trained_share=1.0, attention=(AttentionCost(4, None), AttentionCost(4, 2))
)


class Counted:
    def __init__(self, speed):
        self._speed = speed

    def speed(self):
        return self._speed


def role(speed, epochs=1, share=False):
    dispatcher = SimpleNamespace(shares_prompts=share, group=InlineGroup(Counted(speed)))
    dispatcher.speed = partial(ShardDispatcher.speed, dispatcher)
    return SimpleNamespace(mini_batches=SimpleNamespace(epochs=epochs), dispatcher=dispatcher)


def test_stages_that_ran_are_measured_against_the_peak():
    batch = random_batch(shapes=((1, 2), (3, 1)))
    forward = 100 * 7 + 10 * 3 + 4 * (6 + 10) + 4 * (2 * 2 + 1 + 2 * 3 + 1)
    trainer = SimpleNamespace(actor=role(Speed(COUNTS, 1000.0), epochs=2), critic=role(Speed(COUNTS, 500.0)))
    found = mfu_metrics(
        trainer, batch, batch, {"update_actor": 3.0, "update_critic": 4.0, "old_log_prob": 2.0, "gen": 1.0}
    )
    assert found == {
        "perf/mfu/actor": pytest.approx(2 * 3 * forward / 3000),
        "perf/mfu/actor_infer": pytest.approx(forward / 2000),
        "perf/mfu/critic": pytest.approx(3 * forward / 2000),
    }


def answers(prompts: list[list[int]], lengths: list[int]) -> Batch:
    rows = [
        Trajectory.from_completion(p, [9] * n, [0.0] * n, group_id=0) for p, n in zip(prompts, lengths, strict=True)
    ]
    return Batch.pack(rows)


def test_a_shared_prompt_is_counted_once_where_the_actor_shares_it():
    batch = answers([[1, 2, 3], [4, 5], [1, 2, 3], [1, 2, 3]], [2, 4, 1, 2])
    tokens, answered = 3 + (2 + 1 + 2) + 2 + 4, 9
    # by hand: what each token looks back at, itself included; the second kind of layers at one before it
    seen = (1 + 2 + 3) + (4 + 5) + 4 + (4 + 5) + (1 + 2 + 3 + 4 + 5 + 6)
    near = (1 + 2 + 2) + 2 * (2 + 1 + 2) + (1 + 2 + 2 + 2 + 2 + 2)
    forward = 100 * tokens + 10 * answered + 4 * seen + 4 * near
    trainer = SimpleNamespace(actor=role(Speed(COUNTS, 1000.0), epochs=2, share=True), critic=None)
    found = mfu_metrics(trainer, batch, batch, {"update_actor": 3.0, "old_log_prob": 2.0})
    assert found["perf/mfu/actor"] == pytest.approx(2 * 3 * forward / 3000)
    assert found["perf/mfu/actor_infer"] == pytest.approx(forward / 2000)


def test_a_critic_that_shares_a_prompt_is_counted_so():
    batch, seconds = answers([[1, 2, 3]] * 2, [2, 4]), {"update_critic": 3.0}
    forward = 100 * (3 + 2 + 4) + 10 * 6 + 4 * (6 + (4 + 5) + (4 + 5 + 6 + 7)) + 4 * (5 + 2 * 2 + 2 * 4)
    critic = role(Speed(COUNTS, 1000.0), share=True)
    found = mfu_metrics(SimpleNamespace(actor=role(None), critic=critic), batch, batch, seconds)
    assert found == {"perf/mfu/critic": pytest.approx(3 * forward / 3000)}


def test_an_update_of_other_sequences_than_were_sampled_is_counted_at_their_lengths():
    batch = answers([[1, 2, 3], [4, 5]], [2, 4])
    trained, seconds = batch.select([0, 0]), {"update_actor": 1.0, "update_critic": 1.0, "old_log_prob": 1.0}
    trainer = SimpleNamespace(actor=role(Speed(COUNTS, 1.0)), critic=role(Speed(COUNTS, 1.0)))
    found, of_batch, of_trained = (
        mfu_metrics(trainer, *which, seconds) for which in ((batch, trained), (batch, batch), (trained, trained))
    )
    update, forward = ["perf/mfu/actor", "perf/mfu/critic"], "perf/mfu/actor_infer"
    assert [found[name] for name in update] == [of_trained[name] for name in update] != [of_batch[n] for n in update]
    assert found[forward] == of_batch[forward] != of_trained[forward]


def test_peak_memory_of_forward_passes_is_told_by_stage_and_is_the_highest_of_any_rank():
    def ran(*gigabytes: float):
        memory = Metrics()
        for value in gigabytes:
            memory.max("perf/max_memory_allocated_gb", value)
        return SimpleNamespace(dispatcher=SimpleNamespace(forward_memory=memory))

    trainer = SimpleNamespace(actor=ran(1.0, 2.0), reference=ran(4.0, 3.0), critic=None)
    seconds = {"old_log_prob": 1.0, "ref": 1.0, "values": 1.0}
    expected = {"old_log_prob/perf/max_memory_allocated_gb": 2.0, "ref/perf/max_memory_allocated_gb": 4.0}
    assert forward_memory_metrics(trainer, seconds) == expected
    assert forward_memory_metrics(trainer, {"update_actor": 1.0}) == {}


def test_each_stage_has_what_the_plan_puts_on_the_devices_of_its_role():
    pools = Pool("actor", ("actor", "critic"), 2), Pool("rollout", ("rollout",), 2, first_device=2)
    plan = Plan(Machine("cuda", 4), "auto", pools, (Replicas("rollout", "rollout", 2),))
    phases = ("collect", "reward", "values", "update actor", "publish")

    def memory(pool: str, *gigabytes: float) -> PoolMemory:
        return PoolMemory(pool, phases, (Holding("any", "weights", tuple(size * GIB for size in gigabytes)),))

    planned = [memory("actor", 1.0, 2.0, 3.0, 4.0, 5.0), memory("rollout", 6.0, 7.0, 8.0, 9.0, 10.0)]
    found = planned_memory_metrics(plan, planned)
    expected = {"gen": 6.0, "values": 3.0, "actor": 4.0, "update_weights": 5.0}
    assert found == {f"{stage}/perf/planned_memory_gb": size for stage, size in expected.items()}
    assert planned_memory_metrics(plan, []) == {}


@pytest.mark.parametrize(("used", "expected"), [([2 * GIB, 3 * GIB], {PUBLISHED: 3.0}), ([0, 0], {})])
def test_after_a_publish_the_fullest_device_is_told_where_a_platform_can(used: list[int], expected: dict[str, float]):
    group = SimpleNamespace(broadcast={"device_memory_used": used}.__getitem__)
    assert published_memory_metrics(SimpleNamespace(actor=SimpleNamespace(group=group))) == expected


def test_a_stage_that_did_not_run_and_an_engine_that_does_not_count_say_nothing():
    batch = random_batch()
    trainer = SimpleNamespace(actor=role(None), critic=role(Speed(COUNTS, 1.0)))
    assert mfu_metrics(trainer, batch, batch, {"update_actor": 1.0}) == {}
