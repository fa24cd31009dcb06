"""Rollout correction against its definition in verl.commands.certify.formulas, for every option and combination."""

import itertools
import math

import pytest
import torch

from tests.unit.algorithms.algorithm_cases import column_by_sequence, random_batch
from verl.algorithms.advantages import compute_advantages, with_token_rewards
from verl.algorithms.rollout_correction import correct
from verl.commands.certify import formulas
from verl.config import AlgorithmConfig, RolloutCorrectionConfig
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.trainer.ppo.batch_metrics import mismatch_metrics, variance_proxy_metrics

RULES = {  # bounds that keep some tokens of the test's batch and reject others
    "token_k1": "0.8_1.3",
    "token_k2": "0.03",
    "token_k3": "0.03",
    "seq_sum_k1": "0.7_1.6",
    "seq_sum_k2": "0.15",
    "seq_sum_k3": "0.15",
    "seq_mean_k1": "0.95_1.06",
    "seq_mean_k2": "0.025",
    "seq_mean_k3": "0.025",
    "seq_max_k2": "0.06",
    "seq_max_k3": "0.06",
}


def pair(seed: int = 0, scale: float = 0.3) -> tuple[Batch, torch.Tensor]:
    """A batch with the rollout's log-probs, and those of the policy (T,)."""
    batch, generator = random_batch(seed), torch.Generator().manual_seed(seed + 9)
    mask = batch["loss_mask"]
    rollout = -torch.rand(batch.num_tokens, generator=generator, dtype=torch.float64) * mask - 0.05 * mask
    noise = torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64) * scale
    batch = batch.with_columns(rollout_logprobs=rollout, old_logprobs=(rollout + noise) * mask)
    return batch, batch["old_logprobs"]


def settings(**changes) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig(**changes)


def bounds_of(rule: str, text: str) -> tuple[float, float]:
    numbers = [float(n) for n in text.split("_")]
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    return (1 / numbers[0], numbers[0]) if rule.endswith("k1") else (0.0, numbers[0])


def lists(batch: Batch, column: torch.Tensor) -> list[list]:
    return [column[a:b].tolist() for a, b in itertools.pairwise(batch.cu_seqlens.tolist())]


def kept_by_definition(batch: Batch, logprobs: torch.Tensor, rules: dict[str, str]) -> torch.Tensor:
    rows = column_by_sequence(batch, "loss_mask")
    for rule, text in rules.items():
        both = lists(batch, logprobs), column_by_sequence(batch, "rollout_logprobs")
        fits = formulas.accepted(*both, column_by_sequence(batch, "loss_mask"), rule, *bounds_of(rule, text))
        rows = [[a and b for a, b in zip(*row, strict=True)] for row in zip(rows, fits, strict=True)]
    return torch.tensor([kept for row in rows for kept in row])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_keeps_the_tokens_of_its_definition(rule, seed):
    batch, logprobs = pair(seed)
    out, metrics = correct(batch, logprobs, settings(rollout_rs=rule, rollout_rs_threshold=RULES[rule]))
    expected = kept_by_definition(batch, logprobs, {rule: RULES[rule]})
    assert torch.equal(out["loss_mask"], expected)
    assert torch.equal(out["rejected_tokens"], batch["loss_mask"] & ~expected)
    assert torch.equal(out.sampled_mask(), batch["loss_mask"])
    numbers, sampled = metrics.values(), batch["loss_mask"]
    share = float((sampled & ~expected).sum() / sampled.sum())
    lost = batch.sum_per_sequence((sampled & ~expected).long()) > 0
    for name in ("rollout_rs", f"rollout_rs_{rule}"):
        assert numbers[f"rollout_corr/{name}_masked_fraction"] == pytest.approx(share)
        assert numbers[f"rollout_corr/{name}_seq_masked_fraction"] == pytest.approx(float(lost.sum()) / 5)


def test_the_bounds_of_this_file_keep_some_tokens_and_reject_others():
    for rule, text in RULES.items():
        kept = [kept_by_definition(*pair(seed), {rule: text}).sum() for seed in range(3)]
        assert 0 < sum(kept) < 3 * pair()[0]["loss_mask"].sum(), rule


