"""Every policy loss against its definition in verl.commands.certify.formulas: value, gradient, finite differences.

The gradient is also written out by hand, as the paper states it, and no cut into micro-batches may change it.
"""

import math

import pytest
import torch

from tests.unit.algorithms.algorithm_cases import random_batch
from verl.algorithms.aggregation import loss_weights
from verl.algorithms.losses import POLICY_LOSSES, aggregation_mode, make_actor_loss, with_chosen_tokens
from verl.commands.certify import formulas
from verl.config import ActorConfig, PolicyLossConfig
from verl.data.batch import Batch
from verl.data.random_streams import token_draws

NAMES = [n for n in POLICY_LOSSES.names() if POLICY_LOSSES.get(n).function.__module__.startswith("verl.algorithms")]
LOW, HIGH, C = 0.15, 0.25, 1.8
SETTINGS = {"dro_beta": 0.7, "clip_cov_ratio": 0.2, "clip_cov_lb": -0.5, "clip_cov_ub": 2.0, "kl_cov_ratio": 0.2}
MEANS_OF_SEQUENCES = ("geo_mean", "gspo", "sapo")  # whatever actor.loss_agg_mode is


def config_of(name: str, **changes) -> ActorConfig:
    policy_loss = PolicyLossConfig(loss_mode=name, ppo_kl_coef=0.3, **SETTINGS)
    clips = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": C, "tau_pos": 1.2, "tau_neg": 1.7}
    return ActorConfig(policy_loss=policy_loss, **{**clips, **changes})


def full_batch(name: str, seed: int = 0) -> Batch:
    """A mini-batch with log-probs below 0, loss weights and, if the loss chooses tokens, the chosen ones."""
    config, batch, generator = config_of(name), random_batch(seed), torch.Generator().manual_seed(seed + 50)
    mask = batch["loss_mask"]

    def logprobs() -> torch.Tensor:
        return -2.5 * torch.rand(batch.num_tokens, generator=generator, dtype=torch.float64) * mask - 0.02 * mask

    old = logprobs()
    current = old + (logprobs() - old) * 0.9  # ratios 0.1 to 9: all bounds are crossed
    weights = loss_weights(batch, aggregation_mode(config), 10.0, torch.float64)
    batch = batch.with_columns(old_logprobs=old, current_logprobs=current, loss_weights=weights)
    draws = token_draws(1, 2, batch.sequence_ids(), batch.position_ids())
    return with_chosen_tokens(batch, config, draws)


def total(name: str, batch: Batch, logprobs: torch.Tensor) -> torch.Tensor:
    weighted, _ = make_actor_loss(config_of(name))({"logprobs": logprobs}, batch.token_columns, batch.cu_seqlens)
    return weighted.sum()


def chosen(name: str, batch: Batch) -> torch.Tensor:
    """(T,) the tokens that the definition chooses."""
    mask, out = batch["loss_mask"], torch.zeros(batch.num_tokens, dtype=torch.bool)
    if name not in ("clip_cov", "kl_cov"):
        return out
    names = ("current_logprobs", "old_logprobs", "advantages")
    current, old, a = (batch[n][mask].tolist() for n in names)
    draws = token_draws(1, 2, batch.sequence_ids(), batch.position_ids())[mask].tolist()
    picked = (
        formulas.chosen_by_kl_cov(current, a, SETTINGS["kl_cov_ratio"])
        if name == "kl_cov"
        else formulas.chosen_by_clip_cov(
            current, old, a, draws, (SETTINGS["clip_cov_lb"], SETTINGS["clip_cov_ub"]), 0.2, (LOW, HIGH)
        )
    )
    out[mask.nonzero().flatten()[sorted(picked)]] = True
    return out


