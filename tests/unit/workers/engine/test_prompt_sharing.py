"""Where nobody said whether a group's prompt is computed once, a GPU is asked, once."""

from pathlib import Path

import pytest

from tests.engine_cases import random_batch
from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching
from verl.data.trajectory import Trajectory
from verl.runtime.inline import InlineGroup
from verl.workers.engine.prompt_sharing import pays_to_share

MICRO = MicroBatching(max_tokens=40, share_prefixes=True)


class Gpu:
    """A rank whose passes with shared prompts take `factor` times those without."""

    def __init__(self, factor: float):
        self.factor, self.passes = factor, list[tuple[int, bool]]()

    def seconds_of_forward(self, rank_batch: tuple[Batch, MicroBatching], output: str) -> float:
        batch, micro = rank_batch
        self.passes.append((batch.num_sequences, micro.share_prefixes))
        return 2.0 * (self.factor if micro.share_prefixes else 1.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("verl.models.fastest._run_file", None)


def pays(gpu: Gpu, batch: Batch, output: str = "logprobs", device: str = "cuda") -> bool:
    facts = {"device": device, "cost": "1 FLOP"}
    return pays_to_share(InlineGroup(gpu), facts, batch, lambda: [(batch, MICRO)], output)


def groups() -> Batch:
    prompts = [[n] * 10 for n in range(3) for _ in range(4)]
    return Batch.pack([Trajectory.from_completion(p, [9] * 3, [0.0] * 3, group_id=p[0]) for p in prompts])


@pytest.mark.parametrize(("factor", "shares"), [(0.5, True), (0.99, False), (1.5, False)])
def test_the_faster_way_is_taken_and_kept_for_passes_like_it(factor: float, shares: bool):
    gpu = Gpu(factor)
    for _ in range(2):
        assert pays(gpu, groups()) is shares
    assert gpu.passes == [(4, False), (4, True)]  # one micro-batch, both ways
    pays(gpu, groups(), "values")
    assert len(gpu.passes) == 4


def test_sequences_without_a_common_prompt_and_cpus_are_asked_nothing():
    gpu = Gpu(0.1)
    assert not pays(gpu, random_batch()) and not gpu.passes
    assert pays(gpu, groups(), device="cpu") and not gpu.passes
