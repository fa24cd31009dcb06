"""Rows of data files: every format, and every complaint with its file and row."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.data.data_files import FileRows
from verl.utils.errors import DataError

ROWS = [{"a": i, "nested": {"x": [i, i + 1]}} for i in range(5)]


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows, indent=1))
    return path


@pytest.mark.parametrize("name", ["r.parquet", "r.jsonl", "r.json"])
def test_every_format_gives_the_same_rows_by_number_and_in_order(tmp_path, name):
    rows = FileRows(str(write(tmp_path / name, ROWS)))
    assert list(rows) == ROWS
    assert [rows[i] for i in range(len(rows))] == ROWS


def test_json_suffix_may_hold_one_object_per_line(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert list(FileRows(path)) == ROWS


def test_several_files_follow_each_other_and_rows_know_their_file(tmp_path):
    first, second = write(tmp_path / "a.parquet", ROWS[:3]), write(tmp_path / "b.jsonl", ROWS[3:])
    rows = FileRows([str(first), str(second)])
    assert list(rows) == ROWS and rows[3] == ROWS[3]
    assert rows.location(2) == f"{first} row 2 (the first is 0)"
    assert rows.location(4) == f"{second} line 2"


def test_line_numbers_count_blank_lines(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"a": 1}\n\n\n{"a": 2}\n')
    assert FileRows(path).location(1) == f"{path} line 4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a": 2,}\n', "line 2: not valid JSON"),
        ('{"a": 1}\n\n[1, 2]\n', "line 3: expected an object, found [1, 2]"),
        ('[{"a": 1},\n 7]', "row 1 (the first is 0): expected an object, found 7"),
        ('[{"a": 1},\n {]', "line 2: not valid JSON"),
        ("\n", "no rows"),
        ('{"a": 1}\n{"a": ' + "[" * 100 + "]" * 100 + "}", "line 2 nests lists or objects more than 100 deep"),
        ('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}", "line 1 nests lists or objects more than 100 deep"),
        ('[{"a": ' + '{"b":' * 10_000 + "1" + "}" * 10_000 + "}]", "a row nests lists or objects more than 100 deep"),
        ('{"a": "\\ud83d\\ude00"}\n{"a": ["\\uD83D"]}', r"line 2: '\ud83d' is half of a surrogate pair"),
        (r'[{"a": "\udc00"}]', r"row 0 (the first is 0): '\udc00' is half"),
    ],
)
def test_a_broken_json_file_is_named_with_the_place(tmp_path, text, message):
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        FileRows(path)
    assert str(path) in str(error.value) and message in str(error.value)


def test_a_torn_parquet_file_is_named(tmp_path):
    path = write(tmp_path / "r.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"r\.parquet cannot be read as parquet"):
        FileRows(path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("train.parqet", r"does not exist; did you mean 'train.parquet'"),
        ("nowhere/x.jsonl", "folder .*nowhere does not exist"),
        ("", r"is a folder; give the data files inside it \(there: train.parquet\)"),
        ("notes.txt", "unknown suffix '.txt'; known: .json, .json.gz, .jsonl, .jsonl.gz, .parquet"),
    ],
)
def test_a_path_that_cannot_be_used_says_what_to_give_instead(tmp_path, given, message):
    write(tmp_path / "train.parquet", ROWS)
    (tmp_path / "notes.txt").write_text("hi")
    with pytest.raises(DataError, match=message):
        FileRows(tmp_path / given)


def test_remote_files_and_empty_lists_are_refused():
    with pytest.raises(DataError, match="remote files are not supported"):
        FileRows("hdfs://host/x.parquet")
    with pytest.raises(DataError, match="no data files"):
        FileRows([])


def test_the_digest_follows_content_and_order_but_not_the_place(tmp_path):
    (tmp_path / "moved").mkdir()
    a, b = write(tmp_path / "a.jsonl", ROWS[:2]), write(tmp_path / "b.jsonl", ROWS[2:])
    moved = write(tmp_path / "moved" / "c.jsonl", ROWS[:2])
    assert FileRows([a, b]).digest == FileRows([moved, b]).digest
    assert FileRows([a, b]).digest != FileRows([b, a]).digest
    write(moved, ROWS[1:3])
    assert FileRows([a, b]).digest != FileRows([moved, b]).digest


def test_compressed_lines_are_the_same_rows_and_a_cut_file_is_named(tmp_path):
    write(tmp_path / "train.jsonl", ROWS)
    packed = gzip.compress((tmp_path / "train.jsonl").read_bytes())
    (tmp_path / "train.jsonl.gz").write_bytes(packed)
    assert list(FileRows(tmp_path / "train.jsonl.gz")) == list(FileRows(tmp_path / "train.jsonl"))
    for content in (packed[:-10], b"{}"):
        (tmp_path / "cut.jsonl.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"cut\.jsonl\.gz cannot be unpacked"):
            FileRows(tmp_path / "cut.jsonl.gz")
