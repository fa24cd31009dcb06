"""Many ranks compute what one does: loss, gradient and weights after steps, whichever way the parameters are held."""

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine_cases import SquaredLogprob, SquaredValue, build_engine, random_batch, save_tiny_model, tiny_qwen3
from tests.ranks import run_ranks
from verl.config import WrapPolicyConfig
from verl.data.metrics import Metrics
from verl.data.micro_batches import MicroBatching
from verl.utils.errors import ConfigError
from verl.workers.engine.shared_memory_collectives import SharedMemoryCollectives

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


OPTIONS = {
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


def train_by_each_option(folder) -> dict[str, dict[str, Any]]:
    return {option: train(folder, settings, 2) for option, settings in OPTIONS.items()}


@pytest.fixture(scope="module")
def on_two_ranks(folders):
    """What each of two ranks trained, by option: they start once for all options."""
    return run_ranks(2, train_by_each_option, folders[0])


@pytest.mark.parametrize("option", OPTIONS)
def test_two_ranks_train_like_one(folders, on_two_ranks, option):
    assert_same_training([rank[option] for rank in on_two_ranks], train(folders[0], OPTIONS[option]))


def test_two_ranks_train_a_model_with_a_head_of_its_own_like_one(folders):
    assert_same_training(run_ranks(2, train, folders[1], {}, 2), train(folders[1], {}))


def test_hybrid_sharding_trains_like_one_rank(folders):
    """Two copies of the parameters, each in the shards of two ranks."""
    assert_same_training(run_ranks(4, train, folders[0], {"fsdp_size": 2}, 4), train(folders[0], {}))


def train_each(folder, cases: dict[str, dict[str, Any]], size: int) -> dict[str, dict[str, Any]]:
    return {name: train(folder, settings, size) for name, settings in cases.items()}


COMPOSED = {
    "copies": {"fsdp_size": 1},
    "no reshard": {"reshard_after_forward": False},
    "prefetch": {"forward_prefetch": True},
    "offload": {"param_offload": True, "optimizer_offload": True},
    "offload policy": {"offload_policy": True},
    "checkpointing": {"model": {"enable_gradient_checkpointing": True}},
    "small units": {"wrap_policy": WrapPolicyConfig(min_num_params=1000)},
    "chunked head": {"head_mode": "chunked"},
    "few forwards": {"micro": MicroBatching(max_tokens=25)},
}


@pytest.mark.slow
def test_every_pair_of_performance_options_on_two_ranks_trains_like_one(folders):
    pairs = {f"{a}, {b}": {**COMPOSED[a], **COMPOSED[b]} for a, b in itertools.combinations(COMPOSED, 2)}
    alone = train(folders[0], {"head_mode": "eager", "micro": MicroBatching()})
    first, second = run_ranks(2, train_each, folders[0], pairs, 2)
    for name in pairs:
        assert_same_training([first[name], second[name]], alone)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rounding_errors_are_at_most_twice_those_of_one_rank(folders, dtype):
    """Against float64. bf16 computes in bf16 and holds and sums in float32."""
    exact = train(folders[0], {"head_mode": "eager"})["gradients"]
    settings = {"model_dtype": "fp32", "dtype": dtype}
    alone = distance(train(folders[0], settings)["gradients"], exact)
    for rank in run_ranks(2, train, folders[0], settings, 2):
        assert distance(rank["gradients"], exact) < 2 * alone


def train_with_an_infinity(folder, size: int) -> tuple[float, str, bool]:
    """(skipped, the parameter that is named, whether the weights stayed) where one rank's shard has an infinity."""
    engine, batch = build_engine(folder), random_batch().select(ROWS[size][dist.get_rank()])
    before = {name: array(w) for name, w in engine.export_weights()}
    engine.forward_backward(batch, SquaredLogprob(), MICRO)
    if dist.get_rank() == 1:
        dict(engine.weights.local_gradients())["model.norm.weight"][0] = float("inf")
    named = engine.weights.first_non_finite_gradient()
    skipped = engine.optim_step().values().get("skipped")
    after = {name: array(w) for name, w in engine.export_weights()}
    return skipped, named, all(np.array_equal(before[name], after[name]) for name in before)


def test_all_ranks_skip_the_step_when_one_has_an_infinite_gradient(folders):
    assert run_ranks(2, train_with_an_infinity, folders[0], 2) == [
        (1.0, "model.norm.weight", True),
        (0.0, "model.norm.weight", True),
    ]


class Sums(TorchDispatchMode):
    """Counts the collectives that sum over ranks, those through shared memory among them."""

    def __init__(self) -> None:
        super().__init__()
        self.count, reduce = 0, SharedMemoryCollectives.reduce_scatter

        def counting(*args: Any) -> None:
            self.count += 1
            reduce(*args)

        SharedMemoryCollectives.reduce_scatter = counting

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "reduce_scatter" in str(func) or "allreduce" in str(func)
        return func(*args, **(kwargs or {}))


def sums(folder, micro: MicroBatching) -> int:
    engine, batch = build_engine(folder), random_batch().select(ROWS[2][dist.get_rank()])
    engine.forward_backward(batch, SquaredLogprob(), micro)
    with Sums() as mode:
        engine.forward_backward(batch, SquaredLogprob(), micro)
    return mode.count


def test_gradients_are_summed_once_however_many_micro_batches_there_are(folders):
    agreed = 2  # on the number of micro-batches, and that all of them fitted into memory
    assert run_ranks(2, sums, folders[0], MICRO) == [agreed + 2 + 1] * 2, "a sum for each of two layers and the root"


def bytes_held(folder) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimiser state on this rank, between two updates."""
    engine = build_engine(folder, dtype="fp32")
    batch = random_batch()
    engine.forward_backward(batch, SquaredLogprob())
    engine.optim_step()
    engine.forward_backward(batch, SquaredLogprob())
    state = [value for values in engine.optimizer.state.values() for value in values.values() if value.dim()]
    tensors = [[p for _, p in engine.weights.named_parameters], [g for _, g in engine.weights.local_gradients()], state]
    storages = [{s.data_ptr(): s.nbytes() for s in (own(t).untyped_storage() for t in kind)} for kind in tensors]
    return tuple(sum(kind.values()) for kind in storages)


def own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_two_ranks_hold_half_of_everything(folders):
    alone = bytes_held(folders[0])
    for rank in run_ranks(2, bytes_held, folders[0]):
        for part, whole in zip(rank, alone, strict=True):
            assert part / whole == pytest.approx(0.5, abs=0.02)


def forward_only(folder) -> list[float]:
    engine = build_engine(folder, forward_only=True)
    return engine.forward(random_batch(), ("logprobs", "entropy"), MICRO)["entropy"].tolist()


def test_a_reference_in_shards_gives_the_outputs_of_a_whole_one(folders):
    for found in run_ranks(2, forward_only, folders[1]):
        assert found == pytest.approx(forward_only(folders[1]), rel=1e-12)


def narrow_reference(folder) -> tuple[bool, set[str]]:
    """Whether it gives the outputs of an engine that could train, and the types it holds."""
    types = {"model_dtype": "fp32", "dtype": "bf16"}
    expected = build_engine(folder, **types).forward(random_batch(), micro=MICRO)["logprobs"]
    engine = build_engine(folder, **types, forward_only=True)
    same = torch.equal(engine.forward(random_batch(), micro=MICRO)["logprobs"], expected)
    return same, {str(parameter.dtype) for _, parameter in engine.weights.named_parameters}


def test_a_reference_in_shards_holds_its_weights_in_the_type_it_computes_in(folders):
    assert run_ranks(2, narrow_reference, folders[1]) == [(True, {"torch.bfloat16"})] * 2


def plan_with_an_idle_rank(folder) -> dict[str, Any]:
    plans = ((0, 1), (2, 3), (4, 5)), ((), (), ())
    engine, rank = build_engine(folder), dist.get_rank()
    result = engine.forward_backward(random_batch(), SquaredLogprob(), MicroBatching(plan=plans[rank]))
    return {"gradients": {n: array(g) for n, g in engine.weights.full_gradients()}, "metrics": result.metrics}


def test_a_rank_without_sequences_takes_part_and_adds_nothing(folders):
    alone = train(folders[0], {})
    for rank in run_ranks(2, plan_with_an_idle_rank, folders[0]):
        assert distance(rank["gradients"], alone["gradients"]) < 1e-10


def one_step(folder, settings: dict[str, Any], size: int, saved: str, resume: bool) -> dict[str, np.ndarray]:
    """Weights after a step: the first one, then saved; or the one after a resume."""
    engine = build_engine(folder, **settings)
    if resume:
        engine.load(saved, ("model", "optimizer"))
    batch = random_batch().select(ROWS[size][dist.get_rank() if size > 1 else 0])
    engine.forward_backward(batch, SquaredLogprob(), MICRO)
    engine.optim_step()
    if not resume:
        engine.save(saved, ("model", "optimizer", "hf_model"))
    return {name: array(w) for name, w in engine.export_weights()}


@pytest.mark.parametrize("fsdp_size", [-1, 1], ids=["shards", "copies"])
def test_ranks_resume_from_and_for_any_way_to_shard(folders, tmp_path, fsdp_size):
    """Saved by two ranks in one way, continued by two in both ways and by one: all as if never stopped."""
    saved, alone = str(tmp_path / "saved"), train(folders[0], {})["weights"]
    run_ranks(2, one_step, folders[0], {"fsdp_size": fsdp_size, "strategy": "fsdp"}, 2, saved, False)
    for settings in ({"fsdp_size": fsdp_size}, {"fsdp_size": -fsdp_size}):
        for rank in run_ranks(2, one_step, folders[0], settings, 2, saved, True):
            assert distance(rank, alone) < 1e-10
    assert distance(one_step(folders[0], {}, 1, saved, True), alone) < 1e-10


def refusal(folder, settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        build_engine(folder, **settings)
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fsdp_size": 3}, "fsdp_size=3 does not divide 4 ranks; use one of 1, 2, 4"),
        ({"wrap_policy": WrapPolicyConfig(transformer_layer_cls_to_wrap=["Layer"])}, "these .*Qwen3DecoderLayer"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_what_can(folders, settings, message):
    for text in run_ranks(4, refusal, folders[0], settings):
        assert re.search(message, text)