def test_bounds_belong_to_what_is_kept():
    """Log-ratios of -2 and 2 nats: k2 is 2, and the ratio e^2."""
    batch, _ = pair()
    logprobs = batch["rollout_logprobs"] + torch.where(torch.arange(batch.num_tokens) % 2 == 0, 2.0, -2.0)
    for rule, inside, outside in (
        ("token_k2", "2.0", "1.999999"),
        ("seq_max_k2", "2.0", "1.999999"),
        ("token_k1", f"{math.exp(2)!r}", "7.389"),
    ):
        kept, rejected = (
            correct(batch, logprobs, settings(rollout_rs=rule, rollout_rs_threshold=bound))[0]["loss_mask"]
            for bound in (inside, outside)
        )
        assert torch.equal(kept, batch["loss_mask"]) and not rejected.any(), rule


@pytest.mark.parametrize("rule", RULES)
def test_metrics_of_a_rule_are_those_of_its_estimates_alone(rule):
    batch, logprobs = pair(2)
    other = "token_k1" if rule != "token_k1" else "token_k2"
    both = {"rollout_rs": f"{other},{rule}", "rollout_rs_threshold": f"{RULES[other]},{RULES[rule]}"}
    found = correct(batch, logprobs, settings(**both))[1].values()
    alone = correct(batch, logprobs, settings(rollout_rs=rule, rollout_rs_threshold=RULES[rule]))[1].values()
    unit, _, kind = rule.rpartition("_")
    estimates = []
    for new, old, mask in zip(
        lists(batch, logprobs),
        column_by_sequence(batch, "rollout_logprobs"),
        lists(batch, batch["loss_mask"]),
        strict=True,
    ):
        values = [formulas.divergence(kind, a - b) for a, b, m in zip(new, old, mask, strict=True) if m]
        if values and unit != "token":
            whole = max(values) if unit == "seq_max" else math.fsum(values)
            values = [whole / len(values) if unit == "seq_mean" else whole]
        estimates += values
    expected = torch.tensor(estimates, dtype=torch.float64)
    numbers = {
        "mean": expected.mean(),
        "std": expected.std(unbiased=False),
        "max": expected.max(),
        "min": expected.min(),
    }
    for name, number in numbers.items():
        assert found[f"rollout_corr/rollout_rs_{rule}_{name}"] == pytest.approx(float(number), abs=1e-12), name
    for name in ("masked_fraction", "seq_masked_fraction", *numbers):
        metric = f"rollout_corr/rollout_rs_{rule}_{name}"
        assert found[metric] == alone[metric], name


def test_a_single_bound_of_k1_is_a_ratio_and_its_inverse():
    batch, logprobs = pair()
    single, both = (
        correct(batch, logprobs, settings(rollout_rs="token_k1", rollout_rs_threshold=text))[0]["loss_mask"]
        for text in (1.25, "0.8_1.25")
    )
    assert torch.equal(single, both) and not torch.equal(single, batch["loss_mask"])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("names", "bounds"),
    [
        (("token_k1", "seq_max_k3"), None),
        (("seq_mean_k1", "token_k2", "seq_sum_k3"), None),
        (("token_k2", "seq_max_k2", "token_k3"), "0.05"),
    ],
)
def test_a_combination_keeps_what_every_rule_keeps(names, bounds, seed):
    batch, logprobs = pair(seed)
    rules = {name: bounds or RULES[name] for name in names}
    text = bounds or ", ".join(rules.values())
    out, metrics = correct(batch, logprobs, settings(rollout_rs=", ".join(names), rollout_rs_threshold=text))
    assert torch.equal(out["loss_mask"], kept_by_definition(batch, logprobs, rules))
    assert {f"rollout_corr/rollout_rs_{name}_mean" for name in names} <= metrics.values().keys()