def token_loss(name: str, lp, old, a, is_chosen) -> torch.Tensor:
    match name:
        case "vanilla" | "bypass_mode":
            return formulas.vanilla(lp, old, a, LOW, HIGH, C)
        case "cispo":
            return formulas.cispo(lp, old, a, LOW, HIGH)
        case "sapo":
            return formulas.sapo(lp, old, a, 1.2, 1.7)
        case "gpg":
            return formulas.policy_gradient(lp, a)
        case "dro":
            return formulas.dro(lp, old, a, 0.7)
        case "dppo_tv":
            return formulas.dppo(lp, old, a, LOW, HIGH, C, formulas.total_variation)
        case "dppo_kl":
            return formulas.dppo(lp, old, a, LOW, HIGH, C, formulas.binary_kl)
        case "clip_cov":
            return 0.0 * lp if is_chosen else formulas.ppo(lp, old, a, LOW, HIGH)
        case "kl_cov":
            return formulas.kl_cov(lp, old, a, is_chosen, 0.3)
    raise AssertionError(f"no definition of {name}")


def by_definition(name: str, batch: Batch, logprobs: torch.Tensor) -> torch.Tensor:
    """The loss of the mini-batch, sequence by sequence and token by token, reduced as the mode says."""
    old, a, picked = batch["old_logprobs"], batch["advantages"], chosen(name, batch)
    rows = []
    for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        index = [t for t in range(start, stop) if batch["loss_mask"][t]]
        if not index:
            continue
        sequence = [[x[t] for t in index] for x in (logprobs, old, a)]
        if name == "gspo":
            rows.append(formulas.gspo(*sequence, LOW, HIGH))
        elif name == "geo_mean":
            rows.append([formulas.geo_mean(*sequence, LOW, HIGH)] * len(index))
        else:
            rows.append([token_loss(name, logprobs[t], old[t], a[t], bool(picked[t])) for t in index])
    if name not in MEANS_OF_SEQUENCES:
        return torch.stack([loss for row in rows for loss in row]).mean()
    return torch.stack([torch.stack(row).mean() for row in rows]).mean()


def gradient(function, logprobs: torch.Tensor) -> torch.Tensor:
    leaf = logprobs.clone().requires_grad_()
    (out,) = torch.autograd.grad(function(leaf), leaf)
    return out


@pytest.fixture(params=NAMES)
def name(request) -> str:
    return request.param


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_value_and_gradient_equal_the_definition(name, seed):
    batch = full_batch(name, seed)
    logprobs = batch["current_logprobs"]
    value, expected = total(name, batch, logprobs), by_definition(name, batch, logprobs)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    ours = gradient(lambda x: total(name, batch, x), logprobs)
    theirs = gradient(lambda x: by_definition(name, batch, x), logprobs)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert (ours != 0).any() and (ours[~batch["loss_mask"]] == 0).all()


def gradient_by_hand(name: str, batch: Batch, logprobs: torch.Tensor) -> torch.Tensor:
    """(T,) d loss / d log p of each token, as the papers state it."""
    old, a, picked, out = batch["old_logprobs"], batch["advantages"], chosen(name, batch), torch.zeros_like(logprobs)
    lengths = batch.sum_per_sequence(batch["loss_mask"].long()).tolist()
    sequences, tokens = sum(n > 0 for n in lengths), sum(lengths)
    for i, (start, stop) in enumerate(zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)):
        index = [t for t in range(start, stop) if batch["loss_mask"][t]]
        ratios = [math.exp(float(logprobs[t] - old[t])) for t in index]
        weight = 1 / lengths[i] / sequences if name in MEANS_OF_SEQUENCES and index else 1 / tokens
        if name == "gspo" and index:
            s = math.prod(ratios) ** (1 / len(index))
            for t in index:
                adv = float(a[t])
                moves = (adv > 0 and s < 1 + HIGH) or (adv < 0 and s > 1 - LOW)
                out[t] = -weight * adv * s * moves
        elif name == "geo_mean" and index:
            logs = [math.log(r) for r in ratios]
            signs = [float(a[t]) > 0 for t in index]
            bounded = [min(x, HIGH) if up else max(x, -LOW) for x, up in zip(logs, signs, strict=True)]
            product = math.exp(sum(bounded) / len(index))
            for t, x, b in zip(index, logs, bounded, strict=True):
                out[t] = -sum(float(a[u]) for u in index) / len(index) * product / len(index) / sequences * (x == b)
        else:
            for t, r in zip(index, ratios, strict=True):
                out[t] = -weight * coefficient(name, r, float(a[t]), float(logprobs[t]), float(old[t]), bool(picked[t]))
    return out


