"""The pictures of docs/scale/cluster.md are those of the code, beside the commands that they show."""

import re

import pytest

from scripts import draw_placements
from scripts.draw_architecture import PICTURES
from scripts.draw_placements import PLACEMENTS, Placement, draw
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "scale" / "cluster.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.name)
def test_the_committed_picture_is_that_of_the_code(placement):
    committed = (PICTURES / f"placement_{placement.name}.svg").read_text(encoding="utf-8")
    assert committed == draw(placement), "the code has changed since the pictures were drawn; run: make docs"


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.name)
def test_the_page_has_the_command_of_each_picture(placement):
    after = PAGE.split(f"](../pictures/placement_{placement.name}.svg)")[1]
    assert f" {' '.join(placement.overrides)} …" in re.search(r"```bash\n(.*?)```", after, flags=re.S)[1]


def test_machines_between_that_look_alike_are_left_out():
    many = draw_placements.plan_of(PLACEMENTS[-1])
    assert many.num_nodes == 64
    assert draw_placements.drawn_nodes(many) == [0, 1, None, 47, 48, 49, None, 63]


def test_each_replica_has_its_devices():
    drawn = draw(Placement("", "", ("trainer.n_gpus_per_node=4", "actor_rollout_ref.rollout.name=vllm"), devices=4))
    assert "rollout: replicas 0-3" in drawn and "actor: ranks 0-3" in drawn
