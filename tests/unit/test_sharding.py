"""Many ranks compute what one does: loss, gradient and weights after steps, whichever way the parameters are held."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.engine_cases import SquaredLogprob, SquaredValue, build_engine, random_batch, save_tiny_model, tiny_qwen3
from tests.ranks import run_ranks
from verl.data.metrics import Metrics
from verl.data.packing import MicroBatching

ROWS = {1: [[0, 1, 2, 3, 4, 5]], 2: [[0, 3, 4], [1, 2, 5]], 4: [[0], [1, 2], [4], [3, 5]]}
MICRO = MicroBatching(max_sequences=1)
STEPS = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    tied = save_tiny_model(tmp_path_factory.mktemp("tied"))
    return tied, save_tiny_model(tmp_path_factory.mktemp("untied"), tiny_qwen3(tie_word_embeddings=False))


def train(folder, settings: dict[str, Any], size: int = 1) -> dict[str, Any]:
    """Metrics of each step, first gradients, last weights, and log-probs before: of this rank's rows."""
    rank = dist.get_rank() if size > 1 else 0
    settings = dict(settings)
    micro, value = settings.pop("micro", MICRO), settings.get("value_head", False)
    engine = build_engine(folder, **settings)
    batch = random_batch().select(ROWS[size][rank])
    loss, column = (SquaredValue(), "values") if value else (SquaredLogprob(), "logprobs")
    with engine.eval_mode():
        before = engine.forward(batch, (column,), micro)[column]
    steps, gradients = [], {}
    for _ in range(STEPS):
        with engine.train_mode():
            result = engine.forward_backward(batch, loss, micro)
            gradients = gradients or {name: array(g) for name, g in engine.weights.full_gradients()}
            metrics = Metrics()
            metrics.merge(result.metrics)
            metrics.merge(engine.optim_step())
        steps.append(metrics)
    weights = {name: array(w) for name, w in engine.export_weights()}
    return {"before": array(before), "steps": steps, "gradients": gradients, "weights": weights}


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy().copy()


def distance(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Norm of the difference of all tensors over the norm of the expected ones."""
    assert list(found) == list(expected)
    apart = sum(float(((found[n] - expected[n]) ** 2).sum()) for n in expected)
    return (apart / sum(float((e**2).sum()) for e in expected.values())) ** 0.5


def assert_same_training(ranks: list[dict[str, Any]], alone: dict[str, Any], bound: float = 1e-10) -> None:
    for rank in ranks:
        assert distance(rank["gradients"], alone["gradients"]) < bound
        assert distance(rank["weights"], alone["weights"]) < bound
    for step in range(STEPS):
        merged = Metrics()
        for rank in ranks:
            merged.merge(rank["steps"][step])
        assert merged.values() == pytest.approx(alone["steps"][step].values(), rel=bound)


LEVERS = {
    "plain": {},
    "eager head": {"head_mode": "eager"},
    "no reshard": {"reshard_after_forward": False},
    "prefetch": {"forward_prefetch": True},
    "offload": {"param_offload": True, "optimizer_offload": True},
    "offload policy": {"offload_policy": True},
    "checkpointing": {"model": {"enable_gradient_checkpointing": True}},
    "no clipping": {"optim": {"clip_grad": 0.0}},
    "tight clipping": {"optim": {"clip_grad": 1e-3}},
    "padded": {"model": {"use_remove_padding": False}},
    "critic": {"value_head": True},
}


@pytest.mark.parametrize("lever", LEVERS)
def test_two_ranks_train_like_one(folders, lever):
    assert_same_training(run_ranks(2, train, folders[0], LEVERS[lever], 2), train(folders[0], LEVERS[lever]))