@pytest.mark.parametrize("rules", [{}, {"token_k3": RULES["token_k3"]}])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("threshold", [1.2, "1.2", "0.8_1.25"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_equal_the_definition(level, threshold, normalise, rules):
    batch, logprobs = pair(3)
    config = settings(
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_batch_normalize=normalise,
        rollout_rs=",".join(rules) or None,
        rollout_rs_threshold=",".join(rules.values()) or None,
    )
    out, metrics = correct(batch, logprobs, config)
    kept = lists(batch, kept_by_definition(batch, logprobs, rules))
    masks, of_sequence = column_by_sequence(batch, "loss_mask"), level == "sequence"
    limits = (0.8, 1.25) if threshold == "0.8_1.25" else 1.2
    args = lists(batch, logprobs), column_by_sequence(batch, "rollout_logprobs"), masks, kept, of_sequence, limits
    expected = formulas.importance_weights(*args)
    expected = formulas.normalised(expected, kept, of_sequence) if normalise else expected
    flat = torch.tensor([w for row in expected for w in row], dtype=torch.float64)
    torch.testing.assert_close(out["rollout_is_weights"], flat, rtol=1e-10, atol=1e-12)
    numbers = metrics.values()
    assert ("rollout_corr/rollout_is_batch_norm_factor" in numbers) == normalise
    assert ("rollout_corr/rollout_is_oob_ratio" in numbers) == isinstance(limits, tuple)
    if isinstance(limits, tuple):
        raw = formulas.importance_weights(*args[:3], masks, of_sequence, (0.0, math.inf))
        sampled = [w for row, mask in zip(raw, masks, strict=True) for w, m in zip(row, mask, strict=True) if m]
        share = sum(not 0.8 <= w <= 1.25 for w in sampled) / len(sampled)
        assert numbers["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(share) and share > 0
    if normalise:
        before = torch.tensor([w for row in formulas.importance_weights(*args) for w in row], dtype=torch.float64)
        factor = float(before.sum() / flat.sum())
        assert numbers["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(factor)
    used = flat[out["loss_mask"]]
    assert numbers["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(
        float(used.sum() ** 2 / (len(used) * (used**2).sum()))
    )


def test_metrics_of_weights_are_those_before_the_limits():
    batch, logprobs = pair(3)
    mask = batch["loss_mask"]
    values = correct(batch, logprobs, settings(rollout_is="token", rollout_is_threshold=1.2))[1].values()
    raw = (logprobs - batch["rollout_logprobs"]).exp()[mask]
    means = (batch.sum_per_sequence((logprobs - batch["rollout_logprobs"]).exp() * mask))[batch.lengths > 0]
    means = torch.stack([m / n for m, n in zip(means, batch.sum_per_sequence(mask.long()), strict=True) if n])
    for prefix, numbers in (("rollout_is_", raw), ("rollout_is_seq_", means)):
        expected = {"mean": numbers.mean(), "max": numbers.max(), "min": numbers.min()}
        for name, number in (expected | {"std": numbers.std(unbiased=False)}).items():
            assert values[f"rollout_corr/{prefix}{name}"] == pytest.approx(float(number)), (prefix, name)
    assert values["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(float((raw > 1.2).double().mean()))
    assert values["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(float((raw < 1 / 1.2).double().mean()))
    assert values["rollout_corr/rollout_is_seq_max_deviation"] == pytest.approx(float((means - 1).abs().max()))


def test_weights_have_no_gradient():
    batch, logprobs = pair()
    out, _ = correct(
        batch,
        logprobs.clone().requires_grad_(),
        settings(rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold=1),
    )
    assert not out["rollout_is_weights"].requires_grad


def test_log_ratios_are_limited_to_20_nats():
    batch, logprobs = pair()
    far = logprobs + torch.where(batch["loss_mask"], 500.0, 0.0)
    for level in ("token", "sequence"):
        out, metrics = correct(batch, far, settings(rollout_is=level, rollout_is_threshold=1e30))
        assert float(out["rollout_is_weights"].max()) == pytest.approx(math.exp(20))
        assert all(math.isfinite(value) for value in metrics.values().values())


def test_the_same_log_probs_give_weights_of_exactly_1_and_reject_nothing():
    batch, _ = pair()
    config = settings(rollout_is="token", rollout_rs=",".join(RULES), rollout_rs_threshold=",".join(RULES.values()))
    out, _ = correct(batch, batch["rollout_logprobs"], config)
    assert torch.equal(out["loss_mask"], batch["loss_mask"])
    assert (out["rollout_is_weights"][batch["loss_mask"]] == 1).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_correction_does_not_depend_on_the_order_of_sequences(level):
    batch, logprobs = pair(4)
    rules = {"rollout_rs": "token_k2,seq_mean_k1", "rollout_rs_threshold": "0.05,0.9_1.1"}
    config = settings(rollout_is=level, rollout_is_batch_normalize=True, **rules)
    order = torch.tensor([5, 3, 0, 2, 4, 1])
    whole = correct(batch, logprobs, config)[0].select(order)
    moved = correct(batch.select(order), batch.select(order)["old_logprobs"], config)[0]
    assert torch.equal(moved["loss_mask"], whole["loss_mask"])
    torch.testing.assert_close(moved["rollout_is_weights"], whole["rollout_is_weights"], rtol=1e-12, atol=0)


# ---- advantages and metrics of corrected batches


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_token_baselines_have_squared_weights_and_skip_rejected_tokens(name):
    batch, logprobs = pair(1)
    squares = torch.where(batch["loss_mask"], logprobs.exp() ** 2 + 0.01, 0.0)
    config = settings(rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold=0.08)
    batch = with_token_rewards(correct(batch.with_columns(sum_pi_squared=squares), logprobs, config)[0])
    assert batch["rejected_tokens"].any()
    found = compute_advantages(batch, AlgorithmConfig(adv_estimator=name))["advantages"]
    columns = [column_by_sequence(batch, n) for n in ("token_rewards", "loss_mask")]
    more = [column_by_sequence(batch, n) for n in ("old_logprobs", "sum_pi_squared", "rollout_is_weights")]
    sampled = lists(batch, batch.sampled_mask())
    expected = formulas.optimal_token_baseline(
        *columns, batch["group_ids"].tolist(), *more[:2], name.startswith("tir"), more[2], sampled
    )
    flat = torch.tensor([a for row in expected for a in row], dtype=torch.float64)
    torch.testing.assert_close(found, flat, rtol=1e-10, atol=1e-10)


def test_the_variance_proxies_equal_their_definition():
    batch, logprobs = pair(2)
    squares = torch.where(batch["loss_mask"], logprobs.exp() ** 2 + 0.01, 0.0)
    batch, _ = correct(batch.with_columns(sum_pi_squared=squares), logprobs, settings(rollout_is="token"))
    powers, weights, means = [], [], []
    for a, b in itertools.pairwise(batch.cu_seqlens.tolist()):
        index = [t for t in range(a, b) if batch["loss_mask"][t]]
        if index:
            energy = [
                float(batch["rollout_is_weights"][t]) ** 2 * (1 - 2 * math.exp(logprobs[t]) + float(squares[t]))
                for t in index
            ]
            square = [float(batch["advantages"][t]) ** 2 for t in index]
            powers.append(sum(e * s for e, s in zip(energy, square, strict=True)))
            weights.append(sum(energy))
            means.append(sum(square) / len(square))
    found = variance_proxy_metrics(batch, 0.5)
    power = sum(powers) / len(powers)
    assert found["variance_proxy/proxy1_signal_strength"] == 0.25
    assert found["variance_proxy/proxy2_total_power"] == pytest.approx(power, rel=1e-12)
    assert found["variance_proxy/proxy3_pure_noise"] == pytest.approx((power - 0.25) / (len(powers) - 1), rel=1e-12)
    assert found["variance_proxy/expected_a_squared"] == pytest.approx(sum(means) / len(means), rel=1e-12)
    assert found["variance_proxy/expected_w"] == pytest.approx(sum(weights) / len(weights), rel=1e-12)
    assert "variance_proxy/proxy3_pure_noise" not in variance_proxy_metrics(batch, None)


def test_chi_squared_equals_its_definition():
    batch, logprobs = pair(2)
    tokens, answers = [], []
    for new, old, mask in zip(
        lists(batch, logprobs),
        column_by_sequence(batch, "rollout_logprobs"),
        lists(batch, batch["loss_mask"]),
        strict=True,
    ):
        logs = [a - b for a, b, m in zip(new, old, mask, strict=True) if m]
        tokens += [math.exp(2 * x) for x in logs]
        answers += [math.exp(2 * sum(logs))] if logs else []
    found = mismatch_metrics(batch, logprobs)
    assert found["rollout_corr/chi2_token"] == pytest.approx(sum(tokens) / len(tokens) - 1, rel=1e-10)
    assert found["rollout_corr/chi2_seq"] == pytest.approx(sum(answers) / len(answers) - 1, rel=1e-10)


def test_metrics_of_mini_batches_merge():
    (first, a), (second, b) = pair(0), pair(1)
    config = settings(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.8_1.3")
    merged = Metrics().merge(correct(first, a, config)[1]).merge(correct(second, b, config)[1]).values()
    joined = Batch.cat([first, second])
    whole = correct(joined, torch.cat([a, b]), config)[1].values()
    assert merged.keys() == whole.keys()
    for name in whole:
        if not name.endswith(("_std", "eff_sample_size")):
            assert merged[name] == pytest.approx(whole[name]), name
