"""The gradient of every policy loss, computed by the engine: the same on one rank and two, in any cut and any order.

All losses share one launch of ranks. Tokens that a loss chooses are chosen as in training: by the log-probs that the
ranks give, over the whole mini-batch, before it is cut.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.engine_cases import build_engine, random_batch, save_tiny_model
from tests.ranks import run_ranks
from tests.unit.algorithms.test_policy_losses import NAMES, config_of
from verl.algorithms.losses import POLICY_LOSSES, aggregation_mode, make_actor_loss, with_chosen_tokens
from verl.config import ActorConfig
from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching
from verl.data.random_streams import token_draws
from verl.workers.engine.fsdp_engine import FSDPEngineWithLMHead
from verl.workers.engine_worker import with_loss_weights

SHARES = {1: [[0, 1, 2, 3, 4, 5]], 2: [[0, 3, 4], [1, 2, 5]]}
IN_ORDER, MIXED = [0, 1, 2, 3, 4, 5], [4, 2, 5, 0, 3, 1]
WAYS = {
    "whole": (IN_ORDER, MicroBatching()),
    "one by one": (IN_ORDER, MicroBatching(max_sequences=1)),
    "in pairs, another order": (MIXED, MicroBatching(max_sequences=2)),
    "25 tokens, reversed": (IN_ORDER[::-1], MicroBatching(max_tokens=25)),
}
CHOOSING = [name for name in NAMES if POLICY_LOSSES.get(name).choose_tokens]
Found = dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]  # (loss, way): gradient, numbers of the chosen tokens


def settings_of(name: str) -> ActorConfig:
    settings = {"entropy_coeff": 0.01, "loss_agg_mode": "token-mean" if name in CHOOSING else "seq-mean-token-sum"}
    bounds = {"clip_ratio_low": 5e-4, "clip_ratio_high": 5e-4} if name.startswith("dppo") else {}  # of rare tokens
    return config_of(name, **settings, **bounds)


def found_by(folder: Path, batch: Batch, size: int) -> Found:
    """The gradient and the choice of every loss in every way, on this rank."""
    engine, rank = build_engine(folder), dist.get_rank() if size > 1 else 0
    pairs = [(name, way) for name in NAMES for way in WAYS]
    return {(name, way): gradient(engine, batch, name, way, SHARES[size], rank) for name, way in pairs}


def gradient(
    engine: FSDPEngineWithLMHead, batch: Batch, name: str, way: str, shares: list[list[int]], rank: int
) -> tuple[np.ndarray, np.ndarray]:
    config, (order, micro) = settings_of(name), WAYS[way]
    draws = token_draws(1, 2, batch.sequence_ids(), batch.position_ids())
    mini = batch.with_columns(token_indices=torch.arange(batch.num_tokens)).select(order)
    if name in CHOOSING:
        own = mini.select(shares[rank])
        with engine.eval_mode():
            columns = [(own["token_indices"], engine.forward(own, ("logprobs",), micro)["logprobs"])]
        if len(shares) > 1:
            gathered: list = [None] * len(shares)
            dist.all_gather_object(gathered, columns[0])
            columns = gathered
        current = torch.zeros(batch.num_tokens, dtype=torch.float64)
        for numbers, logprobs in columns:
            current[numbers] = logprobs
        numbers = mini["token_indices"]
        mini = with_chosen_tokens(mini.with_columns(current_logprobs=current[numbers]), config, draws[numbers])
    mini = with_loss_weights(mini, aggregation_mode(config), 8.0, torch.float64)
    with engine.train_mode():
        engine.forward_backward(mini.select(shares[rank]), make_actor_loss(config), micro)
        parts = [g.detach().double().flatten() for _, g in engine.weights.full_gradients()]
        out = torch.cat(parts).numpy().copy()
        engine.weights.zero_grad()
    chosen = mini["token_indices"][mini["chosen_tokens"]] if name in CHOOSING else torch.zeros(0)
    return out, chosen.sort().values.numpy()


def mini_batch(folder: Path) -> Batch:
    """Ratios on both sides of the clip range, and a sequence without a sampled token."""
    batch, generator = random_batch(), torch.Generator().manual_seed(5)
    mask = batch["loss_mask"] & (batch.sequence_ids() != 3)
    batch = batch.with_columns(loss_mask=mask)
    engine = build_engine(folder)
    with engine.eval_mode():
        logprobs = engine.forward(batch, ("logprobs",))["logprobs"]
    noise = 0.3 * torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64)
    advantages = torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64)
    columns = {"old_logprobs": (logprobs + noise) * mask, "advantages": advantages * mask}
    return batch.with_columns(**columns)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What one process found, and each of two ranks."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    batch = mini_batch(folder)
    return [found_by(folder, batch, 1), *run_ranks(2, found_by, folder, batch, 2)]


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_has_the_same_gradient_on_any_ranks_in_any_cut_and_order(results: list[Found], name: str):
    expected, chosen = results[0][name, "whole"]
    size = np.linalg.norm(expected)
    assert size > 1e-3 and (len(chosen) > 0) == (name in CHOOSING)
    for found in results:
        for way in WAYS:
            gradient, tokens = found[name, way]
            assert np.linalg.norm(gradient - expected) < 1e-10 * size, way
            assert tokens.tolist() == chosen.tolist(), way


def test_gradients_of_losses_differ(results: list[Found]):
    """So that the test above does not compare one loss with itself; without correction bypass_mode is vanilla."""
    gradients = [results[0][name, "whole"][0] for name in NAMES if name != "bypass_mode"]
    for i, one in enumerate(gradients):
        for other in gradients[:i]:
            assert np.linalg.norm(one - other) > 1e-4 * np.linalg.norm(one)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_choice_among_equals_follows_the_draws_and_not_the_order(name: str):
    batch = random_batch()
    zeros = torch.zeros(batch.num_tokens, dtype=torch.float64)
    columns = {"old_logprobs": zeros, "current_logprobs": zeros, "advantages": zeros}
    batch = batch.with_columns(**columns, token_indices=torch.arange(batch.num_tokens))
    draws = token_draws(1, 2, batch.sequence_ids(), batch.position_ids())
    expected = with_chosen_tokens(batch, config_of(name), draws)["chosen_tokens"].nonzero().flatten()
    moved = batch.select(MIXED)
    found = with_chosen_tokens(moved, config_of(name), draws[moved["token_indices"]])
    assert len(expected) > 1
    assert torch.equal(found["token_indices"][found["chosen_tokens"]].sort().values, expected)
