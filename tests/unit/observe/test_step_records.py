"""Records of steps in a run's folder: what is damaged is left out and said, and stops nothing."""

import json
from pathlib import Path

import pytest

from verl.observe.step_records import REPLICAS_FILE, append_record, drop_records_after, read_records

GOOD = json.dumps({"step": 1, "lost": 0, "replicas": []}).encode()


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b"[" * 100_000, b"[1]", b"7", b'{"stop": 1}', b'{"step": "x"}', b'{"step": 1e999}', b'{"ste']
)
def test_a_line_that_is_no_record_is_said_and_left_out(line: bytes, tmp_path: Path, caplog):
    file = tmp_path / REPLICAS_FILE
    file.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD + b"\n" + b'{"st')
    assert [record["step"] for record in read_records(file)] == [1, 1]
    drop_records_after(tmp_path, 1)
    assert file.read_bytes() == (GOOD + b"\n") * 2
    assert "1 lines are no records, the first is line 2" in caplog.records[0].getMessage()


def test_a_folder_in_the_place_of_a_file_is_said(tmp_path: Path, caplog):
    (tmp_path / REPLICAS_FILE).mkdir()
    drop_records_after(tmp_path, 3)
    append_record(tmp_path / REPLICAS_FILE, {"step": 4})
    assert ["is a folder" in r.getMessage() or "cannot be written" in r.getMessage() for r in caplog.records] == [
        True
    ] * 2


def test_a_dangling_link_is_as_if_nothing_were_there(tmp_path: Path):
    (tmp_path / REPLICAS_FILE).symlink_to(tmp_path / "gone")
    assert read_records(tmp_path / REPLICAS_FILE) == []
    drop_records_after(tmp_path, 3)
