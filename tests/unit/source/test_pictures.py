"""The pictures of the architecture page show the rooms, layers and columns that the code has now."""

import re
from xml.etree import ElementTree

import pytest

from scripts import draw_architecture
from scripts.draw_architecture import PICTURES, PURPOSES, draw_columns, draw_house
from scripts.layers import RANK
from tests.conftest import ROOT
from verl.data.columns import COLUMNS, Column

HINT = "the code has changed since the pictures were drawn; run: make docs"
SVG = "{http://www.w3.org/2000/svg}"


def rooms(picture: str) -> list[tuple[str | None, ...]]:
    """(layer, room, what is in it) from top to bottom; what changes with every commit is left out."""
    found = [group for group in ElementTree.fromstring(picture).iter(f"{SVG}g") if group.get("data-room")]
    steady = [[t.text for t in group.iter(f"{SVG}text") if "count" not in (t.get("class") or "")] for group in found]
    return [(group.get("data-layer"), *texts) for group, texts in zip(found, steady, strict=True)]


def committed(name: str) -> str:
    return (PICTURES / name).read_text(encoding="utf-8")


def test_the_committed_house_has_the_rooms_and_layers_of_the_code():
    assert rooms(committed("house.svg")) == rooms(draw_house()), HINT
    assert {(layer, name) for layer, name, _ in rooms(draw_house())} == {(str(n), room) for room, n in RANK.items()}
    assert PURPOSES.keys() == RANK.keys()


def test_the_committed_columns_are_those_of_the_code():
    assert committed("batch_columns.svg") == draw_columns(), HINT


def test_every_drawing_is_the_same_as_the_last():
    assert draw_house() == draw_house() and draw_columns() == draw_columns()


def test_a_new_column_or_room_changes_the_picture(monkeypatch):
    drawn, house = draw_columns(), rooms(draw_house())
    monkeypatch.setitem(COLUMNS, "extra", Column("(T,)", "bool", "", ("Batch.pack",), ("gae",)))
    assert draw_columns() != drawn
    monkeypatch.setattr(draw_architecture, "LAYERS", (*draw_architecture.LAYERS, ("attic",)))
    monkeypatch.setitem(PURPOSES, "attic", "things")
    assert rooms(draw_house()) == [("13", "attic", "things"), *house]


def test_a_function_without_a_stage_is_named(monkeypatch):
    monkeypatch.setitem(COLUMNS, "extra", Column("(T,)", "bool", "", ("nowhere",), ()))
    with pytest.raises(KeyError, match="COLUMNS names nowhere, which is in no stage"):
        draw_columns()


def test_no_text_leaves_its_picture():
    """By a generous estimate of the width of letters; browsers differ in their fonts."""
    for name in ("house.svg", "batch_columns.svg"):
        for text in ElementTree.fromstring(committed(name)).iter(f"{SVG}text"):
            kind, words, x = text.get("class") or "", text.text or "", float(text.get("x") or 0)
            width = len(words) * (11.5 if "title" in kind else 6.4 if "small" in kind else 7.9)
            start = x - width if "end" in kind else x - width / 2 if "mid" in kind else x
            assert start >= 0 and start + width <= draw_architecture.WIDTH, words


def test_the_architecture_page_opens_with_both_pictures():
    page = (ROOT / "docs" / "why" / "architecture.md").read_text(encoding="utf-8")
    assert re.findall(r"!\[[^]]+\]\(\.\./pictures/(\w+\.svg)\)", page)[:2] == ["house.svg", "batch_columns.svg"]
