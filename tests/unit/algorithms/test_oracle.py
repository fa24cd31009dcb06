"""verl.algorithms against examples/grpo_one_file.py: the same gradient through a small model, in float64.

The library's side runs one sequence at a time through the model; the oracle pads. They share no code.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from verl.algorithms.advantages import compute_advantages, with_token_rewards
from verl.algorithms.aggregation import loss_weights
from verl.algorithms.losses import make_actor_loss
from verl.config import ActorConfig, AlgorithmConfig
from verl.config.algorithm import PADDED_AGG_MODES
from verl.data.batch import Batch
from verl.data.trajectory import Trajectory

PATH = Path(__file__).resolve().parents[3] / "examples" / "grpo_one_file.py"
PROMPTS, GROUP = 3, 4


def load_oracle():
    spec = importlib.util.spec_from_file_location("grpo_one_file", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


oracle = load_oracle()


@pytest.fixture(scope="module")
def model():
    return oracle.tiny_model(seed=3).double()


@pytest.fixture(scope="module")
def rollouts(model):
    """Oracle tensors: tokens, mask (B, L), rewards (B,), and log-probs of an older policy and of a reference."""
    generator = torch.Generator().manual_seed(0)
    prompts = oracle.countdown_prompts(PROMPTS, generator).repeat_interleave(GROUP, dim=0)
    tokens, mask = oracle.sample(model, prompts, 9, 0.7, generator)
    rewards = torch.rand(len(tokens), generator=generator, dtype=torch.float64)
    with torch.no_grad():
        logprobs, _ = oracle.token_logprobs(model, tokens, 0.7)
    noise = torch.randn(2, *tokens.shape, generator=generator, dtype=torch.float64) * 0.5
    assert len(set(mask.sum(1).tolist())) > 1  # unequal lengths
    return tokens, mask, rewards, (logprobs + noise[0]) * mask, (logprobs + noise[1]) * mask


def pack(rollouts) -> Batch:
    """The same rollouts as the library holds them."""
    tokens, mask, rewards, old, ref = rollouts
    lengths = [int(m.nonzero().max()) + 1 for m in mask]
    trajectories = [
        Trajectory(tokens[i, :n], mask[i, :n], torch.zeros(n), group_id=i // GROUP, reward=0.0)
        for i, n in enumerate(lengths)
    ]
    columns = {
        name: torch.cat([row[:n] for row, n in zip(column, lengths, strict=True)])
        for name, column in (("old_logprobs", old), ("ref_logprobs", ref))
    }
    return Batch.pack(trajectories).with_columns(rewards=rewards, **columns)


def library_gradient(model, batch: Batch, actor: ActorConfig, algorithm: AlgorithmConfig, temperature: float):
    batch = compute_advantages(with_token_rewards(batch), algorithm)
    weights = loss_weights(batch, actor.loss_agg_mode, actor.loss_scale_factor, torch.float64)
    batch = batch.with_columns(loss_weights=weights)
    loss = make_actor_loss(actor)
    model.zero_grad(set_to_none=True)
    for i in range(batch.num_sequences):  # one sequence is one micro-batch
        part = batch.select([i])
        logits = model(input_ids=part["tokens"][None]).logits[0, :-1] / temperature
        log_p = torch.cat([torch.zeros_like(logits[:1]), torch.log_softmax(logits, -1)])
        outputs = {
            "logprobs": log_p.gather(1, part["tokens"][:, None]).squeeze(1),
            "entropy": -(log_p.exp() * log_p).sum(-1),
        }
        loss(outputs, part.token_columns, part.cu_seqlens)[0].sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("mode", PADDED_AGG_MODES)
@pytest.mark.parametrize(("entropy_coeff", "kl_coeff", "by_std"), [(0.0, 0.0, True), (0.01, 0.2, False)])
def test_library_and_oracle_agree_on_the_gradient_in_float64(model, rollouts, mode, entropy_coeff, kl_coeff, by_std):
    tokens, mask, rewards, old, ref = rollouts
    settings = oracle.Settings(
        aggregation=mode,
        entropy_coeff=entropy_coeff,
        kl_coeff=kl_coeff,
        divide_by_std=by_std,
        clip_low=0.1,
        clip_dual=1.5,
        temperature=0.7,
    )
    advantages = oracle.group_advantages(rewards.view(PROMPTS, GROUP), by_std).flatten()
    expected = oracle.grpo_gradient(model, tokens, mask, advantages, old, ref if kl_coeff else None, s=settings)

    actor = ActorConfig(
        loss_agg_mode=mode,
        loss_scale_factor=settings.max_length,
        entropy_coeff=entropy_coeff,
        use_kl_loss=kl_coeff > 0,
        kl_loss_coef=kl_coeff,
        clip_ratio_low=0.1,
        clip_ratio_high=0.28,
        clip_ratio_c=1.5,
    )
    algorithm = AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=by_std)
    ours = library_gradient(model, pack(rollouts), actor, algorithm, temperature=0.7)
    for name, gradient in expected.items():
        difference = (ours[name] - gradient).norm() / gradient.norm()
        assert difference < 1e-10, f"{name}: relative difference {difference:.1e}"


def test_the_oracle_stands_alone_and_fits_on_250_lines():
    text = PATH.read_text()
    assert len(text.splitlines()) <= 250
    modules = {line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert modules == {"argparse", "copy", "dataclasses", "torch", "transformers"}


def test_the_oracle_raises_its_reward(capsys):
    history = oracle.train(steps=8, num_prompts=8, group_size=8, s=oracle.Settings(learning_rate=3e-3), seed=1)
    assert sum(history[-2:]) / 2 > 2 * history[0], history
    assert "reward" in capsys.readouterr().out
