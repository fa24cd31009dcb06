"""Every family that runs packed gives the same logits and gradients when two ranks share the tokens of sequences."""

import numpy as np
import torch
import torch.distributed as dist

from tests.models.test_transformer import LENGTHS, MODELS, build, gradients, rows_and_direction, run_alone
from tests.ranks import run_ranks
from verl.commands.certify.float64 import keep_float64
from verl.models.attention.packing import Packing
from verl.models.attention.ulysses import SplitPacking
from verl.models.registry import check_sequence_parallel, make_packed, runs_packed

Found = dict[str, np.ndarray]


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-300))


def packed_models() -> list[int]:
    return [i for i, (name, changes) in enumerate(MODELS) if runs_packed(build(name, changes).config, wanted=True)]


def run_split(numbers: list[int]) -> list[tuple[np.ndarray, Found]]:
    """(logits of this rank's tokens, its part of the gradients) of each model."""
    group, out = dist.group.WORLD, []
    rows, direction = rows_and_direction()
    for number in numbers:
        model = build(*MODELS[number], attention=None)
        make_packed(model)
        keep_float64(model)
        check_sequence_parallel(model.config, True, group.size(), group.size())
        split = SplitPacking.over(Packing.of_lengths(LENGTHS, torch.device("cpu")), sum(LENGTHS), group)
        positions = torch.cat([torch.arange(n) for n in LENGTHS])
        ids, places = split.local_slice(torch.cat(rows)), split.local_slice(positions)
        logits = model(input_ids=ids[None], position_ids=places[None], cu_seqlens=split, use_cache=False).logits[0]
        padding = direction.new_zeros(-len(direction) % group.size(), direction.shape[1])
        mine = torch.cat([direction, padding]).chunk(group.size())[group.rank()]
        found = gradients(model, logits, mine)
        out.append((logits.detach().numpy(), {name: g.numpy() for name, g in found.items()}))
    return out


def test_two_ranks_that_share_the_tokens_get_what_each_sequence_gives_alone():
    numbers = packed_models()
    ranks = run_ranks(2, run_split, numbers)
    rows, direction = rows_and_direction()
    for case, number in enumerate(numbers):
        model, name = build(*MODELS[number]), MODELS[number][0]
        keep_float64(model)
        alone = run_alone(model, rows)
        expected = gradients(model, alone, direction)
        logits = np.concatenate([rank[case][0] for rank in ranks])[: sum(LENGTHS)]
        assert relative(logits, alone.detach().numpy()) < 1e-10, name
        parts = [rank[case][1] for rank in ranks]
        assert {*parts[0], *parts[1]} == {*expected}, name
        for key, gradient in expected.items():
            found = sum(part[key] for part in parts if key in part)
            assert relative(np.asarray(found), gradient.numpy()) < 1e-10 or float(gradient.norm()) < 1e-12, (name, key)