def coefficient(name: str, r: float, a: float, lp: float, old: float, is_chosen: bool) -> float:
    """The factor of ∇ log p in the direction of ascent."""
    inside = (a > 0 and r < 1 + HIGH) or (a < 0 and r > 1 - LOW)
    match name:
        case "vanilla" | "bypass_mode":
            return r * a * (inside and (a > 0 or r < C))
        case "cispo":
            return min(max(r, 1 - LOW), 1 + HIGH) * a
        case "sapo":
            tau = 1.2 if a > 0 else 1.7
            p = 1 / (1 + math.exp(-tau * (r - 1)))
            return 4 * p * (1 - p) * r * a
        case "gpg":
            return a
        case "dro":
            return a - 0.7 * (lp - old)
        case "dppo_tv" | "dppo_kl":
            p, q = math.exp(lp), math.exp(old)
            tv, kl = abs(p - q), q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            distance = tv if name == "dppo_tv" else kl
            blocked = (a > 0 and r > 1 and distance > HIGH) or (a < 0 and r < 1 and distance > LOW)
            return 0.0 if blocked else min(r, C) * a
        case "clip_cov":
            return 0.0 if is_chosen else r * a * inside
        case "kl_cov":
            return r * a - (0.3 * math.copysign(1, lp - old) if is_chosen else 0.0)
    raise AssertionError(name)


@pytest.mark.parametrize("seed", [0, 3])
def test_the_gradient_is_the_one_that_the_paper_states(name, seed):
    batch = full_batch(name, seed)
    logprobs = batch["current_logprobs"]
    ours = gradient(lambda x: total(name, batch, x), logprobs)
    torch.testing.assert_close(ours, gradient_by_hand(name, batch, logprobs), rtol=1e-10, atol=1e-10)


