"""One step of the library's engine against examples/grpo_one_file.py, in float64 on the same rollouts."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

from verl.algorithms.advantages import compute_advantages, with_token_rewards
from verl.algorithms.aggregation import loss_weights
from verl.algorithms.losses import make_actor_loss
from verl.commands.certify.float64 import keep_float64
from verl.config import ActorConfig, AlgorithmConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching
from verl.data.trajectory import Trajectory
from verl.workers.engine.base import EngineRegistry

PATH = Path(__file__).resolve().parents[2] / "examples" / "grpo_one_file.py"
PROMPTS, GROUP = 3, 4


def load_oracle():
    spec = importlib.util.spec_from_file_location("grpo_one_file", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


oracle = load_oracle()
SETTINGS = oracle.Settings(
    clip_dual=1.5,
    entropy_coeff=0.01,
    kl_coeff=0.2,
    aggregation="seq-mean-token-mean",
    temperature=0.7,
    max_grad_norm=0.1,
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """The oracle's model, and a folder with the same float64 weights."""
    model = oracle.tiny_model(seed=3).double()
    folder = tmp_path_factory.mktemp("policy")
    model.save_pretrained(folder)
    keep_float64(model)
    return model, folder


@pytest.fixture(scope="module")
def rollouts(policy):
    """tokens, mask (B, L), rewards (B,), and log-probs of an older policy and of a reference, exact in float32."""
    generator = torch.Generator().manual_seed(0)
    prompts = oracle.countdown_prompts(PROMPTS, generator).repeat_interleave(GROUP, dim=0)
    tokens, mask = oracle.sample(policy[0], prompts, 9, SETTINGS.temperature, generator)
    rewards = torch.rand(len(tokens), generator=generator, dtype=torch.float64)
    with torch.no_grad():
        logprobs, _ = oracle.token_logprobs(policy[0], tokens, SETTINGS.temperature)
    noise = torch.randn(2, *tokens.shape, generator=generator, dtype=torch.float64) * 0.5
    old, ref = (((logprobs + n) * mask).float().double() for n in noise)
    return tokens, mask, rewards, old, ref


def pack(rollouts) -> Batch:
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


def library_batch(rollouts, actor: ActorConfig) -> Batch:
    batch = compute_advantages(with_token_rewards(pack(rollouts)), AlgorithmConfig(adv_estimator="grpo"))
    return batch.with_columns(loss_weights=loss_weights(batch, actor.loss_agg_mode, dtype=torch.float64))


@pytest.mark.parametrize(
    ("head_mode", "max_tokens", "packed"),
    [("eager", 10_000, True), ("eager", 24, False), ("chunked", 24, True), ("chunked", 10_000, True)],
)
def test_one_step_equals_the_oracles_gradient_and_parameter_change(policy, rollouts, head_mode, max_tokens, packed):
    tokens, mask, rewards, old, ref = rollouts
    model = copy.deepcopy(policy[0])
    advantages = oracle.group_advantages(rewards.view(PROMPTS, GROUP), divide_by_std=True).flatten()
    inputs = (tokens, mask, advantages, old, ref)
    gradient = oracle.grpo_gradient(model, *inputs, s=SETTINGS)
    norm = oracle.update(model, oracle.make_optimizer(model, SETTINGS), *inputs, s=SETTINGS)
    assert norm > SETTINGS.max_grad_norm  # clipping is part of the comparison

    actor = ActorConfig(
        clip_ratio_low=SETTINGS.clip_low,
        clip_ratio_high=SETTINGS.clip_high,
        clip_ratio_c=SETTINGS.clip_dual,
        entropy_coeff=SETTINGS.entropy_coeff,
        use_kl_loss=True,
        kl_loss_coef=SETTINGS.kl_coeff,
        loss_agg_mode=SETTINGS.aggregation,
    )
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        HFModelConfig(path=str(policy[1]), use_remove_padding=packed),
        FSDPEngineConfig(model_dtype="fp64", dtype="fp64", head_mode=head_mode),
        FSDPOptimizerConfig(
            lr=SETTINGS.learning_rate, weight_decay=SETTINGS.weight_decay, clip_grad=SETTINGS.max_grad_norm
        ),
    )
    engine.initialize()
    with engine.train_mode():
        engine.forward_backward(
            library_batch(rollouts, actor), make_actor_loss(actor), MicroBatching(max_tokens), SETTINGS.temperature
        )
        for name, parameter in engine.model.named_parameters():
            assert relative(parameter.grad, gradient[name]) < 1e-8, name
        metrics = engine.optim_step().values()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-8)
    before = dict(policy[0].named_parameters())
    after = dict(model.named_parameters())
    for name, parameter in engine.export_weights():
        assert relative(parameter - before[name], after[name] - before[name]) < 1e-6, name


def relative(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return ((ours - expected).norm() / expected.norm()).item()
