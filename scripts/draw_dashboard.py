"""Draw a dashboard of examples/monitoring as a PNG, from what a Prometheus answers to the queries of its panels.

Run as `python -m scripts.draw_dashboard URL NAME PICTURE [MINUTES]` while that Prometheus runs; needs Chromium. It
draws what the panels show, not Grafana's own look; not part of `make docs`.
"""

import html
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from scripts import dashboards
from verl.observe.svg_curves import BOTTOM, GEOMETRY, HEIGHT, LEFT, WIDTH, Frame

COLORS = ("#2a66b8", "#c4560e", "#17734a", "#8b3fb0", "#a8362c", "#57606a", "#0b8a9c", "#9a7b00")
NUM_POINTS, MOST_SERIES = 120, 8
STYLE = """
body { margin: 0; padding: 20px; width: 1160px; font: 14px/1.4 system-ui, sans-serif; background: #f4f5f5; }
h1 { font-size: 20px; margin: 0 0 14px; } main { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
article { background: #fff; border: 1px solid #dcdee0; border-radius: 4px; padding: 10px 12px; }
h2 { font-size: 14px; margin: 0; } svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: #62676d; }
ul { margin: 2px 0 0; padding: 0; list-style: none; display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12px; }
li::before { content: ""; display: inline-block; width: 9px; height: 9px; margin-right: 5px; background: var(--c); }
"""
Points = list[tuple[float, float]]


def series_of(url: str, query: str, legend: str, minutes: float) -> dict[str, Points]:
    """Seconds since the beginning, and value, of each series by its legend."""
    end = time.time()
    asked = {"query": query, "start": end - 60 * minutes, "end": end, "step": 60 * minutes / NUM_POINTS}
    with urlopen(f"{url}/api/v1/query_range?{urlencode(asked)}", timeout=30) as answer:
        found = json.load(answer)["data"]["result"]
    out: dict[str, Points] = {}
    for series in found:
        name = legend
        for label, value in series["metric"].items():
            name = name.replace("{{" + label + "}}", value)
        points = [(float(at) - asked["start"], float(value)) for at, value in series["values"]]
        out[name] = [(x, y) for x, y in points if y == y]
    return {name: points for name, points in out.items() if points}


def parts_of(points: Points, gap_s: float) -> list[Points]:
    """The points between gaps longer than `gap_s`."""
    parts: list[Points] = []
    for point in points:
        if not parts or point[0] - parts[-1][-1][0] > gap_s:
            parts.append([])
        parts[-1].append(point)
    return parts


def card(title: str, series: dict[str, Points], joined: bool, gap_s: float) -> str:
    """One panel as HTML; the largest of many series. Lines end at gaps longer than `gap_s`, unless `joined`."""
    head = f"<article><h2>{html.escape(title)}</h2>"
    if not series:
        return head + "<p>No data</p></article>"
    shown = dict(sorted(series.items(), key=lambda item: -max(y for _, y in item[1]))[:MOST_SERIES])
    everything = [point for points in shown.values() for point in points]
    frame = Frame([x for x, _ in everything], [y for _, y in everything])
    lines = []
    for y, label in frame.y_ticks:
        lines.append(f'<line x1="{LEFT}" x2="{GEOMETRY["right"]}" y1="{y}" y2="{y}" stroke="#e6e7e8"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{label}</text>')
    for x, at, anchor in ((LEFT, frame.x_low, "start"), (GEOMETRY["right"], frame.x_high, "end")):
        lines.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="{anchor}">{at - frame.x_low:.0f} s</text>')
    for color, points in zip(COLORS, shown.values(), strict=False):
        for part in [points] if joined else parts_of(points, gap_s):
            if len(part) == 1:
                x, y = frame.pixel(*part[0])
                lines.append(f'<circle cx="{x}" cy="{y}" r="2" fill="{color}"/>')
            lines.append(f'<path d="{frame.path(part)}" fill="none" stroke="{color}" stroke-width="1.8"/>')
    names = zip(COLORS, shown, strict=False)
    items = "".join(f'<li style="--c: {color}">{html.escape(name)}</li>' for color, name in names)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(lines)}</svg>'
    return f"{head}{svg}<ul>{items}</ul></article>"


def page(url: str, name: str, minutes: float) -> str:
    made: dict[str, Any] = dashboards.dashboard(name)
    cards = []
    for panel in made["panels"]:
        target = panel["targets"][0]
        query = target["expr"].replace("$experiment", ".*")
        joined = panel["fieldConfig"]["defaults"]["custom"]["spanNulls"]
        series = series_of(url, query, target["legendFormat"], minutes)
        cards.append(card(panel["title"], series, joined, 1.5 * 60 * minutes / NUM_POINTS))
    head = f'<!doctype html><meta charset="utf-8"><style>{STYLE}</style><h1>{html.escape(made["title"])}</h1>'
    return f"{head}<main>{''.join(cards)}</main>"


def draw(text: str, picture: Path, height: int) -> None:
    """Let Chromium draw the page."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("there is no chromium in PATH: bash .ci/install_system_packages.sh")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "page.html").write_text(text)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/p"]
        options += [f"--screenshot={picture.absolute()}", f"--window-size=1200,{height}"]
        subprocess.run([browser, *options, f"file://{folder}/page.html"], check=True, capture_output=True, timeout=120)
    from PIL import Image

    Image.open(picture).convert("RGB").quantize(128).save(picture, optimize=True)


if __name__ == "__main__":
    address, which, target, *more = sys.argv[1:]
    rows = (len(dashboards.DASHBOARDS[which][1]) + 1) // 2
    draw(page(address, which, float(more[0]) if more else 60.0), Path(target), 60 + 328 * rows)
