"""Ranks that share the tokens of sequences compute what one rank does: attention, log-probs, gradients, in float64."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from tests.engine_cases import SHAPE, SquaredLogprob, SquaredValue, build_engine, save_tiny_model, tiny_qwen3
from tests.ranks import run_ranks
from tests.unit.models.test_prefix_sharing import grouped_batch
from tests.unit.workers.engine.test_sharding import array, distance
from verl.config import FSDPEngineConfig
from verl.data.metrics import Metrics
from verl.data.micro_batches import MicroBatching
from verl.models.attention.packed import packed_attention
from verl.models.attention.packing import Packing
from verl.models.attention.ulysses import SplitPacking
from verl.models.registry import check_sequence_parallel
from verl.utils.errors import ConfigError
from verl.workers.engine.rank_mesh import RankMesh

LENGTHS = (5, 5, 1, 7, 3)  # 21 tokens: 2 and 4 ranks need padding
HEADS = ((4, 2), (4, 4), (4, 1), (12, 3))  # query, key/value
SPECS = ({}, {"sliding_window": 3}, {"softcap": 2.0}, {"sinks": True})


# --- attention --------------------------------------------------------------------------------------------------------


def attended(heads: tuple[int, int], how: dict[str, Any], group: Any = None) -> list[np.ndarray]:
    """Output and gradients of query, key and value (and sinks); those of this rank's tokens where there is a group."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    total, size = sum(LENGTHS), group.size() if group else 1
    padding = torch.zeros(1, -total % size, max(heads), 6, dtype=torch.float64)
    whole = [random(1, total, n, d) for n, d in ((heads[0], 6), (heads[1], 6), (heads[1], 4), (heads[0], 4))]
    mine = [torch.cat([x, padding[:, :, : x.shape[2], : x.shape[3]]], 1).chunk(size, 1) for x in whole]
    query, key, value, direction = (parts[group.rank() if group else 0].transpose(1, 2) for parts in mine)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    options = {name: setting for name, setting in how.items() if name != "sinks"}
    if "sinks" in how:
        leaves.append(random(heads[0]).requires_grad_())
        options["s_aux"] = leaves[-1]
    packing: Any = Packing.of_lengths(LENGTHS, torch.device("cpu"))
    if group:
        packing = SplitPacking.over(packing, total, group)
    out, _ = packed_attention(torch.nn.Identity(), *leaves[:3], None, cu_seqlens=packing, **options)
    (out.transpose(1, 2) * direction).sum().backward()
    return [array(x) for x in (out, *(leaf.grad.transpose(1, 2) for leaf in leaves[:3]), *(x.grad for x in leaves[3:]))]


def attended_everywhere() -> list[list[np.ndarray]]:
    return [attended(heads, how, dist.group.WORLD) for heads in HEADS for how in SPECS]


@pytest.mark.parametrize("size", [2, 4])
def test_attention_and_its_gradient_equal_those_of_one_rank(size):
    ranks = run_ranks(size, attended_everywhere)
    for case, (heads, how) in enumerate((heads, how) for heads in HEADS for how in SPECS):
        parts = [rank[case] for rank in ranks]
        for column, expected in enumerate(attended(heads, how)):
            if column < 4:
                found = np.concatenate([part[column] for part in parts], 1)[:, : sum(LENGTHS)]
            else:
                found = sum(part[column] for part in parts)  # of the sinks: each rank has some heads
            np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-13, err_msg=f"{heads} {how} {column}")


# --- the engine -------------------------------------------------------------------------------------------------------

MODELS = {"kv heads divide": {}, "one kv head": {"num_key_value_heads": 1}, "untied": {"tie_word_embeddings": False}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one kv head": {"of": "one kv head"},
    "untied": {"of": "untied"},
    "eager head": {"head_mode": "eager"},
    "chunked head, loss of whole sequences": {"head_mode": "chunked", "per_token": False},
    "checkpointing": {"model": {"enable_gradient_checkpointing": True}},
    "token budget": {"micro": MicroBatching(max_tokens=17)},
    "one sequence at a time": {"micro": MicroBatching(max_sequences=1)},
    "prefix sharing": {"micro": MicroBatching(share_prefixes=True)},
    "prefix sharing, checkpointing, budget": {
        "micro": MicroBatching(max_tokens=17, share_prefixes=True),
        "model": {"enable_gradient_checkpointing": True},
    },
    "critic": {"value_head": True},
    "critic, prefix sharing": {"value_head": True, "micro": MicroBatching(share_prefixes=True)},
    "offload": {"param_offload": True, "optimizer_offload": True},
    "activation offload": {"model": {"enable_gradient_checkpointing": True, "enable_activation_offload": True}},
    "a whole copy on each rank": {"fsdp_size": 1},
}
ROWS = {1: [list(range(11))], 2: [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9]]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: save_tiny_model(tmp_path_factory.mktemp("model"), tiny_qwen3(**changes))
        for name, changes in MODELS.items()
    }