def test_the_gradient_equals_finite_differences_with_detached_factors_held_fixed(name):
    batch = full_batch(name)
    logprobs, mask = batch["current_logprobs"], batch["loss_mask"]
    ours = gradient(lambda x: total(name, batch, x), logprobs)
    step, differences = 1e-6, torch.zeros_like(logprobs)
    weights, a, old = batch["loss_weights"], batch["advantages"], batch["old_logprobs"]

    def held_fixed(x: torch.Tensor) -> torch.Tensor:
        """The loss with what is detached in it as a constant of `logprobs`."""
        ratio = (logprobs - old).exp()
        if name == "cispo":
            return (-ratio.clamp(1 - LOW, 1 + HIGH) * a * x * weights).sum()
        if name in ("dppo_tv", "dppo_kl"):
            p, q = logprobs.exp(), old.exp()
            kl = q * (old - logprobs) + (1 - q) * ((1 - q) / (1 - p)).log()
            distance = (p - q).abs() if name == "dppo_tv" else torch.where(mask, kl, 0.0)
            blocked = (a > 0) & (ratio > 1) & (distance > HIGH) | (a < 0) & (ratio < 1) & (distance > LOW)
            return (-ratio.clamp(max=C) * a * x * weights * ~blocked).sum()
        if name == "gspo":  # s_t moves with its own token only: value s, slope s
            lengths = batch.sum_per_sequence(mask.double()).clamp(min=1)
            s = (batch.sum_per_sequence((logprobs - old) * mask) / lengths)[batch.sequence_ids()]
            moved = (s + x - logprobs).exp()
            return (torch.maximum(-moved * a, -moved.clamp(1 - LOW, 1 + HIGH) * a) * weights).sum()
        return total(name, batch, x)

    for t in mask.nonzero().flatten().tolist():
        up, down = logprobs.clone(), logprobs.clone()
        up[t] += step
        down[t] -= step
        differences[t] = (held_fixed(up) - held_fixed(down)) / (2 * step)
    torch.testing.assert_close(ours, differences, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("parts", [[[0, 1, 2], [3, 4, 5]], [[5], [0], [3], [1, 2], [4]], [[4, 2, 0, 5, 3, 1]]])
def test_no_cut_into_micro_batches_and_no_order_changes_the_gradient(name, parts):
    batch = full_batch(name)
    batch = batch.with_columns(token_indices=torch.arange(batch.num_tokens))
    whole = gradient(lambda x: total(name, batch, x), batch["current_logprobs"])
    summed = torch.zeros_like(whole)
    for indices in parts:
        part = batch.select(torch.tensor(indices))
        summed[part["token_indices"]] = gradient(lambda x, part=part: total(name, part, x), part["current_logprobs"])
    torch.testing.assert_close(summed, whole, rtol=1e-10, atol=1e-12)


def test_a_loss_per_token_gives_the_same_on_any_slice_of_tokens(name):
    loss = make_actor_loss(config_of(name))
    if not loss.per_token:
        pytest.skip("it gets whole sequences")
    batch = full_batch(name)
    whole, _ = loss({"logprobs": batch["current_logprobs"]}, batch.token_columns, None)
    part = torch.tensor([3, 9, 4, 20])
    columns = {n: column[part] for n, column in batch.token_columns.items()}
    sliced, _ = loss({"logprobs": batch["current_logprobs"][part]}, columns, None)
    torch.testing.assert_close(sliced, whole[part])


def test_without_old_log_probs_the_gradient_is_that_of_the_policy_gradient(name):
    if name in ("clip_cov", "kl_cov"):
        pytest.skip("they choose tokens by old log-probs")
    batch = full_batch(name)
    columns = {n: c for n, c in batch.token_columns.items() if n != "old_logprobs"}
    if name == "geo_mean":  # it has the mean advantage of a sequence
        per_sequence = batch["advantages"][batch.cu_seqlens[1:] - 2][batch.sequence_ids()] * batch["loss_mask"]
        columns["advantages"] = per_sequence
    leaf = batch["current_logprobs"].clone().requires_grad_()
    weighted, _ = make_actor_loss(config_of(name))({"logprobs": leaf}, columns, batch.cu_seqlens)
    (ours,) = torch.autograd.grad(weighted.sum(), leaf)
    torch.testing.assert_close(ours, -columns["advantages"] * batch["loss_weights"], rtol=1e-10, atol=1e-12)


def test_draws_depend_on_seed_step_sequence_and_position_alone():
    sequence, position = torch.arange(2000) // 40, torch.arange(2000) % 40
    draws = token_draws(1, 2, sequence, position)
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(token_draws(1, 2, sequence[order], position[order]), draws[order])
    for other in (token_draws(1, 3, sequence, position), token_draws(2, 2, sequence, position)):
        assert (draws != other).all()
    assert len(draws.unique()) == 2000 and (draws >= 0).all() and (draws < 1).all()
    assert abs(float(draws.mean()) - 0.5) < 0.02 and abs(float(draws.var()) - 1 / 12) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([draws[:-1], draws[1:]]))[0, 1])) < 0.06


def test_a_few_tokens_are_chosen_and_at_least_one():
    for name, counts in (("clip_cov", range(1, 5)), ("kl_cov", [4])):
        batch = full_batch(name)
        assert int(batch["chosen_tokens"].sum()) in counts, name
        assert not (batch["chosen_tokens"] & ~batch["loss_mask"]).any()
