"""Distillation losses against their definitions over a whole vocabulary in float64, and the actor's loss with them."""

import math

import pytest
import torch

from tests.engine_cases import build_engine, random_batch, save_tiny_model
from tests.unit.algorithms.algorithm_cases import column_by_sequence
from tests.unit.algorithms.algorithm_cases import random_batch as random_turns
from verl.algorithms.distillation import DISTILLATION_LOSSES, DistillationTerm, check_distillation
from verl.algorithms.losses import make_actor_loss
from verl.config import ActorConfig, DistillationConfig, DistillationLossConfig, RolloutCorrectionConfig
from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching
from verl.models.head.chosen_tokens import TopLogits
from verl.utils.errors import ConfigError

V, M, K = 11, 6, 4
ESTIMATORS = {
    "kl": lambda p, q: math.log(p / q),
    "k1": lambda p, q: math.log(p / q),
    "abs": lambda p, q: abs(math.log(p / q)),
    "mse": lambda p, q: math.log(p / q) ** 2 / 2,
    "k2": lambda p, q: math.log(p / q) ** 2 / 2,
    "low_var_kl": lambda p, q: q / p - 1 - math.log(q / p),
    "k3": lambda p, q: q / p - 1 - math.log(q / p),
}


def logits(seed: int, spread: float = 1.0) -> torch.Tensor:
    return spread * torch.randn(M, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def settings(mode: str, **keys) -> DistillationLossConfig:
    return DistillationLossConfig(loss_mode=mode, topk=K, **keys)


def distilled(student_logits, teacher_logits, config, actor=None, advantages=0.0, old=None, weights=None):
    """The actor's loss on M tokens, each a sequence of its own; the sampled token is number t modulo V.

    `weights` are importance weights of rollout correction.
    """
    log_p, log_q = student_logits.log_softmax(1), teacher_logits.log_softmax(1)
    sampled = (torch.arange(M) % V)[:, None]
    top, ids = log_q.topk(K, 1)
    columns = {
        "advantages": torch.full((M,), advantages, dtype=torch.float64),
        "loss_mask": torch.ones(M, dtype=torch.bool),
        "loss_weights": torch.linspace(0.1, 1, M, dtype=torch.float64),
        "teacher_logprobs": log_q.gather(1, sampled)[:, 0],
        "teacher_top_ids": ids,
        "teacher_top_logprobs": top,
    } | {n: c for n, c in (("old_logprobs", old), ("rollout_is_weights", weights)) if c is not None}
    loss = make_actor_loss(
        actor or ActorConfig(),
        correction=RolloutCorrectionConfig(rollout_is=None if weights is None else "token"),
        distillation=DistillationConfig(enabled=True, distillation_loss=config),
    )
    outputs = {"logprobs": log_p.gather(1, sampled)[:, 0], "logprobs_at_ids": log_p.gather(1, ids)}
    seen = {name: columns[name] for name in (*loss.columns, *loss.optional_columns) if name in columns}
    weighted, metrics = loss({name: outputs[name] for name in loss.outputs}, seen, torch.arange(M + 1))
    return weighted / columns["loss_weights"], metrics


def topk_kl(p: list[float], q: list[float], tail: bool) -> float:
    """One token, with plain numbers."""
    top = sorted(range(V), key=lambda v: -q[v])[:K]
    total = sum(q[v] * math.log(q[v] / p[v]) for v in top)
    if tail:
        rest_q, rest_p = 1 - sum(q[v] for v in top), 1 - sum(p[v] for v in top)
        total += rest_q * math.log(rest_q / rest_p)
    return total


@pytest.mark.parametrize("tail", [True, False])
def test_the_top_k_divergence_is_its_definition_and_its_gradient_a_difference_quotient(tail):
    student, teacher = logits(1).requires_grad_(), logits(2)
    config = settings("forward_kl_topk", topk_tail=tail)
    losses, metrics = distilled(student, teacher, config)
    p, q = student.softmax(1).tolist(), teacher.softmax(1).tolist()
    expected = [topk_kl(*both, tail) for both in zip(p, q, strict=True)]
    assert losses.tolist() == pytest.approx(expected, abs=1e-12)
    (gradient,) = torch.autograd.grad(losses.sum(), student)
    for t, v in ((0, 0), (1, 3), (2, int(teacher[2].argmax())), (5, 10)):
        ends = []
        for step in (1e-6, -1e-6):
            moved = student.detach().clone()
            moved[t, v] += step
            ends.append(topk_kl(moved[t].softmax(0).tolist(), q[t], tail))
        assert float(gradient[t, v]) == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-8)
    masses = [sum(p[t][v] for v in sorted(range(V), key=lambda v: -q[t][v])[:K]) for t in range(M)]
    assert metrics["distillation/student_mass"].tolist() == pytest.approx(masses, abs=1e-12)