def train(folders, case: dict[str, Any], shared: int = 1) -> dict[str, Any]:
    """One step: what it measured, gradients, weights after it, and the columns of this rank's sequences."""
    case = dict(case)
    folder, micro = folders[case.pop("of", "kv heads divide")], case.pop("micro", MicroBatching())
    value, per_token = case.get("value_head", False), case.pop("per_token", True)
    engine = build_engine(folder, ulysses_sequence_parallel_size=shared, **case)
    batch = grouped_batch().select(ROWS[engine.rank_mesh.data_size][engine.rank_mesh.data_rank])
    loss, column = (SquaredValue(), "values") if value else (SquaredLogprob(per_token), "logprobs")
    with engine.eval_mode():
        before = engine.forward(batch, (column,), micro)[column]
    with engine.train_mode():
        result = engine.forward_backward(batch, loss, micro, temperature=0.7)
        gradients = {name: array(g) for name, g in engine.weights.full_gradients()}
        metrics = result.metrics.merge(engine.optim_step())
    return {
        "columns": [array(before), *(array(column) for column in result.outputs.values())],
        "metrics": metrics,
        "gradients": gradients,
        "weights": {name: array(w) for name, w in engine.export_weights()},
    }


def train_all(folders, names: list[str], dtype: str = "fp64") -> list[dict[str, Any]]:
    return [train(folders, {**CASES[name], "dtype": dtype}, 2) for name in names]


def assert_same(ranks: list[dict[str, Any]], alone: dict[str, Any], data_size: int, name: str) -> None:
    for number, rank in enumerate(ranks):
        assert distance(rank["gradients"], alone["gradients"]) < 1e-10, name
        assert distance(rank["weights"], alone["weights"]) < 1e-8, name  # Adam's first step divides by small numbers
        for found, of_first in zip(rank["columns"], ranks[number // 2 * 2]["columns"], strict=True):
            np.testing.assert_array_equal(found, of_first)
    firsts, merged = ranks[::2], Metrics()
    for rank in firsts:
        merged.merge(rank["metrics"])
    both = [{n: v for n, v in found.values().items() if "computed" not in n} for found in (merged, alone["metrics"])]
    assert both[0] == pytest.approx(both[1], rel=1e-10), name  # what is computed has padding to the number of ranks
    batch = grouped_batch()
    owners = batch.sequence_ids()
    for column, expected in enumerate(alone["columns"]):
        for rows, rank in zip(ROWS[data_size], firsts, strict=True):
            here = torch.isin(owners, torch.tensor(rows)).numpy()
            np.testing.assert_allclose(rank["columns"][column], expected[here], rtol=1e-10, atol=1e-12, err_msg=name)


def test_two_ranks_that_share_sequences_train_like_one(folders):
    names = list(CASES)
    ranks = run_ranks(2, train_all, folders, names)
    for number, name in enumerate(names):
        assert_same([rank[number] for rank in ranks], train(folders, CASES[name]), 1, name)


def test_two_pairs_of_ranks_train_like_one(folders):
    names = ["one kv head", "token budget", "prefix sharing, checkpointing, budget"]
    ranks = run_ranks(4, train_all, folders, names)
    for number, name in enumerate(names):
        assert_same([rank[number] for rank in ranks], train(folders, CASES[name]), 2, name)


def test_in_float32_sharing_is_no_less_exact_than_one_rank(folders):
    """Also with shared prompts: at most twice the error of one plain rank against float64."""
    names = ["plain", "prefix sharing"]
    exact, plain = train(folders, CASES["plain"])["gradients"], train(folders, {"dtype": "fp32"})["gradients"]
    bound = 2 * distance(plain, exact)
    assert bound > 1e-9
    shared = train(folders, {**CASES["prefix sharing"], "dtype": "fp32"})["gradients"]
    assert distance(shared, exact) <= bound
    for rank in run_ranks(2, train_all, folders, names, "fp32"):
        for case in rank:
            assert distance(case["gradients"], exact) <= bound


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_heads_that_do_not_divide_are_refused_with_the_numbers_that_do():
    config = AutoConfig.for_model("qwen2", **{**SHAPE, "num_attention_heads": 6, "num_key_value_heads": 3})
    check_sequence_parallel(config, packed=True, size=2, num_ranks=8)
    with pytest.raises(ConfigError, match=r"size=4 .* 6 attention heads; with 8 ranks use one of 1, 2$"):
        check_sequence_parallel(config, packed=True, size=4, num_ranks=8)


def test_models_that_no_rank_may_cut_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"'gpt_neox', which runs padded: nobody has tested"):
        check_sequence_parallel(AutoConfig.for_model("gpt_neox", **SHAPE), packed=False, size=2, num_ranks=2)
    with pytest.raises(ConfigError, match=r"use_remove_padding=False asks for it"):
        check_sequence_parallel(tiny_qwen3(), packed=False, size=2, num_ranks=2)


def test_more_sharing_ranks_than_there_are_is_refused():
    with pytest.raises(ConfigError, match=r"ulysses_sequence_parallel_size=2 does not divide 1 ranks"):
        RankMesh.of(FSDPEngineConfig(ulysses_sequence_parallel_size=2), torch.device("cpu"))
