"""Ranks that divide the experts compute what one rank with all experts does: log-probs, gradients and steps."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from tests.engine_cases import SHAPE, build_engine, random_batch, save_tiny_model
from tests.models.test_transformer import MODELS
from tests.ranks import run_ranks
from tests.unit.models import test_ulysses
from tests.unit.workers.engine.test_out_of_memory import train as train_in_memory
from tests.unit.workers.engine.test_out_of_memory import train_on_two
from tests.unit.workers.engine.test_sharded_checkpoint import assert_equal, load, on, train_and_save
from tests.unit.workers.engine.test_sharding import assert_same_training, distance, train
from verl.config.mesh import MeshShape
from verl.data.micro_batches import MicroBatching
from verl.models import expert_parallel
from verl.models.load import load_causal_lm
from verl.utils.errors import ConfigError

# Where the library computes a norm or a router in float32, whatever the model's type.
FLOAT32_INSIDE = ("glm4_moe", "deepseek_v2", "deepseek_v3", "qwen3_5_moe_text")
MOE = ("qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "mixtral", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss", "phimoe")
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one sequence at a time": {"micro": MicroBatching(max_sequences=1)},
    "token budget": {"micro": MicroBatching(max_tokens=25)},
    "checkpointing": {"model": {"enable_gradient_checkpointing": True}},
    "no reshard, prefetch": {"reshard_after_forward": False, "forward_prefetch": True},
    "offload": {"param_offload": True, "optimizer_offload": True},
    "padded": {"model": {"use_remove_padding": False}},
    "adapters on attention": {"model": {"lora_rank": 4, "target_modules": ["q_proj", "o_proj"]}},
    "critic": {"value_head": True},
    "tight clipping": {"optim": {"clip_grad": 1e-3}},
}
MESHES: dict[str, dict[str, Any]] = {  # of 4 ranks
    "all 4 divide the experts": {"expert_parallel_size": 4},
    "2 divide them, 2 shard each": {"expert_parallel_size": 2},
    "2 copies": {"expert_parallel_size": 2, "fsdp_size": 2},
}


def config(name: str, **changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(name, **{**SHAPE, **dict(MODELS)[name], **changes})


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Any]:
    return {name: save_tiny_model(tmp_path_factory.mktemp(name), config(name)) for name in MOE}


def train_families(folders: dict[str, Any], size: int, engine: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: train(folder, engine, size) for name, folder in folders.items()}


def train_cases(
    folder: Any, size: int, cases: dict[str, dict[str, Any]], engine: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    return {name: train(folder, {**case, **engine}, size) for name, case in cases.items()}


@pytest.fixture(scope="module")
def families_on_two_ranks(folders):
    return run_ranks(2, train_families, folders, 2, {"expert_parallel_size": 2})


@pytest.mark.parametrize("name", MOE)
def test_two_ranks_with_half_the_experts_each_train_like_one(folders, families_on_two_ranks, name):
    bound = 1e-6 if name in FLOAT32_INSIDE else 1e-10
    assert_same_training([rank[name] for rank in families_on_two_ranks], train(folders[name], {}), bound)


def test_any_option_beside_it_changes_nothing(folders):
    ranks = run_ranks(2, train_cases, folders["qwen3_moe"], 2, CASES, {"expert_parallel_size": 2})
    for name, case in CASES.items():
        assert_same_training([rank[name] for rank in ranks], train(folders["qwen3_moe"], case))


def test_any_mesh_of_four_ranks_trains_like_one(folders):
    ranks, alone = run_ranks(4, train_cases, folders["qwen3_moe"], 4, MESHES, {}), train(folders["qwen3_moe"], {})
    for name in MESHES:
        assert_same_training([rank[name] for rank in ranks], alone)


def train_sharing_sequences(folder: Any, sizes: list[int]) -> list[dict[str, Any]]:
    return [test_ulysses.train({"kv heads divide": folder}, {"expert_parallel_size": n}, 2) for n in sizes]


@pytest.mark.parametrize(("size", "experts"), [(2, [2]), (4, [2, 4])])
def test_ranks_that_share_sequences_may_divide_experts_too(folders, size, experts):
    """Pairs of ranks split the tokens of their sequences; 2 ranks divide the experts, or all of both pairs."""
    folder = folders["qwen3_moe"]
    alone = test_ulysses.train({"kv heads divide": folder}, {})
    found = run_ranks(size, train_sharing_sequences, folder, experts)
    for number, count in enumerate(experts):
        test_ulysses.assert_same([rank[number] for rank in found], alone, size // 2, f"{count} for experts")


@pytest.mark.parametrize(("saving", "loading"), [("2", "1"), ("1", "2"), ("2", "2 x 2"), ("2 x 2", "4")])
def test_any_mesh_loads_what_any_mesh_saved(folders, tmp_path, saving, loading):
    """Parameters, optimiser state and schedule, bit for bit."""
    meshes = {
        "1": (1, {}),
        "2": (2, {"expert_parallel_size": 2}),
        "2 x 2": (4, {"expert_parallel_size": 2}),
        "4": (4, {"expert_parallel_size": 4}),
    }
    (size, first), (others, second) = meshes[saving], meshes[loading]
    folder = folders["qwen3_moe"]
    saved = on(size, train_and_save, folder, tmp_path / "saved", size, {"dtype": "fp32", **first})[0]
    for found in on(others, load, folder, tmp_path / "saved", others, {"dtype": "fp32", **second}):
        assert_equal(found, saved)


@pytest.mark.parametrize("starved", [[1], [0, 1]])
@pytest.mark.parametrize("place", ["layer", "backward", "embedding", "after the layers"])
def test_a_rank_that_runs_out_of_memory_does_not_keep_the_other_waiting(folders, place, starved):
    """Ranks wait for each other inside of a layer: all that exchange tokens stop, and restart, together."""
    folder, settings = folders["qwen3_moe"], {"expert_parallel_size": 2}
    expected, _ = train_in_memory(build_engine(folder), random_batch(), MicroBatching(max_tokens=50))
    for rank, (weights, _, (refused, restarts, _)) in enumerate(
        run_ranks(2, train_on_two, folder, place, starved, settings)
    ):
        assert (refused > 0) == (rank in starved), "the allocator never failed: this test would prove nothing"
        assert restarts >= 1
        for name, tensor in expected.items():
            torch.testing.assert_close(torch.from_numpy(weights[name]), tensor, rtol=1e-9, atol=1e-11)


def counted(folder: Any) -> tuple[int, list[int]]:
    """Elements of this rank's expert parameters, and of their gradients' full tensors."""
    engine = build_engine(folder, expert_parallel_size=2)
    held = [p.to_local().numel() for e in expert_parallel.experts_of(engine.model) for p in e.parameters()]
    return sum(held), [p.numel() for e in expert_parallel.experts_of(engine.model) for p in e.parameters()]


def test_a_rank_holds_its_experts_only(folders):
    for held, whole in run_ranks(2, counted, folders["qwen3_moe"]):
        assert 2 * held == sum(whole)


def train_with_experts_in_the_wrong_place(folder: Any) -> dict[str, Any]:
    local = expert_parallel._local
    expert_parallel._local = lambda parameter: local(parameter).roll(1, 0)
    return train(folder, {"expert_parallel_size": 2}, 2)


def test_an_expert_on_the_wrong_rank_is_noticed(folders):
    """The laws above can fail."""
    alone = train(folders["qwen3_moe"], {})
    for rank in run_ranks(2, train_with_experts_in_the_wrong_place, folders["qwen3_moe"]):
        assert distance(rank["gradients"], alone["gradients"]) > 1e-3


@pytest.mark.parametrize(
    ("changes", "shape", "says"),
    [
        ({}, MeshShape(ranks=4, experts=3, sharded=12), "expert_parallel_size=3 does not divide 4 experts"),
        ({"moe_intermediate_size": 17}, MeshShape(ranks=8, experts=2, sharded=6), "leaves 3 ranks .* sizes 32, 34"),
    ],
)
def test_numbers_that_do_not_divide_are_refused_with_those_that_do(folders, tmp_path, changes, shape, says):
    model = load_causal_lm(save_tiny_model(tmp_path, config("qwen3_moe", **changes)))
    with pytest.raises(ConfigError, match=says):
        expert_parallel.check_experts(model, shape)


def test_a_dense_model_has_nothing_to_divide(tmp_path):
    model = load_causal_lm(save_tiny_model(tmp_path))
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no layers of experts"):
        expert_parallel.check_experts(model, MeshShape(ranks=2, experts=2, sharded=2))


def test_on_one_rank_the_size_is_refused(folders):
    with pytest.raises(ConfigError, match="expert_parallel_size=2 does not divide the 1 rank"):
        build_engine(folders["qwen3_moe"], expert_parallel_size=2)