def test_with_the_tail_it_lies_between_zero_and_the_divergence_of_the_vocabulary():
    for seed in range(20):
        student, teacher = logits(seed, 3.0), logits(seed + 50, 3.0)
        losses, _ = distilled(student, teacher, settings("forward_kl_topk"))
        log_q = teacher.log_softmax(1)
        whole = (log_q.exp() * (log_q - student.log_softmax(1))).sum(1)
        assert (losses > 0).all() and (losses <= whole + 1e-12).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_is_its_formula_of_the_sampled_token(name):
    student, teacher = logits(1).requires_grad_(), logits(2)
    losses, metrics = distilled(student, teacher, settings(name, use_task_rewards=False, distillation_loss_coef=0.3))
    p, q = student.softmax(1).tolist(), teacher.softmax(1).tolist()
    expected = [ESTIMATORS[name](p[t][t % V], q[t][t % V]) for t in range(M)]
    assert losses.tolist() == pytest.approx([0.3 * x for x in expected], abs=1e-12)
    assert metrics["distillation/loss"].tolist() == pytest.approx(expected, abs=1e-12)
    assert metrics["distillation/abs_loss"].tolist() == pytest.approx([abs(x) for x in expected], abs=1e-12)
    for end in ("loss_min", "loss_max"):  # of which the engine keeps the smallest and the largest
        assert torch.equal(metrics[f"distillation/{end}"], metrics["distillation/loss"])
    (gradient,) = torch.autograd.grad(losses.sum(), student)
    for t in range(M):
        ends = []
        for step in (1e-6, -1e-6):
            moved = student[t].detach().clone()
            moved[(t + 1) % V] += step
            ends.append(0.3 * ESTIMATORS[name](float(moved.softmax(0)[t % V]), q[t][t % V]))
        assert float(gradient[t, (t + 1) % V]) == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-8)


@pytest.mark.parametrize("name", ["forward_kl_topk", "k2", "k3"])
def test_a_policy_equal_to_its_teacher_has_loss_and_gradient_zero(name):
    student = logits(1).requires_grad_()
    losses, _ = distilled(student, student.detach(), settings(name))
    (gradient,) = torch.autograd.grad(losses.sum(), student)
    assert losses.abs().max() < 1e-14 and gradient.abs().max() < 1e-14


def test_a_teacher_without_a_tail_gives_finite_gradients_in_float32():
    sure = torch.full((M, V), -60.0).scatter(1, torch.arange(M)[:, None], 60.0).requires_grad_()
    for student, teacher in ((sure, sure.detach()), (logits(1).float().requires_grad_(), sure.detach())):
        losses, _ = distilled(student, teacher, settings("forward_kl_topk"))
        (gradient,) = torch.autograd.grad(losses.sum(), student)
        assert losses.isfinite().all() and gradient.isfinite().all() and gradient.abs().max() <= 1 + 1e-5


def test_clamps_bound_the_log_probs_and_then_the_loss():
    student, teacher = logits(1, 2.0).requires_grad_(), logits(2, 2.0)
    losses, _ = distilled(student, teacher, settings("k1", log_prob_min_clamp=-4.0, loss_max_clamp=1.5))
    sampled = torch.arange(M)
    p, q = (x.log_softmax(1)[sampled, sampled % V].clamp(min=-4) for x in (student, teacher))
    torch.testing.assert_close(losses, (p - q).clamp(-1.5, 1.5), rtol=1e-12, atol=1e-12)
    assert (losses.abs() == 1.5).any() and not (losses.abs() == 1.5).all() and (torch.cat([p, q]) == -4).any()
    (gradient,) = torch.autograd.grad(losses.sum(), student)
    assert not gradient[losses.abs() == 1.5].any()


