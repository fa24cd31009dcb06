"""Terminal curves and the HTML report."""

import html
import re
import shutil
import subprocess
from xml.etree import ElementTree

import pytest

from tests.conftest import skip_or_fail
from verl.observe.html_report import AnswerComparison, metric_points, nice_ticks, tick_label, write_report
from verl.observe.svg_curves import make_curve
from verl.observe.terminal_curve import draw_curve

RISING = [(i, i / 50) for i in range(51)]


def records(count=60):
    return [{"step": i, "data": {"critic/score/mean": i / 60, "actor/entropy": 2 - i / 60}} for i in range(count)]


def column_of(line, bar):
    return line.split(bar, 1)[1]


def test_a_rising_line_goes_from_bottom_left_to_top_right():
    lines = draw_curve(RISING, "reward", width=40, height=8, unicode=False).splitlines()
    assert lines[0] == "reward" and len(lines) == 1 + 8 + 2 and max(map(len, lines)) <= 40
    rows = [column_of(line, "|") for line in lines[1:9]]
    starts = [row.index("*") for row in rows]
    assert starts == sorted(starts, reverse=True) and starts[-1] == 0
    assert lines[1].strip().startswith("1 |") and lines[8].strip().startswith("0 |")
    assert lines[-1].split() == ["0", "50"]


def test_unicode_draws_with_braille_and_ascii_without():
    assert any(0x2800 < ord(c) <= 0x28FF for c in draw_curve(RISING, unicode=True))
    assert draw_curve(RISING, unicode=False).isascii()


@pytest.mark.parametrize(
    "points", [[], [(0, float("nan"))], [(3, 2.0)], [(0, 1.0), (1, 1.0)], [(0, -1e9), (1, 1e9), (2, float("inf"))]]
)
def test_odd_curves_are_drawn_without_an_error(points):
    assert draw_curve(points, width=40)
    assert draw_curve(points, width=40, unicode=False)


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (0.13, 0.97), (-3, 1200), (5, 5), (0, 0), (1e-9, 3e-9), (1e-15, 4e-15), (1.0, 1.0 + 1e-15), (-2e-16, 0)],
)
def test_ticks_are_few_and_enclose_the_values(low, high):
    ticks = nice_ticks(low, high)
    assert 3 <= len(ticks) <= 8 and ticks[0] <= low <= high <= ticks[-1]
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(
    ("name", "values", "lowest"),
    [
        ("actor/ppo_kl", [6.0, -1e-4, 0.2], "0"),
        ("actor/kl_loss", [0.52, 0.58], "0"),
        ("actor/ppo_kl", [0.0, 0.0], "0"),
        ("actor/ppo_kl", [0.1, -0.1], "-0.1"),
        ("actor/entropy", [0.52, 0.58], "0.52"),
        ("critic/score/mean", [6.0, -1e-4], "-2"),
        ("reward/errors", [0.0, 0.0], "0"),
    ],
)
def test_the_axis_of_a_kl_starts_at_zero_unless_it_is_below_by_more_than_noise(name, values, lowest):
    curve = make_curve(name, {0: list(enumerate(values))})
    assert curve.y_ticks[0][1] == lowest
    assert max(y for y, _ in curve.y_ticks) >= max(y for _, y, _ in curve.lines[0].dots)  # nothing below the axis


@pytest.mark.parametrize(
    ("value", "label"), [(0, "0"), (0.25, "0.25"), (1200.0, "1200"), (2.2e-4, "2.2e-4"), (-5e-7, "-5e-7"), (2e6, "2e6")]
)
def test_axis_labels_are_short(value, label):
    assert tick_label(value) == label


def test_a_step_logged_twice_counts_once_and_gaps_are_left_out():
    data = [{"step": 1, "data": {"a": 1}}, {"step": 1, "data": {"a": 2}}, {"step": 2, "data": {"a": float("nan")}}]
    assert metric_points(data) == {"a": [(1.0, 2.0)]}


def test_everything_from_outside_is_escaped(tmp_path):
    evil = "<script>alert('x')</script>"
    page = write_report(
        tmp_path / "r.html",
        evil,
        [{"step": 1, "data": {evil: 1.0}}],
        [AnswerComparison(evil, evil, evil, evil, 0.0, 1.0)],
        {evil: {evil: evil}},
        {evil: evil},
    ).read_text()
    assert "<script" not in page and html.escape(evil, quote=True).replace("&#x27;", "&#39;") in page


def test_the_report_needs_nothing_from_outside(tmp_path):
    page = write_report(
        tmp_path / "r.html", "t", records(), [AnswerComparison("p", "b", "a")], {"a": {"b": 1}}
    ).read_text()
    assert not re.search(r"(?:src|href|url|@import)\s*[=(]", page)
    assert "http:" not in page and "https:" not in page and "<script" not in page


def test_every_metric_is_drawn_inside_its_frame(tmp_path):
    page = write_report(tmp_path / "r.html", "t", records()).read_text()
    drawings = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.S)]
    assert len(drawings) == 2
    for svg in drawings:
        _, _, width, height = map(float, svg.get("viewBox").split())
        dots = [(float(c.get("cx")), float(c.get("cy"))) for c in svg.iter("circle")]
        assert len(dots) == 60 and all(0 <= x <= width and 0 <= y <= height for x, y in dots)
        rises = dots[0][1] > dots[-1][1]  # SVG's y points down
        assert rises == ("critic" in svg.get("aria-label"))


def test_long_runs_keep_first_and_last_point_and_a_small_page(tmp_path):
    page = write_report(tmp_path / "r.html", "t", records(20_000)).read_text()
    assert len(page) < 400_000 and "step 0:" in page and "step 19999:" in page


def test_a_browser_shows_the_report(tmp_path):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        skip_or_fail("no chromium in PATH")
    path = write_report(tmp_path / "r.html", "A run", records(), [AnswerComparison("1+1=", "3", "2", "2", 0.0, 1.0)])
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    size = subprocess.run(
        [*command, f"--screenshot={tmp_path}/shot.png", "--window-size=800,600", path.as_uri()],
        capture_output=True,
        timeout=120,
    )
    assert (tmp_path / "shot.png").exists(), size.stderr.decode()[-2000:]
    from PIL import Image

    image = Image.open(tmp_path / "shot.png").convert("RGB")
    assert image.size == (800, 600) and len(image.getcolors(800 * 600)) > 20  # text and lines, not a blank page
