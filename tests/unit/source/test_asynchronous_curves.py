"""What the soak of asynchronous curves makes of its runs, and where it puts it."""

import re
from xml.etree import ElementTree

import pytest

from scripts.soak.algorithms import write_points
from scripts.soak.asynchronous_curves import (
    LAST,
    MODES,
    PAGE,
    PICTURE,
    SECTION,
    comparison,
    curve_of,
    mean_curve,
    of_mode,
    picture,
    with_section,
)


def case(mode: str, seed: int, final: float) -> dict:
    curves = {
        name: write_points([[x * seed, 0.2 * i] for i, x in enumerate((1, 2))]) for name in ("answers", "seconds")
    }
    idle = {} if mode == "sync" else {"trainer": 0.1 * seed, "rollout": 0.04}
    return {"mode": mode, "seed": seed, "final": final, "seconds": 10.0 * seed, "idle": idle, "curves": curves}


CASES = {
    f"{mode} {seed}": case(mode, seed, final + 0.1 * seed)
    for mode, final in zip(MODES, (0.5, 0.59, 0.61, 0.39), strict=True)
    for seed in (1, 2)
}


def test_a_curve_has_the_reward_and_the_seconds_that_have_passed():
    key = "fully_async/trainer/idle_ratio"
    steps = [{"step": i, "data": {"critic/score/mean": i / 100, "timing_s/step": 0.5, key: 0.2}} for i in range(1, 41)]
    found = curve_of([{"step": 0, "data": {"val-core/x": 1.0}}, *steps])
    assert found.reward[-1] == (40.0, 0.4) and found.seconds[-1] == (40.0, pytest.approx(20.0))
    assert found.final == pytest.approx((40 - (LAST - 1) / 2) / 100) and found.idle == {"trainer": 0.2}


def test_a_mode_is_within_the_spread_of_sync_if_its_mean_is_as_near_as_the_seeds_are():
    """Sync's seeds are 0.1 apart around 0.65: 0.74 is within it, 0.76 and 0.54 are not."""
    rows = [line.strip("| ").split(" | ") for line in comparison(CASES)[2:]]
    assert [(row[0].strip("`"), row[2], row[-1]) for row in rows] == [
        ("sync", "0.650", "-"), ("colocate_async", "0.740", "yes"),
        ("one_step_off", "0.760", "no"), ("fully_async", "0.540", "no"),
    ]  # fmt: skip
    assert [row[5:7] for row in rows] == [["-", "-"], *[["15 %", "4 %"]] * 3]


def test_curves_are_means_over_seeds_of_both_coordinates():
    assert mean_curve(of_mode(CASES, "sync"), "seconds") == [(1.5, 0.0), (3.0, pytest.approx(0.2))]


def test_the_picture_has_a_line_of_each_mode_in_both_cells():
    drawn = ElementTree.fromstring(picture(CASES))
    classes = [path.get("class") for path in drawn.iter("{http://www.w3.org/2000/svg}path")]
    assert all(classes.count(mode) == 3 for mode in MODES)  # and one in the legend


def test_the_page_gets_its_section_once():
    page = PAGE.read_text(encoding="utf-8")
    once = with_section(page, ["one", "two"])
    assert f"{SECTION}\n\n" in page and "\n\none\ntwo\n\n## " in once
    assert with_section(with_section(page, ["other"]), ["one", "two"]) == once
    assert (f"pictures/{PICTURE.name}" in page) == PICTURE.exists()
    assert re.findall(r"^## .*$", once, re.M) == re.findall(r"^## .*$", page, re.M)