def test_task_rewards_entropy_and_kl_stay_terms_of_their_own():
    student, teacher = logits(1), logits(2)
    both, _ = distilled(student, teacher, settings("k3", distillation_loss_coef=0.7), advantages=2.0)
    alone, _ = distilled(student, teacher, settings("k3", use_task_rewards=False), advantages=2.0)
    torch.testing.assert_close(both, -2.0 + 0.7 * alone, rtol=1e-12, atol=1e-12)  # the ratio is 1


def test_as_an_advantage_minus_the_divergence_is_clipped_with_its_own_range():
    student, teacher = logits(1).requires_grad_(), logits(2)
    sampled = torch.arange(M) % V
    p, q = (x.log_softmax(1)[torch.arange(M), sampled] for x in (student, teacher))
    assert (p > q).any() and (p < q).any()
    for side, size, inside in (("high", 0.2, False), ("high", 0.3, True), ("low", 0.2, False), ("low", 0.3, True)):
        # ratio 1.284, above 1.2 and below 1.3; or 0.779, below 0.8 and above 0.7
        old = (p - 0.25 if side == "high" else p + 0.25).detach()
        keys = {"use_policy_gradient": True, "use_task_rewards": False, f"clip_ratio_{side}": size}
        losses, metrics = distilled(student, teacher, settings("k1", **keys), ActorConfig(clip_ratio=0.9), old=old)
        advantages, ratio = (q - p).detach(), (p - old).exp()
        out_of_bounds = advantages > 0 if side == "high" else advantages < 0
        bound = 1 + size if side == "high" else 1 - size
        expected = -advantages * (ratio if inside else torch.where(out_of_bounds, bound, ratio))
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)
        ours, theirs = (torch.autograd.grad(x.sum(), student, retain_graph=True)[0] for x in (losses, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        assert "distillation/pg_loss" in metrics and "distillation/pg_clipfrac" in metrics


@pytest.mark.parametrize("mode", ["vanilla", "gpg", "gspo"])
def test_the_advantage_has_a_policy_loss_of_its_own(mode):
    student, teacher = logits(1).requires_grad_(), logits(2)
    keys = {"use_policy_gradient": True, "use_task_rewards": False, "policy_loss_mode": mode}
    actor = ActorConfig(loss_agg_mode="seq-mean-token-mean")
    p, q = (x.log_softmax(1)[torch.arange(M), torch.arange(M) % V] for x in (student, teacher))
    losses, metrics = distilled(student, teacher, settings("k1", **keys), actor, old=(p + 0.1).detach())
    ratio = 1.0 if mode == "gpg" else math.exp(-0.1)  # with the default range of 0.2; a sequence is one token here
    expected = -(q - p).detach() * (p if mode == "gpg" else (p - p.detach() - 0.1).exp())
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(metrics["distillation/pg_loss"], expected.detach(), rtol=1e-10, atol=1e-12)
    (gradient,) = torch.autograd.grad(losses.sum(), student)
    (by_hand,) = torch.autograd.grad((-(q - p).detach() * ratio * p).sum(), student)
    torch.testing.assert_close(gradient, by_hand, rtol=1e-10, atol=1e-12)
    config = DistillationConfig(enabled=True, distillation_loss=settings("k1", **keys))
    assert make_actor_loss(actor, distillation=config).per_token == (mode != "gspo")


def test_importance_weights_are_of_the_task_alone():
    student, teacher = logits(1), logits(2)
    weights = torch.linspace(0.2, 2.0, M, dtype=torch.float64)
    alone, _ = distilled(student, teacher, settings("k3", use_task_rewards=False))
    for config, task in ((settings("k3"), -3.0 * weights), (settings("k3", use_task_rewards=False), 0.0)):
        losses, _ = distilled(student, teacher, config, advantages=3.0, weights=weights)
        torch.testing.assert_close(losses, task + alone, rtol=1e-12, atol=1e-12)


def gradient_on_samples(mode: str, student: torch.Tensor, teacher: torch.Tensor, as_advantage: bool) -> torch.Tensor:
    """(V,) gradient by the logits of one token, averaged over all tokens that the policy may sample."""
    leaf = student.clone().requires_grad_()
    log_p, log_q = leaf.log_softmax(0), teacher.log_softmax(0)
    term = DistillationTerm(settings(mode, use_policy_gradient=as_advantage), ActorConfig())
    columns = {"teacher_logprobs": log_q, "loss_mask": torch.ones(V, dtype=torch.bool)}
    losses, _ = term({"logprobs": log_p}, Batch(torch.arange(V + 1), columns, {}), log_p.detach())
    return torch.autograd.grad((log_p.exp().detach() * losses).sum(), leaf)[0]


@pytest.mark.parametrize(
    ("mode", "as_advantage", "of"),
    [
        ("k3", False, "KL(q, p)"),
        ("k2", False, "KL(p, q)"),
        ("k1", False, "nothing"),
        ("k1", True, "KL(p, q)"),
        ("k3", True, "KL(p, q) - KL(q, p)"),
    ],
)
def test_the_gradient_on_samples_of_the_policy_is_that_of_the_divergence(mode, as_advantage, of):
    """As docs/train/distillation.md says. Near the teacher, KL(p, q) - KL(q, p) has no gradient of first order."""
    student, teacher = logits(3, 0.7)[0], logits(4, 0.7)[0]
    leaf = student.clone().requires_grad_()
    log_p, log_q = leaf.log_softmax(0), teacher.log_softmax(0)
    reverse, forward = (log_p.exp() * (log_p - log_q)).sum(), (log_q.exp() * (log_q - log_p)).sum()
    divergence = {"KL(q, p)": forward, "KL(p, q)": reverse, "KL(p, q) - KL(q, p)": reverse - forward}.get(
        of, 0.0 * reverse
    )
    (expected,) = torch.autograd.grad(divergence, leaf)
    found = gradient_on_samples(mode, student, teacher, as_advantage)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    if of == "KL(p, q) - KL(q, p)":
        near = student + 1e-3 * (teacher - student)
        assert (
            gradient_on_samples(mode, near, student, True).norm()
            < 1e-5
            < gradient_on_samples("k1", near, student, True).norm()
        )


def test_what_has_no_gradient_is_refused_or_said():
    actor = ActorConfig()
    with pytest.raises(ConfigError, match="does not depend on the sampled token"):
        check_distillation(settings("forward_kl_topk", use_policy_gradient=True), actor)
    with pytest.raises(ConfigError, match=r"gspo is defined with loss_agg_mode=seq-mean-token-mean"):
        check_distillation(settings("k1", use_policy_gradient=True, policy_loss_mode="gspo"), actor)
    with pytest.raises(ConfigError, match=r"policy_loss_mode=kl_cov asks for chosen_tokens"):
        check_distillation(settings("k1", use_policy_gradient=True, policy_loss_mode="kl_cov"), actor)
    with pytest.raises(ConfigError, match=r"needs policy_loss\.dro_beta above 0"):
        check_distillation(settings("k1", use_policy_gradient=True, policy_loss_mode="dro"), actor)
    for name in ("k1", "kl"):
        [doubt] = check_distillation(settings(name), actor)
        assert "0 on average" in doubt and check_distillation(settings(name, use_policy_gradient=True), actor) == []
    for name in ("k3", "low_var_kl", "k2", "mse", "abs"):
        [doubt] = check_distillation(settings(name, use_policy_gradient=True), actor)
        assert "is not that of a divergence" in doubt and "loss_mode=k1" in doubt
        assert check_distillation(settings(name), actor) == []


def with_teacher(folder, batch: Batch) -> Batch:
    """The columns of a teacher, from its own engine."""
    engine = build_engine(folder)
    engine.top = TopLogits(K, 50)
    columns = engine.forward(batch, ("top_ids", "top_logprobs"), MicroBatching(max_sequences=2), 0.8)
    assert int(columns["top_ids"].max()) < 50 and columns["top_ids"].dtype == torch.int64
    logprobs = engine.forward(batch, ("logprobs",), None, 0.8)["logprobs"]
    return batch.with_columns(
        teacher_top_ids=columns["top_ids"], teacher_top_logprobs=columns["top_logprobs"], teacher_logprobs=logprobs
    )


@pytest.mark.parametrize("mode", ["forward_kl_topk", "k3"])
def test_the_engine_gives_one_gradient_however_the_batch_is_cut_and_ordered(tmp_path, mode):
    student, teacher = (save_tiny_model(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    batch = random_batch()
    batch = batch.with_columns(
        loss_weights=batch["loss_weights"].double(), advantages=torch.zeros(batch.num_tokens, dtype=torch.float64)
    )
    batch = with_teacher(teacher, batch)
    config = DistillationConfig(enabled=True, distillation_loss=settings(mode))
    loss = make_actor_loss(ActorConfig(), distillation=config)
    results = []
    order = [3, 0, 5, 1, 4, 2]
    for seen, head_mode, micro in (
        (batch, "eager", None),
        (batch, "chunked", MicroBatching(max_sequences=1)),
        (batch.select(order), "chunked", MicroBatching(max_tokens=20)),
        (batch, "chunked", MicroBatching(max_tokens=60, share_prefixes=True)),
    ):
        engine = build_engine(student, head_mode=head_mode)
        metrics = engine.forward_backward(seen, loss, micro, 0.8).metrics.values()
        results.append((metrics, {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None}))
    first = results[0][0]
    assert first["distillation/loss_min"] < first["distillation/loss_max"] and first["distillation/loss"] > 0
    for metrics, gradient in results[1:]:
        for name in (n for n in first if n.startswith("distillation/")):
            assert metrics[name] == pytest.approx(first[name], rel=1e-9, abs=1e-12), name
        for name, expected in results[0][1].items():
            torch.testing.assert_close(gradient[name], expected, rtol=1e-8, atol=1e-10)


def test_every_name_of_the_surface_is_there():
    assert {*DISTILLATION_LOSSES} >= {"forward_kl_topk", *ESTIMATORS}


def test_a_padded_loss_of_others_trains_like_the_packed_one(tmp_path):
    from verl.trainer.distillation.losses import DistillationLossSettings, register_distillation_loss

    @register_distillation_loss(DistillationLossSettings(names=["outside_k2", "outside_mse"], use_estimator=True))
    def outside(config, distillation_config, model_output, data):
        assert config.clip_ratio == 0.2 and distillation_config.distillation_loss.topk == K
        difference = model_output["log_probs"] - data["teacher_logprobs"].squeeze(-1)
        return 0.5 * difference**2, {"distillation/largest": float(difference.detach().abs().max())}

    @register_distillation_loss(DistillationLossSettings(names="outside_topk", use_topk=True))
    def outside_topk(config, distillation_config, model_output, data):
        q = data["teacher_logprobs"].exp()
        return (q * (data["teacher_logprobs"] - model_output["topk_log_probs"])).sum(-1), {}

    seen = []

    @register_distillation_loss(DistillationLossSettings(names="outside_mask", use_estimator=True))
    def outside_mask(config, distillation_config, model_output, data):
        seen.append(data["response_mask"])
        return model_output["log_probs"], {}

    student, teacher = logits(1).requires_grad_(), logits(2)
    for mine, theirs, more in (("k2", "outside_mse", True), ("forward_kl_topk", "outside_topk", False)):
        gradients = []
        for name in (mine, theirs):
            losses, metrics = distilled(student, teacher, settings(name, topk_tail=False))
            gradients.append((losses.detach(), torch.autograd.grad(losses.sum(), student)[0]))
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
        assert ("distillation/largest" in metrics) == more
    turns = random_turns()
    term = DistillationTerm(settings("outside_mask"), ActorConfig())
    term({"logprobs": turns["old_logprobs"]}, turns.with_columns(teacher_logprobs=turns["ref_logprobs"]), None)
    sampled = [row[row.index(True) :] if any(row) else [] for row in column_by_sequence(turns, "loss_mask")]
    assert [row[: len(mask)] for row, mask in zip(seen[0].tolist(), sampled, strict=True)] == sampled
    assert int(seen[0].sum()) == int(turns["loss_mask"].sum())
    with pytest.raises(ConfigError, match="set one of use_topk"):
        DistillationLossSettings(names=["x"])

    @register_distillation_loss(DistillationLossSettings(names="outside_mean", use_estimator=True))
    def reduced(config, distillation_config, model_output, data):
        return model_output["log_probs"].mean(), {}

    with pytest.raises(ConfigError, match="one loss per token"):
        distilled(student, teacher, settings("outside_mean"))
