"""The record of a soak goes on where it stopped."""

import json
from pathlib import Path

import pytest

from scripts.soak import tests as soak_tests
from scripts.soak.progress import Progress


@pytest.mark.parametrize("keep_older", [False, True])
def test_counts_of_other_code_are_kept_only_where_asked(tmp_path: Path, keep_older: bool):
    first = Progress("part", tmp_path, "aaa", keep_older)
    first.record("one", 2, faults=0)
    first.record("one", 3, faults=1)
    assert Progress("part", tmp_path, "aaa", keep_older).done("one") == 5
    later = Progress("part", tmp_path, "bbb", keep_older)
    assert later.done("one") == (5 if keep_older else 0) and later.done("two") == 0
    later.record("two", 1)
    written = json.loads((tmp_path / "part.json").read_text())
    assert written["commit"] == "bbb" and list(written["cases"]) == ["one", "two"][not keep_older :]
    if keep_older:
        assert [case["commit"] for case in written["cases"].values()] == ["aaa", "bbb"]
        assert written["cases"]["one"]["faults"] == 1


def test_what_is_forgotten_is_done_again(tmp_path: Path):
    progress = Progress("part", tmp_path, "aaa")
    progress.record("one", 1)
    progress.record("two", 1)
    progress.forget(["one"])
    progress.record("three", 1)
    assert [Progress("part", tmp_path, "aaa").done(case) for case in ("one", "two", "three")] == [0, 1, 1]


def test_each_file_of_a_group_has_its_own_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = {
        "test_passes.py": "import pytest\n\ndef test_a(): pass\n\ndef test_b(): pass\n\ndef test_c(): pytest.skip()\n",
        "test_fails.py": "def test_a(): pass\n\ndef test_b(): assert False\n",
        "test_skips.py": "import pytest\n\npytestmark = pytest.mark.skip\n\ndef test_a(): pass\n",
        "test_ends.py": "import os\n\ndef test_a(): os._exit(1)\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(soak_tests, "ROOT", tmp_path)
    assert soak_tests.passed_tests(list(files), "not gpu", {})[0] == dict(zip(files, (2, None, 0, None), strict=True))
    (tmp_path / "test_passes.py").write_text("def test_a(:\n")
    assert soak_tests.passed_tests(["test_passes.py"], "not gpu", {})[0] == {"test_passes.py": None}
