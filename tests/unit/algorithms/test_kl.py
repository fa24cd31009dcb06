import math

import pytest
import torch

from tests.unit.algorithms.algorithm_cases import column_by_sequence, random_batch
from verl.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    apply_kl_in_reward,
    get_kl_controller,
    kl_penalty,
)
from verl.config import KLControlConfig
from verl.utils.errors import ConfigError

DEFINITIONS = {
    "kl": lambda p, q: math.log(p / q),
    "k1": lambda p, q: math.log(p / q),
    "abs": lambda p, q: abs(math.log(p / q)),
    "mse": lambda p, q: math.log(p / q) ** 2 / 2,
    "k2": lambda p, q: math.log(p / q) ** 2 / 2,
    "low_var_kl": lambda p, q: q / p - 1 - math.log(q / p),
    "k3": lambda p, q: q / p - 1 - math.log(q / p),
}


@pytest.mark.parametrize("suffix", ["", "+"])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_estimator_equals_its_definition_on_probabilities(name, suffix):
    p, q = [0.9, 0.2, 0.05, 0.5], [0.3, 0.25, 0.4, 0.5]
    value = kl_penalty(torch.tensor(p).double().log(), torch.tensor(q).double().log(), name + suffix)
    expected = [DEFINITIONS[name](a, b) for a, b in zip(p, q, strict=True)]
    assert value.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_kl_of_two_distributions(name):
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=torch.float64)
    exact = float((p * (p / q).log()).sum())
    assert float((p * kl_penalty(p.log(), q.log(), name)).sum()) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3"])
def test_gradient_equals_finite_differences_without_plus_and_that_of_k2_with_it(name):
    x = torch.tensor([-1.0, -2.5, -0.1], dtype=torch.float64)
    ref = torch.tensor([-1.4, -0.3, -0.9], dtype=torch.float64)

    def gradient(estimator: str) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        kl_penalty(leaf, ref, estimator).sum().backward()
        return leaf.grad

    step = 1e-6
    differences = (kl_penalty(x + step, ref, name) - kl_penalty(x - step, ref, name)) / (2 * step)
    torch.testing.assert_close(gradient(name), differences, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(gradient(name + "+"), x - ref)


def test_k3_stays_finite_far_from_the_reference():
    logprobs = torch.tensor([-1000.0, 0.0], requires_grad=True)
    value = kl_penalty(logprobs, torch.tensor([0.0, -1000.0]), "low_var_kl")
    value.sum().backward()
    assert value.tolist() == [10.0, 10.0]
    assert logprobs.grad.isfinite().all()


def test_full_and_unknown_estimators_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match="whole distribution"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "full")
    with pytest.raises(ConfigError, match="did you mean 'low_var_kl'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "low_var_k")


def test_adaptive_controller_moves_towards_the_target_and_resumes():
    controller = AdaptiveKLController(init_kl_coef=0.2, target_kl=6.0, horizon=10000)
    controller.update(current_kl=60.0, n_steps=256)  # far above: the error is clipped to 0.2
    assert controller.value == pytest.approx(0.2 * (1 + 0.2 * 256 / 10000))
    controller.update(current_kl=5.4, n_steps=1000)
    assert controller.value == pytest.approx(0.2 * (1 + 0.2 * 256 / 10000) * (1 - 0.1 * 1000 / 10000))
    resumed = AdaptiveKLController(init_kl_coef=0.2, target_kl=6.0, horizon=10000)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == controller.value


def test_controller_follows_the_configuration():
    fixed = get_kl_controller(KLControlConfig(type="fixed", kl_coef=0.3))
    fixed.update(current_kl=100.0, n_steps=1000)
    assert isinstance(fixed, FixedKLController) and fixed.value == 0.3
    assert isinstance(get_kl_controller(KLControlConfig(type="adaptive")), AdaptiveKLController)
    with pytest.raises(ConfigError, match="horizon"):
        get_kl_controller(KLControlConfig(type="adaptive", horizon=0))


@pytest.mark.parametrize("estimator", ["kl", "low_var_kl"])
def test_kl_in_reward_equals_the_naive_loop(estimator):
    batch = random_batch()
    out, metrics = apply_kl_in_reward(batch, FixedKLController(0.1), estimator)
    expected, mean_kls = [], []
    columns = (column_by_sequence(batch, name) for name in ("old_logprobs", "ref_logprobs", "loss_mask"))
    for reward, old, ref, mask in zip(batch["rewards"].tolist(), *columns, strict=True):
        pairs = zip(old, ref, mask, strict=True)
        kls = [DEFINITIONS[estimator](math.exp(o), math.exp(r)) if m else 0.0 for o, r, m in pairs]
        row = [-0.1 * kl for kl in kls]
        row[max((t for t, m in enumerate(mask) if m), default=len(mask) - 1)] += reward
        expected += row
        if any(mask):
            mean_kls.append(sum(kls) / sum(mask))
    assert out["token_rewards"].tolist() == pytest.approx(expected, abs=1e-12)
    assert metrics.values() == pytest.approx(
        {"actor/reward_kl_penalty": sum(mean_kls) / len(mean_kls), "actor/reward_kl_penalty_coeff": 0.1}
    )


def test_kl_in_reward_applies_the_coefficient_before_it_adapts():
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=1e-3, horizon=60)
    _, metrics = apply_kl_in_reward(random_batch(), controller, "mse")
    assert metrics.values()["actor/reward_kl_penalty_coeff"] == 0.1
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 6 / 60))
