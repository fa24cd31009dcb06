"""The timeline of an asynchronous run: bars where and as long as the events say."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from verl.observe.async_timeline import LEFT, WIDTH, draw_timeline, read_timeline
from verl.observe.events import EventLog, read_events
from verl.observe.html_report import RunData, write_page
from verl.observe.served_requests import GroupRequests, served_by

# Two prompts under version 0; prompt 0 is trained from 3 to 5; prompt 1 goes on and ends under version 1; 2 is lost.
EVENTS = [
    {"time": 0.0, "event": "publish", "version": 0},
    {"time": 0.0, "event": "admitted", "group": 0, "version": 0},
    {"time": 1.0, "event": "admitted", "group": 1, "version": 0},
    {"time": 2.0, "event": "answered", "group": 0, "segments": [[[0, 9]], [[0, 4]]]},
    {"time": 3.0, "event": "take", "version": 0, "groups": [0], "ages": [0]},
    {"time": 5.0, "event": "publish", "version": 1},
    {"time": 6.0, "event": "admitted", "group": 2, "version": 1},
    {"time": 8.0, "event": "answered", "group": 1, "segments": [[[0, 9], [1, 3]]]},
    {"time": 9.0, "event": "resumed", "version": 1, "groups": []},
    {"time": 10.0, "event": "publish", "version": 1},
]


def spans(bars: list) -> list[tuple[float, float, int]]:
    second = (WIDTH - LEFT) / 10
    return [(round((b.x - LEFT) / second, 6), round(b.width / second, 6), b.version) for b in bars]


def test_bars_are_where_the_events_say():
    line = draw_timeline(EVENTS)
    assert line is not None
    assert spans(line.trainer) == [(3, 2, 0)]
    by_prompt = {n: [b for b in line.prompts if b.title.startswith(f"prompt {n}:")] for n in range(3)}
    assert spans(by_prompt[0]) == [(0, 2, 0)]
    assert spans(by_prompt[1]) == [(1, 4, 0), (5, 3, 1)]
    assert spans(by_prompt[2]) == [(6, 2, 1)] and by_prompt[2][0].title.endswith("lost with its process")
    assert by_prompt[1][0].title.endswith("tokens 9 by 0, 3 by 1")
    assert by_prompt[0][0].y == by_prompt[2][0].y != by_prompt[1][0].y  # a row is used again, never at once


# Prompt 0 is served by replica 1, then by both until it is parked; the process is lost at 8 and prompt 1 goes on at 0.
ON_REPLICAS = [
    {"time": 0.0, "event": "publish", "version": 0},
    {"time": 0.0, "event": "admitted", "group": 0, "version": 0},
    {"time": 0.0, "event": "admitted", "group": 1, "version": 0},
    {"time": 1.0, "event": "sent", "group": 0, "replica": 1},
    {"time": 2.0, "event": "sent", "group": 0, "replica": 0},
    {"time": 3.0, "event": "returned", "group": 0, "replica": 1},
    {"time": 4.0, "event": "returned", "group": 0, "replica": 0},
    {"time": 4.0, "event": "answered", "group": 0, "segments": [[[0, 4]], [[0, 9], [1, 2]]]},
    {"time": 4.0, "event": "take", "version": 0, "groups": [0], "ages": [0]},
    {"time": 5.0, "event": "publish", "version": 1, "pause_s": 0.5},
    {"time": 5.0, "event": "stages", "stages": [["adv", 4.0, 0.25], ["update_actor", 4.25, 0.5], ["step", 0.0, 5.0]]},
    {"time": 6.0, "event": "sent", "group": 1, "replica": 1},
    {"time": 8.0, "event": "admitted", "group": 2, "version": 1},
    {"time": 9.0, "event": "resumed", "version": 1, "groups": [1]},
    {"time": 9.0, "event": "sent", "group": 1, "replica": 0},
    {"time": 10.0, "event": "publish", "version": 1, "pause_s": 0.25},
]


def test_each_replica_has_a_lane_with_its_prompts_and_pauses():
    line = draw_timeline(ON_REPLICAS)
    assert line is not None
    first, second = line.lanes
    assert (first.name, second.name) == ("replica 0", "replica 1")
    assert spans(first.prompts) == [(2, 2, 0), (9, 1, 1)]
    assert spans(second.prompts) == [(1, 2, 0), (6, 2, 1)]
    assert first.prompts[0].title == "prompt 0: version 0, tokens 9 by 0, 2 by 1; 4 by 0"
    for lane in line.lanes:
        assert [(x, width) for x, width, _ in spans(lane.pauses)] == [(4.5, 0.5), (9.75, 0.25)]
        assert all(lane.top <= b.y and b.y + b.height <= lane.top + lane.height for b in (*lane.prompts, *lane.pauses))
    assert first.top + first.height < second.top and second.top + second.height < line.height


def test_the_trainer_has_its_stages_below_its_bar():
    line = draw_timeline(ON_REPLICAS)
    assert line is not None and line.stage_names == ["update_actor", "adv"]  # the longest first; a step holds both
    assert [(line.stage_names[bar.stage], *spans([bar])[0][:2]) for bar in line.stages] == [
        ("adv", 4, 0.25), ("update_actor", 4.25, 0.5),
    ]  # fmt: skip
    trained = line.trainer[0].y + line.trainer[0].height
    assert all(trained < bar.y and bar.y + bar.height < line.lanes[0].top for bar in line.stages)


def test_a_group_is_at_a_replica_from_its_first_request_there_to_its_last(tmp_path: Path):
    """Requests of tasks that a task starts are its own; those of other tasks are nobody's."""

    async def request(replica: int, until: asyncio.Event) -> None:
        with served_by(replica):
            await until.wait()

    async def group(number: int, ends: list[asyncio.Event]) -> None:
        GroupRequests(events, number).follow()
        await asyncio.gather(*(request(replica, end) for replica, end in zip((0, 0, 1), ends, strict=True)))

    async def run() -> None:
        ends = [asyncio.Event() for _ in range(3)]
        running = [asyncio.create_task(group(7, ends)), asyncio.create_task(request(3, ends[0]))]
        for end in (None, *ends):
            if end is not None:
                end.set()
            for _ in range(5):
                await asyncio.sleep(0)
            events.add("later")
        await asyncio.gather(*running)

    events = EventLog(tmp_path / "events.jsonl")
    asyncio.run(run())
    events.write()
    found = [(e["event"], e.get("group"), e.get("replica")) for e in read_events(tmp_path / "events.jsonl")]
    later = ("later", None, None)
    assert found == [
        ("sent", 7, 0), ("sent", 7, 1), later, later, ("returned", 7, 0), later, ("returned", 7, 1), later,
    ]  # fmt: skip


