"""How a mesh divides ranks: every rank has one place, and a shape that cannot be is refused with one that can."""

from collections import Counter
from itertools import product

import pytest

from verl.config.mesh import MeshShape
from verl.utils.errors import ConfigError


@pytest.mark.parametrize(("stages", "context", "tensor"), [*product((1, 2), repeat=3)])
def test_each_data_group_has_as_many_ranks_in_every_stage_and_one_that_returns(stages, context, tensor):
    shape = MeshShape.of(16, stages, context, tensor)
    ranks = range(16)
    places = Counter((shape.stage_of(rank), shape.data_group_of(rank)) for rank in ranks)
    assert len(places) == stages * shape.data and set(places.values()) == {context * tensor}
    returning = [shape.data_group_of(rank) for rank in ranks if shape.returns_outputs(rank)]
    assert returning == list(range(shape.data))


def test_the_ranks_of_a_sequence_are_consecutive_and_stages_are_outermost():
    shape = MeshShape.of(8, stages=2, tensor=2)
    assert [shape.data_group_of(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [shape.stage_of(rank) for rank in range(8)] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("ranks", "sizes", "says"),
    [
        (8, {"stages": 3}, "pipeline_parallel_size=3 does not divide 8 ranks; use one of 1, 2, 4, 8"),
        (8, {"stages": 2, "tensor": 8}, "tensor_parallel_size=8 does not divide the 4 of 8 ranks that are left"),
        (8, {"context": 3}, "ulysses_sequence_parallel_size=3 does not divide 8 ranks; use one of 1, 2, 4, 8"),
        (4, {"fsdp_size": 3}, "fsdp_size=3 does not divide 4 ranks; use one of 1, 2, 4"),
        (8, {"stages": 2, "fsdp_size": 3}, "fsdp_size=3 does not divide 4 ranks of each of the 2 stages"),
        (8, {"tensor": 4, "fsdp_size": 2}, "fsdp_size=2 is no multiple of the 4 ranks that divide a sequence"),
        (8, {"experts": 8, "fsdp_size": 4}, "expert_parallel_size=8 does not divide the 4 ranks .* use one of 1, 2, 4"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_the_numbers_and_sizes_that_work(ranks, sizes, says):
    with pytest.raises(ConfigError, match=says):
        MeshShape.of(ranks, **sizes)


def test_its_text_names_the_sizes_that_are_not_one():
    assert str(MeshShape.of(16, stages=2, tensor=2, experts=4)) == "2 stages x 4 data x 2 tensor, 4 for experts"
    assert str(MeshShape()) == "1 rank"
