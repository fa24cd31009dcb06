"""How long tests take: what is measured, and the page that is made of it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import slowest_tests
from tests.processor_times import tree_s

BURN = "import time\nwhile time.process_time() < 0.4: pass"


def test_processor_time_counts_this_process_its_children_and_those_that_ended():
    before = tree_s(os.getpid())
    subprocess.run([sys.executable, "-S", "-c", BURN], check=True)
    ended = tree_s(os.getpid())
    assert ended - before >= 0.38  # the system counts in ticks of 0.01 s
    with subprocess.Popen([sys.executable, "-S", "-c", f"{BURN}\ninput()"], stdin=subprocess.PIPE) as running:
        deadline = time.monotonic() + 60
        while tree_s(os.getpid()) - ended < 0.38:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        running.communicate(b"\n")


CASES = """<testsuites><testsuite>
  <testcase classname="tests.unit.data.test_a" name="test_one[x]" time="70">
    <properties><property name="processor_s" value="30"/></properties></testcase>
  <testcase classname="tests.unit.data.test_a" name="test_two" time="5">
    <properties><property name="processor_s" value="6"/></properties></testcase>
  <testcase classname="tests.e2e.test_b" name="test_three" time="20">
    <properties><property name="processor_s" value="60"/></properties></testcase>
  <testcase classname="tests.e2e.test_b" name="test_four" time="9"><skipped/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def page(tmp_path: Path) -> str:
    (tmp_path / "times.xml").write_text(CASES)
    return slowest_tests.page(slowest_tests.times(str(tmp_path / "times.xml")))


def test_the_page_sums_minutes_by_kind_and_sorts_tests_and_files(page: str):
    assert "| e2e | 1 | 1.0 | 0.3 |\n| unit | 2 | 0.6 | 1.2 |\n| all | 3 | 1.6 | 1.6 |" in page
    first, second = (part.split("|--:|--:|---|\n")[1] for part in page.split("## ")[1:])
    assert first.startswith(
        "| 60 | 20 | `e2e/test_b.py::test_three` |\n| 30 | 70 | `unit/data/test_a.py::test_one[x]` |"
    )
    assert second == "| 60 | 20 | `e2e/test_b.py` |\n| 36 | 75 | `unit/data/test_a.py` |\n"
