"""Generation goes on while the trainer computes, and gives the same tokens as generation that is waited for."""

import asyncio

import pytest
import torch

from tests.rollout_adapters import CONFIG, EOS, small_model
from verl.runtime.driver_loop import DriverLoop
from verl.workers.rollout.base import Completion, GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import NativeEngine


async def answers(engine: NativeEngine) -> list[list[Completion]]:
    sampling = SamplingParams(n=2, max_tokens=30, ignore_eos=True, seed=7)
    requests = [GenerationRequest(number, [3, 1, number], sampling) for number in range(4)]
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def gradient() -> list[torch.Tensor]:
    model, tokens = small_model(), torch.arange(96).remainder(EOS).view(4, 24)
    for _ in range(20):
        model(tokens).logits.logsumexp(-1).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture
def loop():
    made = DriverLoop("test loop")
    yield made
    made.close()


def test_generation_beside_a_training_step_changes_neither(loop: DriverLoop):
    config_engine = NativeEngine(CONFIG, small_model())
    waited_for, alone = loop.run(answers(config_engine)), gradient()
    started = loop.start(answers(NativeEngine(CONFIG, small_model())))
    beside = gradient()
    assert started.result(60) == waited_for
    for one, other in zip(beside, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