def test_only_the_last_versions_are_shown():
    line = draw_timeline(EVENTS, max_steps=2)
    assert line is not None
    assert not line.trainer and {b.version for b in line.prompts} == {1}
    assert min(b.x for b in line.prompts) == LEFT and max(b.x + b.width for b in line.prompts) <= WIDTH


def test_without_events_there_is_no_timeline(tmp_path: Path):
    assert draw_timeline([]) is None and read_timeline(tmp_path) is None and read_timeline(None) is None


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    records = [{"step": step, "data": {"critic/score/mean": step / 4}} for step in range(1, 4)]
    run = RunData("a run", records, timeline=read_timeline(tmp_path))
    return write_page(tmp_path / "report.html", "A run", [run])


def test_a_browser_draws_each_version_in_its_colour(page: Path, tmp_path: Path):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        skip_or_fail("no chromium in PATH")
    shot = tmp_path / "shot.png"
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command += [f"--screenshot={shot}", "--window-size=1100,1000", page.as_uri()]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    from PIL import Image

    colours = Image.open(shot).convert("RGB").getcolors(1100 * 1000)
    assert colours is not None
    for expected in ((204, 51, 51), (51, 204, 94)):  # hsl(0 60% 50%) and hsl(137 60% 50%)
        assert sum(n for n, c in colours if max(abs(a - b) for a, b in zip(c, expected, strict=True)) < 4) > 100
