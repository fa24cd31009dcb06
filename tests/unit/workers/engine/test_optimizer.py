"""Optimiser, schedule and gradient norm against closed forms."""

import math

import pytest
import torch
from torch import nn

from verl.config import FSDPOptimizerConfig
from verl.utils.errors import ConfigError
from verl.workers.engine.optimizer import (
    LearningRateSchedule,
    build_optimizer,
    clip_gradients,
    count_lost_updates,
    first_non_finite_gradient,
    gradient_norm,
    learning_rate_factor,
    sample_updates,
)


def config(**values) -> FSDPOptimizerConfig:
    return FSDPOptimizerConfig(**{"lr": 0.1, **values})


def rates(settings: FSDPOptimizerConfig, steps: int) -> list[float]:
    optimizer = build_optimizer([nn.Parameter(torch.zeros(1))], settings)
    schedule = LearningRateSchedule(optimizer, settings)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    return found


def test_constant_schedule_is_flat():
    assert rates(config(), 3) == [0.1, 0.1, 0.1]


def test_warmup_rises_linearly_from_zero_or_one_step_later():
    assert rates(config(lr_warmup_steps=4), 6) == pytest.approx([0, 0.025, 0.05, 0.075, 0.1, 0.1])
    assert rates(config(lr_warmup_steps=4, zero_indexed_step=False), 4) == pytest.approx([0.025, 0.05, 0.075, 0.1])


def test_warmup_steps_win_over_the_ratio():
    assert rates(config(lr_warmup_steps_ratio=0.5, total_training_steps=4), 3) == pytest.approx([0, 0.05, 0.1])
    both = config(lr_warmup_steps=1, lr_warmup_steps_ratio=0.5, total_training_steps=4)
    assert rates(both, 2) == pytest.approx([0, 0.1])


def test_cosine_falls_to_the_floor_and_stays():
    settings = config(lr_scheduler_type="cosine", total_training_steps=10, lr_warmup_steps=2, min_lr_ratio=0.1)
    found = rates(settings, 13)
    assert found[2] == pytest.approx(0.1)
    assert found[6] == pytest.approx(0.1 * (0.1 + 0.9 * 0.5))
    assert found[10:] == pytest.approx([0.01, 0.01, 0.01])


def test_more_cycles_come_back_up():
    settings = config(lr_scheduler_type="cosine", total_training_steps=8, num_cycles=1.0)
    assert learning_rate_factor(4, settings) == pytest.approx(0.0)
    assert learning_rate_factor(8, settings) == pytest.approx(1.0)


@pytest.mark.parametrize("values", [{"lr_scheduler_type": "cosine"}, {"lr_warmup_steps_ratio": 0.1}])
def test_a_schedule_that_needs_its_length_says_so(values):
    with pytest.raises(ConfigError, match="total_training_steps"):
        rates(config(**values), 1)


def test_schedule_state_is_the_number_of_steps():
    settings = config(lr_warmup_steps=4)
    first, second = (build_optimizer([nn.Parameter(torch.zeros(1))], settings) for _ in range(2))
    schedule = LearningRateSchedule(first, settings)
    schedule.step(), schedule.step(), schedule.step()
    restored = LearningRateSchedule(second, settings)
    restored.load_state_dict(schedule.state_dict())
    assert second.param_groups[0]["lr"] == pytest.approx(0.075)


def test_adamw_step_equals_the_formula():
    parameter = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = build_optimizer([parameter], config(betas=[0.8, 0.9], weight_decay=0.01))
    parameter.grad = torch.tensor([0.5], dtype=torch.float64)
    optimizer.step()
    expected = 2.0 * (1 - 0.1 * 0.01) - 0.1 * 0.5 / (math.sqrt(0.25) + 1e-8)
    assert float(parameter) == pytest.approx(expected, rel=1e-12)


def test_other_optimizers_take_only_the_arguments_they_have():
    optimizer = build_optimizer(
        [nn.Parameter(torch.zeros(1))], config(optimizer="SGD", override_optimizer_config={"momentum": 0.5})
    )
    assert isinstance(optimizer, torch.optim.SGD) and optimizer.param_groups[0]["momentum"] == 0.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": "AdamWW"}, "AdamW"),
        ({"optimizer_impl": "no.such.module"}, "optimizer_impl"),
        ({"override_optimizer_config": {"amsgrat": True}}, "amsgrad"),
    ],
)
def test_wrong_names_are_answered_with_the_right_ones(values, message):
    with pytest.raises(ConfigError, match=message):
        build_optimizer([nn.Parameter(torch.zeros(1))], config(**values))


def test_clipping_scales_the_whole_gradient_to_the_norm():
    gradients = [torch.tensor([3.0]), torch.tensor([0.0, 4.0])]
    norm = gradient_norm(gradients)
    assert norm == pytest.approx(5.0)
    clip_gradients(gradients, norm, 10.0)
    assert gradients[0].tolist() == [3.0]
    clip_gradients(gradients, norm, 1.0)
    assert gradient_norm(gradients) == pytest.approx(1.0, rel=1e-5)
    assert float(gradients[1][1]) == pytest.approx(0.8, rel=1e-5)


@pytest.mark.parametrize("off", [None, 0.0])
def test_clipping_can_be_turned_off(off):
    gradients = [torch.tensor([30.0])]
    clip_gradients(gradients, 30.0, off)
    assert gradients[0].tolist() == [30.0]


def test_the_first_bad_gradient_is_named_in_model_order():
    named = [("a", torch.tensor(1.0)), ("b", torch.tensor(float("inf"))), ("c", torch.tensor(float("nan")))]
    assert first_non_finite_gradient(named) == "b"
    assert first_non_finite_gradient(named[:1]) is None


@pytest.mark.parametrize(("lr", "expected"), [(2.0**-6, 0.0), (2.0**-12, 1.0)])
def test_updates_that_rounding_swallows_are_counted_where_there_is_a_gradient(lr: float, expected: float):
    parameter = nn.Parameter(torch.ones(40, 30, dtype=torch.bfloat16))  # half a unit in the last place of 1 is 2^-9
    wide = nn.Parameter(torch.ones(5))
    parameter.grad, wide.grad = torch.ones_like(parameter), torch.ones_like(wide)
    parameter.grad[:20] = 0
    samples = sample_updates([parameter.detach(), wide.detach()], [parameter.grad, wide.grad])
    torch.optim.SGD([parameter, wide], lr=lr).step()
    lost, total = count_lost_updates(samples)
    assert len(samples) == 1 and lost == expected * total and 100 < total < 200


def test_parameters_in_float32_are_not_sampled():
    assert sample_updates([torch.ones(3)], [torch.ones(3)]) == []
